"""The recurrence's kernel against torch's: every shape, any cut, equal bits in every build."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.test_library import builds, make_context
from vllm.v1.attention.ops.recurrent import gated_delta_scan

Inputs = list[torch.Tensor]


def draw_inputs(
    count: int, key_heads: int, repeats: int, key_dim: int, value_dim: int, by_channel: bool
) -> tuple[Inputs, torch.Tensor]:
    """Returns queries, keys, values, logarithms of decays and betas, and a state."""
    sizes = (count, key_heads, repeats, key_dim, value_dim)
    generator = torch.Generator().manual_seed(hash(sizes))
    heads = key_heads * repeats

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    logs = draw(count, heads, *([key_dim] if by_channel else []))
    inputs = [
        draw(count, key_heads, key_dim),
        draw(count, key_heads, key_dim) * 3,
        draw(count, heads, value_dim),
        -logs.exp(),
        draw(count, heads).sigmoid(),
    ]
    return inputs, draw(heads, key_dim, value_dim)


@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=20)
@given(
    count=st.integers(1, 20),
    key_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    value_dim=st.integers(1, 150),
    by_channel=st.booleans(),
)
def test_numbers_are_those_of_the_reference(
    build: str,
    count: int,
    key_heads: int,
    repeats: int,
    key_dim: int,
    value_dim: int,
    by_channel: bool,
) -> None:
    inputs, state = draw_inputs(count, key_heads, repeats, key_dim, value_dim, by_channel)
    expected_state, own = state.clone().double(), state.clone()
    expected = gated_delta_scan(*(part.double() for part in inputs), expected_state)
    outputs = make_context(1, build).gated_delta(*inputs, own)
    for found, reference in ((outputs, expected), (own, expected_state)):
        limit = 1e-5 * max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(found.double(), reference, atol=limit, rtol=0)
    # Cut anywhere, on more threads: the same bits.
    cut = random.Random(count * value_dim).randint(0, count)
    context, resumed = make_context(2, build), state.clone()
    parts = [
        context.gated_delta(*(part[rows].contiguous() for part in inputs), resumed)
        for rows in (slice(0, cut), slice(cut, count))
        if rows.stop > rows.start
    ]
    assert torch.equal(torch.cat(parts), outputs)
    assert torch.equal(resumed, own)


@pytest.mark.parametrize("by_channel", [False, True])
def test_all_vector_builds_give_the_same_bits(by_channel: bool) -> None:
    inputs, state = draw_inputs(5, 2, 2, 37, 131, by_channel)
    results = []
    for build in builds():
        context = make_context(1, build)
        for size in (5, 1):  # all at once, and one by one, as in decode
            own = state.clone()
            parts = zip(*(part.split(size) for part in inputs), strict=True)
            results.append((torch.cat([context.gated_delta(*part, own) for part in parts]), own))
    assert len(results) > 2
    for outputs, own in results[1:]:
        assert torch.equal(outputs, results[0][0])
        assert torch.equal(own, results[0][1])


def test_what_is_no_number_stays_in_its_head() -> None:
    inputs, state = draw_inputs(3, 2, 2, 16, 24, False)
    expected = make_context(1).gated_delta(*inputs, state.clone())
    state[1] = math.nan
    outputs = make_context(1).gated_delta(*inputs, state)
    assert outputs[:, 1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(outputs[:, others], expected[:, others])
