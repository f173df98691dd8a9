"""The decode step on CUDA."""
