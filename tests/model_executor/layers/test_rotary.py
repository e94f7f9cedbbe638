"""Rotary frequencies against the formulas, value by value."""

import math

import pytest
import torch

from vllm.model_executor.layers.rotary import compute_turns, plain_frequencies, yarn_frequencies

CPU = torch.device("cpu")


def test_plain() -> None:
    expected = [10_000 ** (-2 * k / 8) for k in range(4)]
    assert plain_frequencies(10_000.0, 8, CPU).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("dim", "original"), [(64, 65536), (8, 256), (4, 16)])
def test_yarn(dim: int, original: int) -> None:
    theta, factor = 160_000.0, 16.0

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    expected = []
    for k in range(dim // 2):
        ramp = min(max((k - low) / max(high - low, 0.001), 0), 1)
        expected.append(theta ** (-2 * k / dim) * (ramp / factor + 1 - ramp))
    got = yarn_frequencies(theta, dim, factor, original, 32.0, 1.0, CPU)
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
    assert got[0] == 1.0 or low == high == 0


def test_turns() -> None:
    turns = compute_turns(torch.tensor([0, 3]), torch.tensor([1.0, 0.5]))
    assert turns.rows.shape == (2, 2)
    assert turns.heads.shape == turns.inverse_heads.shape == (2, 1, 2)
    assert turns.rows[1, 1].real.item() == pytest.approx(math.cos(1.5))
    torch.testing.assert_close(turns.heads * turns.inverse_heads, torch.ones_like(turns.heads))
    assert not turns.inverse_heads.is_conj()
