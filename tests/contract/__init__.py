"""What code written against vLLM 0.23's ``v1/core`` relies on: docs/compat.md."""
