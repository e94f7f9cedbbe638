"""Quantised layers against plain arithmetic on dequantised numbers, in float64."""

import pytest
import torch

from tests.ascend.quantization.modelslim_files import quantise_weight
from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec
from vllm_ascend.quantization.description import parse_description
from vllm_ascend.quantization.modelslim import ModelSlimQuantization

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def quantised(*matrices: str, with_offset: bool = True, use_nz: bool = False):
    suffixes = ("weight", "weight_scale", *(["weight_offset"] if with_offset else []))
    raw = {f"{name}.{suffix}": "W8A8_DYNAMIC" for name in matrices for suffix in suffixes}
    return ModelSlimQuantization(parse_description(raw, "d.json"), use_nz=use_nz)


def fill(slots: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> torch.Tensor:
    """Quantises ``weight`` into the slots; returns what they mean, in float64."""
    values, scale = quantise_weight(weight)
    assert slots[f"{name}.weight"].shape == values.shape
    slots[f"{name}.weight"].copy_(values)
    slots[f"{name}.weight_scale"].copy_(scale)
    if f"{name}.weight_offset" in slots:
        slots[f"{name}.weight_offset"].copy_(torch.zeros_like(scale))
    return values.double() * slots[f"{name}.weight_scale"].double()


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """What int8 rows of x mean, in float64."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / step).round().double() * step.double()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("use_nz", [False, True])
def test_matrix(dtype: torch.dtype, num_tokens: int, use_nz: bool) -> None:
    torch.manual_seed(num_tokens)
    quantisation = quantised("a.w", use_nz=use_nz)
    matrix = quantisation.make_matrix(MatrixSpec("a.w", 40, 24, dtype, CPU))
    assert matrix is not None
    weight = fill(matrix.slots("a.w"), "a.w", torch.randn(24, 40) / 6)
    quantisation.finish_loading()
    x = torch.randn(num_tokens, 40).to(dtype)
    got = matrix(x)
    assert got.dtype == dtype
    expected = round_rows(x) @ weight.T if num_tokens else torch.empty(0, 24).double()
    torch.testing.assert_close(got.double(), expected, **tolerance(dtype))
    one_group = matrix.map_groups(x.unsqueeze(1))
    assert torch.equal(one_group.squeeze(1), got)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_grouped_matrix(num_tokens: int) -> None:
    torch.manual_seed(0)
    quantisation = quantised("a.w")
    matrix = quantisation.make_matrix(MatrixSpec("a.w", 16, 3 * 10, torch.float32, CPU, 3))
    assert matrix is not None
    weight = fill(matrix.slots("a.w"), "a.w", torch.randn(30, 16)).view(3, 10, 16)
    quantisation.finish_loading()
    x = torch.randn(num_tokens, 3, 16)
    got = matrix.map_groups(x)
    assert got.shape == (num_tokens, 3, 10)
    if num_tokens:
        expected = torch.einsum("tgi,goi->tgo", round_rows(x), weight)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def gated(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = (x @ w1.T).clamp(max=limit), (x @ w3.T).clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_shared_quantised", [False, True])
def test_experts(dtype: torch.dtype, is_shared_quantised: bool) -> None:
    torch.manual_seed(1)
    num_experts, hidden, inner, limit = 5, 24, 16, 0.7
    names = [f"p.experts.{e}" for e in range(num_experts)] + ["p.shared_experts"]
    quantised_names = names if is_shared_quantised else names[:-1]
    quantisation = quantised(*(f"{n}.w{i}" for n in quantised_names for i in (1, 2, 3)))
    experts = quantisation.make_experts(
        ExpertsSpec("p.", num_experts, hidden, inner, limit, dtype, CPU)
    )
    assert experts is not None
    slots = experts.slots("p")
    meaning = {}
    for name in names:
        for leaf, shape in (
            ("w1", (inner, hidden)),
            ("w3", (inner, hidden)),
            ("w2", (hidden, inner)),
        ):
            weight = torch.randn(shape) / shape[1] ** 0.5
            if name in quantised_names:
                meaning[name, leaf] = fill(slots, f"{name}.{leaf}", weight)
            else:
                slots[f"{name}.{leaf}.weight"].copy_(weight)
                meaning[name, leaf] = slots[f"{name}.{leaf}.weight"].double()
    quantisation.finish_loading()
    x = torch.randn(7, hidden).to(dtype)
    ids = torch.rand(7, num_experts).topk(2).indices
    weights = torch.rand(7, 2)
    expected = torch.zeros(7, hidden, dtype=torch.float64)
    for token in range(7):
        chosen = [(names[e], float(w)) for e, w in zip(ids[token], weights[token], strict=True)]
        for name, factor in [*chosen, (names[-1], 1.0)]:
            is_int8 = name in quantised_names
            row = round_rows(x[token : token + 1]) if is_int8 else x[token : token + 1].double()
            hidden_row = gated(row, meaning[name, "w1"], meaning[name, "w3"], limit)
            if is_int8:
                hidden_row = round_rows(hidden_row)
            expected[token] += factor * (hidden_row @ meaning[name, "w2"].T)[0]
    # A value at a rounding boundary may go either way: one step of the inner row.
    allowed = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    )
    got = experts(x, ids, weights)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, **allowed)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, hidden)


def test_a_nonzero_offset_is_refused() -> None:
    quantisation = quantised("a.w")
    matrix = quantisation.make_matrix(MatrixSpec("a.w", 4, 3, torch.float32, CPU))
    assert matrix is not None
    fill(matrix.slots("a.w"), "a.w", torch.randn(3, 4))
    matrix.slots("a.w")["a.w.weight_offset"][1] = 3.0
    with pytest.raises(CheckpointError, match=r"a.w.weight_offset is not zero"):
        quantisation.finish_loading()


def test_names_of_plain_matrices_have_no_storage() -> None:
    quantisation = quantised("a.w", with_offset=False)
    assert quantisation.make_matrix(MatrixSpec("b.w", 4, 3, torch.float32, CPU)) is None
    matrix = quantisation.make_matrix(MatrixSpec("a.w", 4, 3, torch.float32, CPU))
    assert matrix is not None
    assert set(matrix.slots("a.w")) == {"a.w.weight", "a.w.weight_scale"}
