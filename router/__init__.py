"""The front door: who may ask, what is asked, and which replica answers."""
