"""The `pando` command, one file a verb."""
