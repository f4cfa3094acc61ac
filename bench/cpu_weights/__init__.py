"""What the number formats of CPU weights cost in quality."""
