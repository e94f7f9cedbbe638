"""What the engine process needs and the front end does not import: told before anything starts."""

import importlib.util

from vllm.exceptions import ConfigError

# Module -> what to install.
_NEEDED = {"torch": "torch", "safetensors": "safetensors", "numpy": "numpy"}


def check_needed_packages() -> None:
    """Refuse to start without what the engine process is about to import.

    Such an installation comes of ``pip install --no-deps``, or of an interpreter that is another
    than pip's.

    Raises:
        ConfigError: A package is missing.
    """
    missing = [package for name, package in _NEEDED.items() if not _is_there(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} cannot be found, and the engine needs it: run "
            f"'pip install {' '.join(missing)}', or install this package again without --no-deps. "
            "On a machine without a GPU, 'pip install torch --index-url' with PyTorch's CPU index "
            "saves gigabytes."
        )


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
