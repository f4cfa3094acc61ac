"""The one check for the minutes when a GPU is at hand; dry-runs on a CPU."""
