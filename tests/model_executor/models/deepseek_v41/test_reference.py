"""What a boundary must hold, proved on the reference: whole, resumed, lazy and rebuilt are one.

The lazy decoder drops, above the last layer that makes entries, rows that no later row needs; a
rebuild makes lost window rows again from the entries alone. Leaving out anything that a boundary
holds must show.
"""

import pytest
import torch

from tests.model_executor.models.deepseek_v41.reference import NOTHING, Reference, State
from tests.model_executor.models.deepseek_v41.tiny import FOLDED, random_weights, tiny_v41
from tests.model_executor.models.hf_reference import random_tokens
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.v1.attention.ops.registry import get_reference_op

SAME, SHOWS = 1e-4, 5e-3
LENGTH, WINDOW, LAYERS, CUT = 130, 8, 10, 5
# Tokens of a prompt's end that rows of the decoder depend on.
REACH = 1 + (LAYERS - 1 - CUT) * (WINDOW - 1)
IDS = random_tokens(LENGTH, 4)


@pytest.fixture(scope="module")
def reference() -> Reference:
    raw = tiny_v41()
    config = DeepseekV41Config.from_dict(raw)
    model = DeepseekV41ForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    return Reference(raw, random_weights(model.weight_slots(), 8, seed=6), FOLDED)


@pytest.fixture(scope="module")
def whole(reference: Reference) -> torch.Tensor:
    return reference.step(State(), IDS)


def differ(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max())


def stop_at(reference: Reference, boundary: int) -> State:
    """The state of a boundary, with nothing in it that need not be there."""
    state = State()
    reference.step(state, IDS[:boundary])
    for layer, rows in state.windows.items():
        rows[: max(0, boundary - WINDOW + 1)] = NOTHING
        state.windows[layer] = rows
    for layer, opened in state.opened.items():
        state.opened[layer] = opened[len(opened) - boundary % 2 :]
    # Engram reads three ids.
    state.ids[: max(0, boundary - 3)] = [0] * max(0, boundary - 3)
    return state


@pytest.mark.parametrize(
    "wrong",
    [
        "own gates",
        "mix transposed",
        "heads normed",
        "no tables",
        "no sinks",
        "pairs not gated",
        "YaRN everywhere",
        "no YaRN",
        "no candidates",
    ],
)
def test_another_models_equation_shows(
    reference: Reference, whole: torch.Tensor, wrong: str
) -> None:
    """Whoever computes it so is told: by more than the engine may differ."""
    changes = {
        "no tables": {"engram_layer_ids": []},
        "no candidates": {"candidate_topk_blocks": 99},
    }
    off = {"no sinks": ("attn_sink", -1e9), "pairs not gated": ("compressor.wgate.weight", 0.0)}
    part, value = off.get(wrong, ("nothing", 0.0))
    tensors = {
        name: torch.full_like(tensor, value) if name.endswith(part) else tensor
        for name, tensor in reference.w.items()
    }
    other = Reference({**tiny_v41(), **changes.get(wrong, {})}, tensors, FOLDED, wrong)
    if wrong == "YaRN everywhere":
        other.main = other.compressed
    if wrong == "no YaRN":
        half = tiny_v41()["qk_rope_head_dim"] // 2
        other.compressed = tiny_v41()["compress_rope_theta"] ** (-torch.arange(half) / half)
    assert differ(other.step(State(), IDS[:80]), whole[:80]) > SHOWS


@pytest.mark.parametrize("chunks", [[1] * 12 + [118], [32] * 4 + [2], [1, 2, 3, 5, 8, 13, 21, 77]])
def test_chunks(reference: Reference, whole: torch.Tensor, chunks: list[int]) -> None:
    state, at, logits = State(), 0, []
    for count in chunks:
        logits.append(reference.step(state, IDS[at : at + count]))
        at += count
    assert differ(torch.cat(logits), whole) < SAME


@pytest.mark.parametrize("boundary", [1, 2, 31, 32, 33, 64, 65, 96])
def test_resumed(reference: Reference, whole: torch.Tensor, boundary: int) -> None:
    state = stop_at(reference, boundary)
    assert differ(reference.step(state, IDS[boundary:]), whole[boundary:]) < SAME


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_oldest_window_row_is_needed(
    reference: Reference, whole: torch.Tensor, layer: int
) -> None:
    state = stop_at(reference, 64)
    state.windows[layer][64 - WINDOW + 1] = 0.0
    assert differ(reference.step(state, IDS[64:]), whole[64:]) > SHOWS


def test_the_open_pair_and_the_ids_are_needed(reference: Reference, whole: torch.Tensor) -> None:
    state = stop_at(reference, 65)
    state.opened[2] = torch.zeros_like(state.opened[2])
    assert differ(reference.step(state, IDS[65:]), whole[65:]) > SHOWS
    for back in (1, 2, 3):
        state = stop_at(reference, 64)
        state.ids[64 - back] = (state.ids[64 - back] + 7) % 80
        assert differ(reference.step(state, IDS[64:]), whole[64:]) > SHOWS


def lazy_rows(end: int) -> list[int]:
    """The first row that each layer computes of a prompt of so many tokens."""
    return [
        0 if layer < CUT else end - 1 - (LAYERS - 1 - layer) * (WINDOW - 1)
        for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("chunks", [[100], [33, 33, 34], [64, 35, 1], [7] * 14 + [2]])
def test_the_lazy_decoder(reference: Reference, whole: torch.Tensor, chunks: list[int]) -> None:
    state, at, logits = State(), 0, torch.empty(0)
    for count in chunks:
        logits = reference.step(state, IDS[at : at + count], first=lazy_rows(100))
        at += count
    assert differ(logits[-1], whole[99]) < SAME
    assert differ(reference.step(state, IDS[100:]), whole[100:]) < SAME
    too_few = [row + (layer >= CUT) for layer, row in enumerate(lazy_rows(100))]
    state = State()
    reference.step(state, IDS[:99], first=too_few)
    assert not torch.isfinite(state.windows[LAYERS - 1][99 - WINDOW + 1])[0]


@pytest.mark.parametrize("boundary", [96, 97])
def test_windows_are_rebuilt_from_entries(
    reference: Reference, whole: torch.Tensor, boundary: int
) -> None:
    state = stop_at(reference, boundary)
    expected = {layer: rows.clone() for layer, rows in state.windows.items()}
    state.ids[:] = IDS[:boundary]
    start = boundary - LAYERS * (WINDOW - 1)
    for layer in range(LAYERS):
        state.windows[layer] = torch.full_like(state.windows[layer], NOTHING)
    state.ids = state.ids[:start]
    # A triangle: layer l computes what layer l + 1 needs.
    first = [boundary - (LAYERS - 1 - layer) * (WINDOW - 1) for layer in range(LAYERS)]
    reference.step(state, IDS[start:boundary], first=first, read_from=start, writes_entries=False)
    for layer, rows in expected.items():
        kept = slice(boundary - WINDOW + 1, boundary)
        assert differ(state.windows[layer][kept], rows[kept]) < SAME
    assert differ(reference.step(state, IDS[boundary:]), whole[boundary:]) < SAME


def test_a_lean_checkpoint_serves_what_lies_beyond_the_reach(
    reference: Reference, whole: torch.Tensor
) -> None:
    for boundary, is_exact in ((LENGTH - REACH, True), (LENGTH - WINDOW, False)):
        state = stop_at(reference, boundary)
        for layer in range(CUT + 1, LAYERS):
            state.windows[layer] = torch.zeros_like(state.windows[layer])
        logits = reference.step(state, IDS[boundary:])[-1]
        assert (differ(logits, whole[-1]) < SAME) == is_exact
