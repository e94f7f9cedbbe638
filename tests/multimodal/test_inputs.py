import numpy as np
import pytest

from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

MASK = np.array([False, True, False, True, True])


def test_every_token_embeds():
    position = PlaceholderRange(offset=10, length=5)
    assert position.get_num_embeds() == 5
    assert position.get_embeds_indices_in_range(1, 4) == (1, 4)


def test_some_tokens_embed():
    assert PlaceholderRange(10, 5, MASK).get_num_embeds() == 3


@pytest.mark.parametrize(("start", "end"), [(a, b) for b in range(6) for a in range(b + 1)])
def test_range_by_counting(start, end):
    embeds = [i for i in range(5) if MASK[i]]
    first, last = PlaceholderRange(0, 5, MASK).get_embeds_indices_in_range(start, end)
    assert embeds[first:last] == [i for i in embeds if start <= i < end]


def test_equality():
    assert PlaceholderRange(0, 5) == PlaceholderRange(0, 5)
    assert PlaceholderRange(0, 5) != PlaceholderRange(1, 5)
    assert PlaceholderRange(0, 5, MASK) == PlaceholderRange(0, 5, MASK.copy())
    assert PlaceholderRange(0, 5, MASK) != PlaceholderRange(0, 5)
    assert PlaceholderRange(0, 5, MASK) != PlaceholderRange(0, 5, ~MASK)
    assert PlaceholderRange(0, 5) != (0, 5)
    assert hash(PlaceholderRange(0, 5, MASK)) == hash(PlaceholderRange(0, 5, MASK.copy()))


def test_features_are_mutable():
    item = MultiModalKwargsItem.dummy()
    feature = MultiModalFeatureSpec(item, "image", "id", PlaceholderRange(0, 1))
    feature.data = None
    assert feature.mm_hash is None


def test_dummy():
    assert MultiModalKwargsItem.dummy("image", 3) == {"image": b"\0\0\0"}
