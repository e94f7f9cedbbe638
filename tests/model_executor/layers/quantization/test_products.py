"""Products by tiles: the plain product of the decoded matrix, and no more scratch than a tile."""

import pytest
import torch

from vllm.model_executor.layers.quantization.encode import encode_fp4_groups, encode_fp8_blocks
from vllm.model_executor.layers.quantization.products import multiply_plain
from vllm.model_executor.layers.quantization.storages import (
    Fp4Groups,
    Fp8Blocks,
    PlainRows,
    StackedRows,
    Storage,
)
from vllm.v1.attention.ops import reference, stored_products
from vllm.v1.attention.ops.stored_products import stored_grouped_linear, stored_linear


def make_storage(kind: str, rows: int, columns: int) -> Storage:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    if kind == "plain":
        return PlainRows(weight.bfloat16())
    if kind == "fp4":
        codes, scales = encode_fp4_groups(weight, 32)
        storage = Fp4Groups(rows, columns, 32, torch.empty(scales.shape, dtype=torch.uint8))
    else:
        codes, scales = encode_fp8_blocks(weight, (16, 32))
        empty = torch.empty(scales.shape, dtype=torch.uint8)
        storage = Fp8Blocks(rows, columns, (16, 32), empty)
    slots = storage.slots("w")
    slots["w.weight"].view(torch.uint8).copy_(codes.view(torch.uint8))
    slots["w.scale"].view(torch.uint8).copy_(scales.view(torch.uint8))
    storage.check("w")
    return storage


def decoded(storage: Storage) -> torch.Tensor:
    rows = torch.empty(storage.num_rows, storage.num_columns)
    storage.write_rows(0, rows)
    return rows


@pytest.mark.parametrize("kind", ["plain", "fp4", "fp8"])
@pytest.mark.parametrize("num_inputs", [0, 1, 3, 8, 9, 40])
def test_a_whole_matrix_bit_for_bit(kind: str, num_inputs: int) -> None:
    storage, x = make_storage(kind, 72, 64), torch.randn(num_inputs, 64)
    expected = reference.linear(x, decoded(storage))
    assert torch.equal(stored_linear(x, storage), expected)


@pytest.mark.parametrize("kind", ["plain", "fp4", "fp8"])
@pytest.mark.parametrize("num_inputs", [1, 5, 40])
def test_tiles(kind: str, num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, x = make_storage(kind, 72, 64), torch.randn(num_inputs, 64)
    largest = 20 * 64
    monkeypatch.setattr(stored_products, "_CACHED_TILE_VALUES", largest)
    monkeypatch.setattr(stored_products, "MAX_TILE_VALUES", largest)
    seen: list[int] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.shape[0])
        return reference.linear(rows, weight)

    result = stored_linear(x, storage, linear)
    assert seen == [20, 20, 20, 12]
    torch.testing.assert_close(result, x @ decoded(storage).T, atol=1e-4, rtol=1e-5)


def test_few_inputs_take_tiles_that_fit_the_cache() -> None:
    storage = make_storage("fp4", 2048, 1024)
    x = torch.randn(1, 1024)
    expected = reference.linear(x, decoded(storage))
    torch.testing.assert_close(stored_linear(x, storage), expected)
    assert stored_products._tile_rows(8, 1024) == 1024
    assert stored_products._tile_rows(9, 1024) == 65536


def test_stacked_matrices_are_one() -> None:
    parts = [make_storage(kind, rows, 64) for kind, rows in (("fp8", 40), ("fp4", 7), ("plain", 9))]
    stacked = StackedRows(*parts)
    whole = torch.cat([decoded(part) for part in parts])
    assert torch.equal(decoded(stacked), whole)  # type: ignore[arg-type]
    for start in range(0, 56, 5):
        for stop in range(start + 1, 57, 7):
            rows = torch.empty(stop - start, 64)
            stacked.write_rows(start, rows)
            assert torch.equal(rows, whole[start:stop])


@pytest.mark.parametrize("kind", ["plain", "fp4", "fp8"])
@pytest.mark.parametrize("num_inputs", [0, 1, 9])
@pytest.mark.parametrize("tile", [1 << 20, 24 * 64, 5 * 64])
def test_groups(kind: str, num_inputs: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_products, "_CACHED_TILE_VALUES", tile)
    monkeypatch.setattr(stored_products, "MAX_TILE_VALUES", tile)
    storage, x = make_storage(kind, 72, 64), torch.randn(num_inputs, 6, 64)
    result = stored_grouped_linear(x, storage, 6)
    expected = torch.einsum("tgi,goi->tgo", x, decoded(storage).view(6, 12, 64))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)


def test_bfloat16_inputs_get_fp32_products() -> None:
    storage, x = make_storage("fp4", 72, 64), torch.randn(5, 64).bfloat16()
    result = stored_linear(x, storage)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, reference.linear(x.float(), decoded(storage)).bfloat16())


def test_plain_weights_of_the_inputs_type_are_not_touched() -> None:
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    assert torch.equal(
        multiply_plain(x, weight, reference.linear, stored_linear), reference.linear(x, weight)
    )
    narrow = weight.bfloat16()
    expected = reference.linear(x, narrow.float())
    assert torch.equal(multiply_plain(x, narrow, reference.linear, stored_linear), expected)
