"""The memory that packed matrices lie in, and what scales are kept as."""

import gc
import weakref

import torch

from vllm.model_executor.layers.quantization import panels
from vllm.model_executor.layers.quantization.panels import (
    allocate,
    allocate_beside,
    pack_panels,
    round_to_bytes,
    scale_e4m3,
)


def test_large_matrices_have_memory_of_their_own() -> None:
    shapes = [(3, 5, 64), (9, 1024, 64)]
    made = [allocate(shape, torch.int32) for shape in (*shapes, *shapes)]
    for i, values in enumerate(made):
        values.fill_(i)
    assert [tuple(values.shape) for values in made] == [*shapes, *shapes]
    assert all((values == i).all() for i, values in enumerate(made))


def test_small_matrices_share_pages_that_go_with_the_last_of_them() -> None:
    made = [allocate_beside((count,), torch.float16) for count in (5, 0, 70_000, 3, 40 << 20, 9)]
    for i, values in enumerate(made):
        values.fill_(i)
    assert all((values == i).all() for i, values in enumerate(made))
    assert all(values.data_ptr() % 64 == 0 for values in made)
    pages = panels._SHARED_PAGES._pages
    assert isinstance(pages, weakref.ref)
    assert pages() is not None
    last = made.pop()
    del made, values
    gc.collect()
    assert (last == 5).all()
    assert pages() is not None
    del last
    gc.collect()
    assert pages() is None


def test_rows_lie_in_lanes_and_the_last_panel_is_filled_up() -> None:
    rows = torch.arange(70 * 8192, dtype=torch.int32).view(70, 8192) + 1
    packed = pack_panels(rows)
    assert packed.shape == (2, 8192, 64)
    assert torch.equal(packed.transpose(1, 2).flatten(0, 1)[:70], rows)
    assert not packed[1, :, 6:].any()


def test_scales_that_leave_no_room_are_kept_as_numbers() -> None:
    """Where a product of the least code would be below the least normal number."""
    codes = torch.arange(127, dtype=torch.uint8).view(1, 127).view(torch.float8_e4m3fn)
    for exponent in (-125, -118, -117, -30, 0, 60, 116, 117):
        for divides in (False, True):
            whole = torch.tensor(1.3 * 2.0**exponent)
            own = scale_e4m3(codes, whole, divides=divides)
            wide = codes.double()
            exact = wide / whole.double() if divides else wide * whole.double()
            assert torch.equal(own.widen(), exact.float())
            assert (own.steps is not None) == (-117 <= exponent <= 116), (exponent, divides)


def test_inputs_are_rounded_by_a_quotient_rounded_once() -> None:
    """As by kernels: a multiple of the reciprocal is off by a bit for some peaks: so are codes."""
    peaks = torch.linspace(1.0, 2.0, 4097)
    factors = (torch.full_like(peaks, 127).double() / peaks.double()).float()
    # What lies in the middle of two steps by one factor does not by another.
    middles = torch.arange(0.5, 127) / factors[:, None].double()
    rows = torch.cat([peaks[:, None], middles.float()], 1)
    codes = (rows.numpy() * factors[:, None].numpy()).round()
    expected = torch.from_numpy(codes) * (peaks[:, None] / 127)
    assert torch.equal(round_to_bytes(rows), expected)
