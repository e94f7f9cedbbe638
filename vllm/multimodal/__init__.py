"""Multimodal inputs, as far as scheduling and hashing need them."""
