"""Kernels of accelerators, in Triton's interpreter on CPU tensors."""
