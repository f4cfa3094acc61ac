"""What the compiler makes of every GPU kernel that ships, without a GPU."""
