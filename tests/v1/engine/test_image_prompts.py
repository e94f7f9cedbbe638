"""What programs write where pictures may stand."""

from typing import Any

import numpy as np
import pytest

from vllm.exceptions import UserInputError
from vllm.v1.engine.image_prompts import SeeingPrompt

_ARRAY = np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    "media",
    [None, {}, {"image": None}, {"image": []}, {"video": None}, {"video": [], "audio": {}}],
    ids=str,
)
def test_what_asks_for_nothing(media: Any) -> None:
    found = SeeingPrompt.find({"prompt": "a", "multi_modal_data": media})
    assert found is None or not found.given


@pytest.mark.parametrize(
    ("media", "said"),
    [
        (_ARRAY, "must be an object"),
        ({"video": _ARRAY}, "video is not served"),
        ({"image": _ARRAY, "audio": (_ARRAY, 16_000)}, "audio is not served"),
        ([_ARRAY], "must be an object"),
        (5, "must be an object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_picture_is_refused_also_where_it_is_neither_true_nor_false(
    media: Any, said: str
) -> None:
    with pytest.raises(UserInputError, match=said):
        SeeingPrompt.find({"prompt": "a", "multi_modal_data": media})


def test_arrays_are_pictures() -> None:
    found = SeeingPrompt.find({"prompt": "a", "multi_modal_data": {"image": _ARRAY}})
    assert found is not None
    assert found.given[0].image is _ARRAY
