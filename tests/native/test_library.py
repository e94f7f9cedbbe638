"""The library by itself: products of every shape, builds of equal bits, threads that end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.exceptions import EngineError
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.structs import BF16, F32, Matrix


def make_context(threads: int, build: str | None = None) -> NativeContext:
    library = load_library()
    assert library is not None
    return NativeContext(library, threads, build)


def multiply(context: NativeContext, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kind = F32 if weight.dtype == torch.float32 else BF16
    rows, columns = weight.shape
    output = torch.empty(len(x), rows)
    context.matmul(Matrix(weight.data_ptr(), None, rows, columns, columns, kind), x, output)
    return output


def builds() -> list[str]:
    found = []
    for name in ("amx", "vbmi", "vnni", "avx512", "avx2", "portable"):
        try:
            found.append(make_context(1, name).vector_build)
        except EngineError:
            continue
    return found


@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 130),
    columns=st.integers(1, 70),
    width=st.integers(1, 90),
    wide=st.booleans(),
)
def test_products(build: str, rows: int, columns: int, width: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 10_000 + columns * 100 + width)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(columns, width, generator=generator)
    weight = weight if wide else weight.bfloat16()
    output = multiply(make_context(1, build), x, weight)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    for row in range(0, rows, 7):
        assert torch.equal(
            multiply(make_context(2, build), x[row : row + 1], weight)[0], output[row]
        )


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [641, 1296, 2053])
def test_long_rows_are_multiplied_in_parts(build: str, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(35, width), torch.randn(29, width).to(dtype)
    output = multiply(make_context(1, build), x, weight)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-5)
    context = make_context(2, build)
    for rows in (1, 2, 4, 7, 9):
        assert torch.equal(multiply(context, x[3 : 3 + rows], weight), output[3 : 3 + rows])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 24])
@pytest.mark.parametrize("width", [83, 700])
def test_vector_builds_give_the_same_bits(rows: int, width: int) -> None:
    names = [name for name in builds() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this processor runs one vector build only")
    x, weight = torch.randn(rows, width), torch.randn(21, width)
    first, *others = (multiply(make_context(1, name), x, weight) for name in names)
    assert all(torch.equal(other, first) for other in others)


def test_the_portable_build_runs_everywhere() -> None:
    assert "portable" in builds()


def test_an_unknown_build_is_refused() -> None:
    with pytest.raises(EngineError, match="'sse9' does not run on this processor"):
        make_context(1, "sse9")


def test_many_contexts_come_and_go() -> None:
    weight = torch.randn(64, 512)
    x = torch.randn(64, 512)
    results = [multiply(make_context(4), x, weight) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_every_chunk_of_a_loop_runs_on_however_many_threads() -> None:
    x = torch.randn(1, 512)
    for num_rows in (400, 3000):  # fewer chunks than threads, and more
        weight = torch.randn(num_rows, 512)
        matrix = Matrix(weight.data_ptr(), None, num_rows, 512, 512, F32)
        expected = multiply(make_context(1), x, weight)
        for threads in range(2, 8):
            context = make_context(threads)
            for _ in range(20):
                output = torch.full_like(expected, float("nan"))
                context.matmul(matrix, x, output)
                assert torch.equal(output, expected)
