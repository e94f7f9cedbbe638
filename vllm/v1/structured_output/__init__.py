"""Output constrained by a grammar."""

from vllm.v1.structured_output.manager import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

__all__ = ["StructuredOutputManager", "StructuredOutputRequest"]
