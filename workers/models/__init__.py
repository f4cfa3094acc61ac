"""Model definitions, one decoder for each family."""
