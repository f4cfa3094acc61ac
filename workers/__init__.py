"""The engine: everything between a token-id request and its token events."""
