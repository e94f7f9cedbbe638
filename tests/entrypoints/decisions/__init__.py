"""Tests of vllm/entrypoints/decisions."""
