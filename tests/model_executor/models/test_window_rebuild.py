"""The window state at b can be computed again from the compressed entries below b alone.

A row of layer l depends on window rows of layer l - 1 up to W - 1 positions back, and on entries.
So a run over the W + (L - 1)(W - 1) tokens before b, entries read as they are stored, begins with
wrong rows, and the wrong ones end W - 1 positions later per layer: those needed at b are exact.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.model_executor.models.harness import PagedHarness, Request
from tests.model_executor.models.hf_reference import (
    random_tokens,
    randomize_,
    sixteen_rate,
)
from tests.model_executor.models.tiny_config import tiny_config
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.core.geometry import GroupGeometry

WINDOW = 16
NUM_LAYERS = 4
SPAN = WINDOW + (NUM_LAYERS - 1) * (WINDOW - 1)
LENGTH = 240
TOKENS = random_tokens(LENGTH, 5)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    raw = sixteen_rate(tiny_config(sliding_window=WINDOW, num_hidden_layers=NUM_LAYERS))
    config = DeepseekV4Config.from_dict(raw)
    model = DeepseekV4ForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    randomize_(model.weight_slots(), config.n_routed_experts, seed=3)
    return model


@pytest.fixture(scope="module")
def whole(model: DeepseekV4ForCausalLM) -> torch.Tensor:
    """Returns the logits of all tokens from one step."""
    return PagedHarness(model, num_blocks=200).run(TOKENS, [LENGTH])


class Rebuild:
    """A request computed up to b, whose window state is then lost and computed again."""

    def __init__(self, model: CausalLM[Any], boundary: int, **options: Any) -> None:
        self.harness = PagedHarness(model, num_blocks=200, **options)
        self.boundary = boundary
        self.request = self.harness.add(TOKENS)
        self.harness.step([(self.request, 100)])
        self.harness.step([(self.request, boundary - 100)])
        self.window_rows = self.read_window_rows()
        self.dense_bytes = self.read_dense_bytes()

    def names(self, *, dense: bool) -> list[str]:
        layout = self.harness.layout
        return [
            name
            for name, group_id in layout.group_of.items()
            if (layout.groups[group_id].kind == "dense") == dense
        ]

    def read_window_rows(self) -> dict[str, torch.Tensor]:
        """Every row of a window or state group that is needed at b."""
        found = {}
        for name in self.names(dense=False):
            group = self.harness.layout.groups[self.harness.layout.group_of[name]]
            keep = group.ratio if group.has_overlap else max(group.window - 1, 0)
            geometry = GroupGeometry(0, True, group.block_size, align=group.ratio, keep=keep)
            needed = range(geometry.first_needed(self.boundary), self.boundary)
            if needed:
                found[name] = self.harness.read_rows(self.request, name, needed)
        return found

    def read_dense_bytes(self) -> list[torch.Tensor]:
        caches = self.harness.kv_caches
        return [caches[name].clone().view(torch.int32) for name in self.names(dense=True)]

    def dense_is_unchanged(self) -> bool:
        now = self.read_dense_bytes()
        return all(torch.equal(a, b) for a, b in zip(now, self.dense_bytes, strict=True))

    def lose(self, start: int) -> None:
        """Loses the window state; the next step computes from ``start`` on again."""
        harness, request = self.harness, self.request
        harness.forget_windows(request)
        request.num_computed = request.read_from = start
        request.write_from = tuple(
            self.boundary if group.kind == "dense" else start for group in harness.layout.groups
        )

    def run(self, start: int, chunks: Sequence[int]) -> None:
        """Loses the window state and computes [start, b) again."""
        self.lose(start)
        for count in chunks:
            self.harness.step([(self.request, count)])
        assert self.request.num_computed == self.boundary

    def largest_error(self) -> float:
        now = self.read_window_rows()
        assert now.keys() == self.window_rows.keys()
        return max(float((now[name] - rows).abs().max()) for name, rows in self.window_rows.items())


@pytest.mark.parametrize("boundary", [192, 200, 203])
@pytest.mark.parametrize("sizes", [[SPAN], [30, SPAN - 30], [20, 5, 1, SPAN - 29, 3]], ids=str)
def test_the_window_state_is_exact_and_entries_are_left_alone(
    model: DeepseekV4ForCausalLM, whole: torch.Tensor, boundary: int, sizes: list[int]
) -> None:
    rebuild = Rebuild(model, boundary)
    rebuild.run(boundary - SPAN, sizes)
    assert rebuild.largest_error() < TOLERANCE
    assert rebuild.dense_is_unchanged()

    # The request goes on as if nothing had been lost, and writes entries again.
    request, harness = rebuild.request, rebuild.harness
    request.write_from = ()
    num_left = LENGTH - boundary
    logits = torch.cat([harness.step([(request, n)])[0] for n in (1, 4, num_left - 5)])
    torch.testing.assert_close(logits, whole[boundary:], atol=1e-3, rtol=0)
    assert not rebuild.dense_is_unchanged()


def test_a_step_may_go_on_beyond_the_boundary(
    model: DeepseekV4ForCausalLM, whole: torch.Tensor
) -> None:
    rebuild = Rebuild(model, 200)
    request, harness = rebuild.request, rebuild.harness
    rebuild.lose(200 - SPAN)
    (logits,) = harness.step([(request, LENGTH - 200 + SPAN)])
    torch.testing.assert_close(logits[SPAN:], whole[200:], atol=1e-3, rtol=0)
    for name, before in zip(rebuild.names(dense=True), rebuild.dense_bytes, strict=True):
        pages = harness.kv_caches[name].view(torch.int32)
        for block, row in find_entry_rows(harness, request, name, 200):
            assert torch.equal(pages[block, row], before[block, row])


def find_entry_rows(
    harness: PagedHarness, request: Request, name: str, end: int
) -> list[tuple[int, int]]:
    """Addresses of the entries that were complete at ``end``."""
    group_id = harness.layout.group_of[name]
    group, held = harness.layout.groups[group_id], request.blocks[group_id]
    return [
        (held[first // group.block_size], first % group.block_size // group.ratio)
        for first in range(0, end // group.ratio * group.ratio, group.ratio)
    ]


def test_replaying_the_last_window_alone_is_not_exact(model: DeepseekV4ForCausalLM) -> None:
    rebuild = Rebuild(model, 200)
    rebuild.run(200 - WINDOW, [WINDOW])
    assert rebuild.largest_error() > 1e-2
    assert rebuild.dense_is_unchanged()
