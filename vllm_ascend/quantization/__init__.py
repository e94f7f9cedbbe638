"""Quantised checkpoints on an NPU: ModelSlim's w8a8."""
