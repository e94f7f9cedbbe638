import copy

import pytest

from vllm.v1.utils import ConstantList, tensor_data


def test_view_follows_its_list():
    tokens = [1, 2, 3]
    view = ConstantList(tokens)
    tokens.append(2)
    assert list(view) == [1, 2, 3, 2]
    assert len(view) == 4
    assert view[0] == 1
    assert view[-1] == 2
    assert view[1:3] == [2, 3]
    assert isinstance(view[1:3], list)
    assert 3 in view
    assert 9 not in view
    assert view.index(2) == 1
    assert view.index(2, 2) == 3
    assert view.count(2) == 2
    assert list(reversed(view)) == [2, 3, 2, 1]
    with pytest.raises(ValueError, match="9"):
        view.index(9)
    with pytest.raises(ValueError, match="1"):
        view.index(1, 1, 3)


def test_equality():
    assert ConstantList([1, 2]) == [1, 2]
    assert ConstantList([1, 2]) == ConstantList([1, 2])
    assert ConstantList([1]) != [2]
    more = [2]
    assert ConstantList([1]) + more == [1, 2]
    assert ConstantList([1]) + ConstantList([2]) == [1, 2]
    with pytest.raises(TypeError):
        hash(ConstantList([1]))


def test_copies_are_independent():
    tokens = [1]
    view = ConstantList(tokens)
    mine = view.copy()
    mine.append(2)
    assert tokens == [1]
    assert type(mine) is list
    assert copy.deepcopy(view) == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.append(1),
        lambda v: v.extend([1]),
        lambda v: v.insert(0, 1),
        lambda v: v.pop(),
        lambda v: v.remove(1),
        lambda v: v.clear(),
        lambda v: v.sort(),
        lambda v: v.reverse(),
        lambda v: v.__setitem__(0, 5),
        lambda v: v.__delitem__(0),
        lambda v: v.__iadd__([1]),
        lambda v: v.__imul__(2),
    ],
)
def test_no_change_through_the_view(change):
    tokens = [1, 2]
    with pytest.raises(TypeError, match="read-only"):
        change(ConstantList(tokens))
    assert tokens == [1, 2]


def test_repr():
    assert repr(ConstantList([1])) == "ConstantList([1])"


@pytest.mark.slow  # loads torch
def test_tensor_data():
    torch = pytest.importorskip("torch")
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert bytes(tensor_data(values)) == values.numpy().tobytes()
    # Not contiguous: row-major order of the values, whatever the strides.
    assert bytes(tensor_data(values.t())) == values.t().contiguous().numpy().tobytes()
    half = torch.tensor([1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    assert bytes(tensor_data(half)) == b"\x80\x3f\x00\xc0"
    assert bytes(tensor_data(values[:0])) == b""
