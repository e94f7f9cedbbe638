"""DeepSeek-V4's ops on an NPU: torch_npu calls where they mean the same, aten otherwise."""
