"""How near a kernel must come to its reference."""

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_near(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None
) -> None:
    """Compares by relative distance of the whole; NaN and other shapes or types never pass."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    bound = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    distance = (found.double() - expected.double()).norm()
    assert distance <= bound * expected.double().norm(), float(distance)
