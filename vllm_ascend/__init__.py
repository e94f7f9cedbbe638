"""The Ascend NPU tree, found by its entry point; ``vllm`` never imports it."""
