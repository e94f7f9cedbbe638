"""Integer arithmetic."""

import math

from vllm.utils.math_utils import cdiv


def test_cdiv_rounds_up() -> None:
    for a in range(-20, 40):
        for b in range(1, 9):
            assert cdiv(a, b) == math.ceil(a / b)
