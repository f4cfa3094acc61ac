"""What one engine step costs beside the model."""
