"""The Ascend NPU tree. Empty so far: nothing here runs yet, and `vllm` never imports it."""
