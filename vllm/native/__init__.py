"""The native CPU kernels of ``csrc/``: the library, its structs, and models on them."""
