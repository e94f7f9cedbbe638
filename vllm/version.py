"""The version of this distribution and how it introduces itself."""

__version__ = "0.2.0"

ENGINE_NAME = "hybrid-cache engine"

BANNER = (
    f"vllm {__version__} ({ENGINE_NAME}; an independent implementation, "
    "not the vllm-project's engine)"
)
