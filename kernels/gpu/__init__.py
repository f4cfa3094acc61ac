"""Triton kernels for CUDA devices; each has its torch twin in `kernels.reference`."""
