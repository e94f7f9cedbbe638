"""min-p, top-k, top-p against brute force."""

import pytest
import torch

from vllm.v1.sample.filters import apply_min_p, apply_top_k, apply_top_p


def random_logits(seed: int, rows: int, vocab: int, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return logits.round() if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_top_k(seed: int, ties: bool) -> None:
    logits = random_logits(seed, 8, 50, ties=ties)
    top_k = torch.tensor([1, 2, 3, 5, 10, 20, 49, 50])
    kept = apply_top_k(logits, top_k, 50)
    for row, k, result in zip(logits.tolist(), top_k.tolist(), kept, strict=True):
        floor = sorted(row, reverse=True)[k - 1]
        expected = [value >= floor for value in row]
        assert result.isfinite().tolist() == expected
        if not ties:
            assert sum(expected) == k


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("candidates", [1, 3, 50, 128])
@pytest.mark.parametrize("seed", range(5))
def test_top_p(seed: int, candidates: int, ties: bool) -> None:
    probs = random_logits(seed, 8, 50, ties=ties).softmax(-1)
    top_p = torch.tensor([0.001, 0.1, 0.3, 0.5, 0.71, 0.9, 0.99, 0.999])
    kept = apply_top_p(probs, top_p, num_candidates=candidates)
    for row, p, result in zip(probs, top_p.tolist(), kept, strict=True):
        values = sorted(row.double().tolist(), reverse=True)
        mass, floor = 0.0, values[0]
        for value in values:
            if mass >= p:
                break
            mass, floor = mass + value, value
        expected = row.double() >= floor
        assert torch.equal(result > 0, expected)
        assert torch.equal(result[expected], row[expected])


@pytest.mark.parametrize("seed", range(5))
def test_min_p(seed: int) -> None:
    logits = random_logits(seed, 6, 40)
    min_p = torch.tensor([0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
    kept = apply_min_p(logits, min_p)
    for row, p, result in zip(logits.double().softmax(-1), min_p.tolist(), kept, strict=True):
        # Away from the edge: fp32 and fp64 may disagree on it.
        threshold = p * float(row.max())
        assert bool(((row < threshold * (1 - 1e-5)) <= ~result.isfinite()).all())
        assert bool(((row > threshold * (1 + 1e-5)) <= result.isfinite()).all())
        assert result.isfinite()[row.argmax()]


def test_filters_accept_what_an_earlier_one_dropped() -> None:
    logits = torch.tensor([[3.0, 2.0, -torch.inf, -torch.inf]])
    assert torch.equal(apply_top_k(logits, torch.tensor([3]), 3), logits)
    probs = logits.softmax(-1)
    assert torch.equal(apply_top_p(probs, torch.tensor([0.999999])), probs)
