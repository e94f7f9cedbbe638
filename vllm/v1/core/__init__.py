"""The scheduler and the KV cache: ints, hashes and blocks, no torch."""
