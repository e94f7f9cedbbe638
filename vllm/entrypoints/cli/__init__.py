"""The ``vllm`` command."""
