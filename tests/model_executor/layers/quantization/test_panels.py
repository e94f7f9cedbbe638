"""The memory that packed matrices lie in."""

import torch

from vllm.model_executor.layers.quantization.panels import allocate, pack_panels


def test_large_matrices_have_memory_of_their_own() -> None:
    shapes = [(3, 5, 64), (9, 1024, 64)]
    made = [allocate(shape, torch.int32) for shape in (*shapes, *shapes)]
    for i, values in enumerate(made):
        values.fill_(i)
    assert [tuple(values.shape) for values in made] == [*shapes, *shapes]
    assert all((values == i).all() for i, values in enumerate(made))


def test_rows_lie_in_lanes_and_the_last_panel_is_filled_up() -> None:
    rows = torch.arange(70 * 8192, dtype=torch.int32).view(70, 8192) + 1
    packed = pack_panels(rows)
    assert packed.shape == (2, 8192, 64)
    assert torch.equal(packed.transpose(1, 2).flatten(0, 1)[:70], rows)
    assert not packed[1, :, 6:].any()
