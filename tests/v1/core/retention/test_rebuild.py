import itertools

import pytest

from tests.v1.core.v4_geometry import FLASH, v4_config
from tests.v1.core.window_geometry import GPT_OSS_LIKE, window_config
from vllm.v1.core.geometry import CacheGeometry, num_rebuild_tokens
from vllm.v1.core.retention.rebuild import Rebuild, find_rebuild


def first_exact(windows: list[int], start: int) -> int:
    """Follow exactness row by row: where the last layer's input begins to be exact."""
    exact = [position >= start for position in range(start + 400)]
    for window in windows[:-1]:
        exact = [
            position >= start and all(exact[max(0, position - window + 1) : position + 1])
            for position in range(len(exact))
        ]
    return exact.index(True)


@pytest.mark.parametrize(
    "windows", [list(w) for n in (1, 2, 3) for w in itertools.product((1, 2, 5, 9), repeat=n)]
)
@pytest.mark.parametrize("tail", [0, 4, 8, 20])
def test_enough_for_the_rows_that_are_needed(windows: list[int], tail: int) -> None:
    span = num_rebuild_tokens(windows, tail)
    assert span is not None
    boundary = 400
    needed = max(tail, windows[-1] - 1)
    assert first_exact(windows, boundary - span) <= boundary - needed
    if len(set(windows)) == 1 and tail < windows[0]:
        # And one token too many, in which the last row's own output is exact too.
        assert first_exact(windows, boundary - span + 2) > boundary - needed


def test_spans_of_models() -> None:
    flash = CacheGeometry.from_config(v4_config(128, 10, FLASH))
    # 43 layers and the drafter's block.
    assert flash.rebuild_tokens == 128 + 43 * 127
    gpt_oss = CacheGeometry.from_config(window_config(32, 10, 128, GPT_OSS_LIKE))
    assert gpt_oss.rebuild_tokens == 128 + 5 * 127
    assert num_rebuild_tokens([], 0) is None


def test_pays_only_where_it_computes_less() -> None:
    assert find_rebuild(100, 32, 0, 256) == Rebuild(128, 256)
    assert find_rebuild(100, 32, 127, 256) == Rebuild(128, 256)
    assert find_rebuild(100, 32, 128, 256) is None
    assert find_rebuild(100, 32, 0, 96) is None
    assert find_rebuild(None, 32, 0, 4096) is None
