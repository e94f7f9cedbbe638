"""Draws on the device against the sampler's own filters, and grammar masks unpacked there."""

import numpy as np
import pytest
import torch

from tests.accelerators.graph_recorder import NoHostReads
from tests.accelerators.test_elementwise import random
from vllm.gpu.draws import draw_tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.ops.triton import sampling
from vllm.v1.sample.edits import RowMask
from vllm.v1.sample.filters import apply_min_p, apply_top_k, apply_top_p
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def make_rows(params: list[SamplingParams], vocab_size: int) -> SamplingMetadata:
    rows = [RowSampling(item, index, 1) for index, item in enumerate(params)]
    return SamplingMetadata.build(rows, vocab_size, "cpu")


def expected_mass(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns what each token of one row weighs, fp64 [V]."""
    scaled = (logits / params.temperature)[None]
    if params.min_p > 0:
        scaled = apply_min_p(scaled, torch.tensor([params.min_p]))
    if 0 < params.top_k < len(logits):
        scaled = apply_top_k(scaled, torch.tensor([params.top_k]), params.top_k)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        probs = apply_top_p(probs, torch.tensor([params.top_p]))
    return probs[0].double()


# No mass ends near a share of it: rounding would decide there.
PARAMS = [
    SamplingParams(temperature=1.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.9, top_p=0.913),
    SamplingParams(temperature=1.0, top_p=0.0001),
    SamplingParams(temperature=1.9, top_k=40, top_p=0.377, min_p=0.01),
]


def check(logits: torch.Tensor, params: list[SamplingParams], share: float) -> None:
    """Draws with one share of the mass for all rows; each token must be the one at that share."""
    rows = make_rows(params, logits.shape[1]).random
    assert rows is not None
    uniforms = np.full(len(rows.rows_host), share, dtype=np.float32)
    before = logits.clone()
    with NoHostReads():
        tokens = draw_tokens(logits, rows, uniforms)
    assert torch.equal(logits, before)
    for row, token in zip(rows.rows_host, tokens.tolist(), strict=True):
        mass = expected_mass(logits[row], params[row])
        assert mass[token] > 0
        below, above = mass[:token].sum() / mass.sum(), mass[: token + 1].sum() / mass.sum()
        assert below - 1e-5 <= share <= above + 1e-5


@pytest.mark.parametrize(("vocab_size", "share"), [(1, 0.5), (7, 0.0), (300, 0.777), (300, 1.0)])
def test_a_draw_is_where_the_cumulative_mass_says(vocab_size: int, share: float) -> None:
    logits = 3 * random(len(PARAMS), len(PARAMS), vocab_size)
    if vocab_size > 1:
        # What a grammar forbids, and equal values.
        logits[:, :: vocab_size // 2] = -torch.inf
        logits[:, -1] = logits[:, 1]
    check(logits, PARAMS, min(share, 1 - 2.0**-24))


def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_BLOCK", 128)
    params = [SamplingParams(temperature=0.7, top_k=90, top_p=0.9), SamplingParams(temperature=1.3)]
    for share in (0.31, 0.998):
        check(random(1, 2, 301), params, share)


def test_logits_that_are_no_numbers_give_some_token() -> None:
    rows = make_rows([SamplingParams(temperature=1.0, top_p=0.5, top_k=3)] * 2, 9).random
    assert rows is not None
    logits = torch.full((2, 9), torch.nan)
    logits[1] = -torch.inf
    tokens = draw_tokens(logits, rows, np.full(2, 0.5, dtype=np.float32))
    assert all(0 <= token < 9 for token in tokens.tolist())


def test_dead_rows_are_revived_without_looking() -> None:
    bits = np.array([[0b0110], [0b1001]], dtype=np.int32)
    logits = random(1, 3, 4)
    logits[2] = -torch.inf
    other = logits.clone()
    mask = RowMask.from_bits(np.array([0, 2]), bits, 4, CPU)
    mask.revive(logits)
    with NoHostReads():
        mask.revive_unseen(other)
    assert torch.equal(other, logits)
    assert logits[2].tolist() == [0.0, -torch.inf, -torch.inf, 0.0]
