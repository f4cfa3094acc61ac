"""The programs that are measured, each in a process and an environment of its own."""
