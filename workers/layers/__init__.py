"""The layers models are built from."""
