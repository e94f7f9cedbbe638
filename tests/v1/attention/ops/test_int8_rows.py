"""Rows in bytes: what comes back, and that a head's bytes are its own."""

import pytest
import torch

from vllm.v1.attention.ops.int8_rows import Int8Rows

ROWS = Int8Rows(num_heads=3, head_dim=5)


@pytest.mark.parametrize(("head_dim", "width"), [(5, 1), (12, 4), (1024, 512)])
def test_values_come_back_within_half_a_step(head_dim: int, width: int) -> None:
    rows = Int8Rows(num_heads=3, head_dim=head_dim)
    values = torch.randn(7, 3 * head_dim, generator=torch.Generator().manual_seed(1)) * 100
    values[:, 1] *= 50
    coded = rows.encode(values)
    assert coded.dtype == torch.int8
    assert coded.shape == (7, rows.row_bytes) == (7, 3 * head_dim + 12)
    found = rows.decode(coded.view(7, 1, -1), torch.float32).view(7, 3, head_dim)
    signs = torch.ones(1, 1)
    while len(signs) < width:
        signs = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), signs)
    by_head = values.view(7, 3, head_dim)
    spread = by_head.unflatten(-1, (-1, width)) @ signs
    steps = spread.abs().amax((-2, -1)).unsqueeze(-1) / 127
    assert ((found - by_head).abs() <= 0.501 * steps).all()
    # Stored once more they are the same: a handed over row is none the worse.
    again = rows.encode(found.view(7, -1))
    assert torch.equal(again[:, : 3 * head_dim], coded[:, : 3 * head_dim])


def test_a_head_depends_on_its_own_values_alone() -> None:
    row = torch.tensor([[1.0, -2, 3, 0.5, 127], [1e-38] * 5, [0, 1, torch.inf, 2, 3]]).view(1, 15)
    coded = ROWS.encode(row)
    assert coded[0, :5].tolist() == [1, -2, 3, 0, 127]  # a tie goes to the even code
    found = ROWS.decode(coded, torch.float32).view(3, 5)
    assert found[0].tolist() == [1, -2, 3, 0, 127]
    assert not found[1].any()
    assert found[2].isnan().all()
    assert torch.equal(
        ROWS.encode(row * torch.tensor([1.0, 5, 9]).repeat_interleave(5))[:, :5], coded[:, :5]
    )
