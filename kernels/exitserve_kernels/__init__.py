"""Triton kernels of exitserve with their PyTorch references."""
