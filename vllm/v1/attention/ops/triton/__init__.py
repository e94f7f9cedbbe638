"""The engine's ops in Triton: compiled on a GPU, interpreted on CPU tensors for tests.

Only a platform that runs them imports this package: it loads triton.
"""
