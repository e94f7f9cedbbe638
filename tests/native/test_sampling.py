"""Drawing tokens natively: what the plain rule draws, whatever else is in the batch."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.test_library import builds, make_context
from vllm.exceptions import InvariantError
from vllm.native.library import NativeContext
from vllm.native.sampling import draw_tokens, forbid_tokens
from vllm.native.structs import Draws
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.counter_rng import make_key
from vllm.v1.sample.edits import RowMask
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import SamplerOutput, find_highest, sample

# Where a sum may be rounded otherwise.
SLACK = 1e-5


def run(
    context: NativeContext, logits: torch.Tensor, params: list[SamplingParams], position: int = 7
) -> SamplerOutput:
    rows = [RowSampling(p, make_key(p.seed or 0), 0) for p in params]
    metadata = SamplingMetadata.build(rows, logits.shape[-1], "cpu")
    positions = np.full(len(params), position)
    return sample(logits.clone(), metadata, positions, draw=partial(draw_tokens, context))


def draw_one(context: NativeContext, row: torch.Tensor, uniform: float, **options: float) -> int:
    """Draw from one row with a chosen number."""
    vocab_size = len(row)
    at = np.zeros(1, dtype=np.int64)
    top_k = np.array([options.get("top_k", vocab_size)], dtype=np.int64)
    floats = np.array(
        [options.get(n, d) for n, d in (("temperature", 1), ("min_p", 0), ("top_p", 1))]
        + [uniform],
        dtype=np.float32,
    )
    temperature, min_p, top_p, number = (floats[i:].ctypes.data for i in range(4))
    draws = Draws(1, at.ctypes.data, temperature, min_p, top_k.ctypes.data, top_p, number)
    token_ids = torch.full((1,), -1)
    context.sample(row.clone()[None], draws, token_ids)
    return int(token_ids[0])


def plain_draw(
    row: torch.Tensor, uniform: float, temperature: float, min_p: float, top_k: int, top_p: float
) -> int:
    """Draw by the rule itself, in float64."""
    scaled = (row / torch.tensor(temperature)).double().numpy()
    masses = np.exp(scaled - scaled.max())
    masses[masses < np.exp(-87)] = 0.0  # the end of what a normal float32 holds
    masses[masses < min_p] = 0.0
    masses[scaled < np.sort(np.where(masses > 0, scaled, -np.inf))[-top_k]] = 0.0
    masses /= masses.sum()
    descending = np.sort(masses)[::-1]
    before = np.cumsum(descending) - descending
    masses[masses < descending[before < top_p][-1]] = 0.0
    sums = np.cumsum(masses)
    return int(np.searchsorted(sums, uniform * sums[-1], side="right"))


@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=60)
@given(
    vocab_size=st.integers(1, 700),
    levels=st.sampled_from([2, 9, 100_000]),
    forbidden=st.sampled_from([0.0, 0.5, 0.98]),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.7, 1.0]),
    top_k=st.integers(1, 700),
    top_p=st.sampled_from([1e-6, 0.31, 0.9, 0.999, 1.0]),
    uniform=st.floats(0, 1 - 2**-24, width=32),
    seed=st.integers(0, 2**32 - 1),
)
def test_draws_are_those_of_the_plain_rule(
    build: str,
    vocab_size: int,
    levels: int,
    forbidden: float,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    uniform: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    # Few levels make ties, which all filters keep or drop together.
    row = torch.from_numpy(rng.integers(0, levels, vocab_size) * (8.0 / levels)).float()
    row[torch.from_numpy(rng.random(vocab_size) < forbidden)] = -torch.inf
    row[int(rng.integers(vocab_size))] = 1.5
    top_k = min(top_k, vocab_size)
    found = draw_one(
        make_context(1, build),
        row,
        uniform,
        temperature=temperature,
        min_p=min_p,
        top_k=top_k,
        top_p=top_p,
    )
    near = {
        plain_draw(row, min(max(uniform + by, 0.0), 1 - 2**-24), temperature, low, top_k, high)
        for by in (-SLACK, 0.0, SLACK)
        for low in (min_p * (1 - SLACK), min(min_p * (1 + SLACK), 1.0))
        for high in (top_p * (1 - SLACK), top_p * (1 + SLACK))
    }
    assert found in near
    assert row[found] > -torch.inf


def test_a_row_is_drawn_alike_alone_in_any_batch_and_by_any_thread() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(60, 1003, generator=generator) * 3
    options: list[dict[str, float]] = [
        {},
        {"top_k": 2},
        {"top_p": 0.4},
        {"min_p": 0.3},
        {"temperature": 0.3},
        {"temperature": 0},
        {"top_k": 500, "top_p": 0.9},
        {"logprobs": 3},
        {"temperature": 2.0},
        {"top_p": 0.99, "min_p": 0.01},
    ]
    params = [SamplingParams(seed=i, **options[i % 10]) for i in range(60)]  # type: ignore[arg-type]
    single = make_context(1)
    alone = [int(run(single, logits[i : i + 1], [params[i]]).token_ids[0]) for i in range(60)]
    assert len(set(alone)) > 30
    order = [(i * 37) % 60 for i in range(60)]
    for threads in (1, 2, 4):
        context = make_context(threads)
        assert run(context, logits, params).token_ids.tolist() == alone
        mixed = run(context, logits[order], [params[i] for i in order])
        assert mixed.token_ids.tolist() == [alone[i] for i in order]


def test_greedy_rows_of_a_mixed_batch_take_the_highest() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=i % 2, seed=i) for i in range(9)]
    tokens = run(make_context(2), logits, params).token_ids
    assert tokens[::2].tolist() == find_highest(logits)[::2].tolist()


def test_every_number_finds_a_token_with_mass() -> None:
    context = make_context(1)
    row = torch.full((200,), -torch.inf)
    row[[3, 130, 198]] = torch.tensor([0.5, 0.25, 0.25]).log()
    numbers = [0.0, 0.4999, 0.5001, 0.7499, 0.7501, 1 - 2.0**-24]
    found = [draw_one(context, row, number) for number in numbers]
    assert found == [3, 3, 130, 130, 198, 198]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [slice(None), slice(5, 6)])
def test_logits_that_are_no_numbers_give_some_token(value: float, where: slice) -> None:
    row = torch.randn(90, generator=torch.Generator().manual_seed(1))
    row[where] = value
    for options in ({}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.2}):
        assert 0 <= draw_one(make_context(1), row, 0.5, **options) < 90


@pytest.mark.parametrize(
    ("options", "uniform", "said"),
    [
        ({"temperature": 0.0}, 0.5, "temperature"),
        ({"temperature": torch.nan}, 0.5, "temperature"),
        ({"min_p": 1.5}, 0.5, "min-p"),
        ({"top_p": 0.0}, 0.5, "top-p"),
        ({"top_k": 0}, 0.5, "top-k"),
        ({"top_k": 11}, 0.5, "top-k"),
        ({}, 1.0, "number"),
    ],
)
def test_parameters_out_of_range_are_refused(
    options: dict[str, float], uniform: float, said: str
) -> None:
    with pytest.raises(InvariantError, match=f"draw 0 has a {said}"):
        draw_one(make_context(1), torch.zeros(10), uniform, **options)


@pytest.mark.parametrize("rows", [[0, 0], [1, 0], [-1, 0], [0, 2]])
def test_rows_out_of_order_are_refused(rows: list[int]) -> None:
    at = np.array(rows, dtype=np.int64)
    ones, k = np.ones(2, dtype=np.float32), np.ones(2, dtype=np.int64)
    one, half = ones.ctypes.data, np.full(2, 0.5, dtype=np.float32)
    draws = Draws(2, at.ctypes.data, one, one, k.ctypes.data, one, half.ctypes.data)
    with pytest.raises(InvariantError, match="of row"):
        make_context(1).sample(torch.zeros(2, 5), draws, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 75, 2048])
def test_masks_forbid_what_torch_does(build: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = np.array([1, 2, 4, 5])
    num_words = -(-vocab_size // 32)
    bits = rng.integers(-(2**31), 2**31, (4, num_words)).astype(np.int32)
    bits[0], bits[1] = -1, 0
    bits[1, num_words // 2] = 1
    logits = torch.randn(7, vocab_size)
    expected = logits.clone()
    RowMask.from_bits(rows, bits, vocab_size, torch.device("cpu")).apply(expected)
    forbid_tokens(make_context(2, build), logits, rows, bits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("rows", [[-1], [3], [1, 1], [2, 1]])
def test_masks_of_wrong_rows_are_refused(rows: list[int]) -> None:
    bits = np.zeros((len(rows), 2), dtype=np.int32)
    with pytest.raises(InvariantError, match="is of row"):
        forbid_tokens(make_context(1), torch.zeros(3, 40), np.array(rows), bits)
