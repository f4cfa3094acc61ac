"""What KV memory costs and saves."""
