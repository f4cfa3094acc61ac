"""Pando's bare engine beside vLLM and transformers, on one machine, in one run."""
