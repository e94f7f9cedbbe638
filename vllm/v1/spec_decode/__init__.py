"""Drafters for speculative decoding."""
