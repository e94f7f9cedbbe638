"""Products with narrow weights: the same values whichever way is taken."""

import pytest
import torch

from vllm.v1.attention.ops import narrow_linear
from vllm.v1.attention.ops.narrow_linear import is_native, widened_linear
from vllm.v1.attention.ops.reference import linear


@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_products_are_fp32_products(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 24, generator=generator).to(dtype)
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(widened_linear(x, weight), expected)
    # Parts of few rows, the last one cut off.
    monkeypatch.setattr(narrow_linear, "_FEW_ROWS_VALUES", 24 * 7)
    monkeypatch.setattr(narrow_linear, "_MANY_ROWS_VALUES", 24 * 9)
    torch.testing.assert_close(widened_linear(x, weight), expected)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_linear_keeps_the_type(num_rows: int) -> None:
    x = torch.full((num_rows, 8), 0.5, dtype=torch.bfloat16)
    weight = torch.ones(70, 8, dtype=torch.bfloat16)
    mapped = linear(x, weight)
    assert mapped.dtype == torch.bfloat16
    assert mapped.is_contiguous()
    assert (mapped == 4.0).all()


def test_what_the_processor_has_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_linear, "_HAS_TILE_UNIT", False)
    monkeypatch.setattr(narrow_linear, "_HAS_BF16", True)
    assert is_native(torch.float32, 1000)
    assert is_native(torch.bfloat16, 16)
    assert not is_native(torch.bfloat16, 17)
    assert not is_native(torch.float16, 1)
    monkeypatch.setattr(narrow_linear, "_HAS_BF16", False)
    assert not is_native(torch.bfloat16, 1)
    monkeypatch.setattr(narrow_linear, "_HAS_TILE_UNIT", True)
    assert is_native(torch.bfloat16, 1000)
