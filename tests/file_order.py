"""Which tests a run's processes side by side get, and which first.

The longest files come first, so that none is left when everything else is done; those that start a
Ray cluster stay together, for one cluster.
"""

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

_LONGEST_FIRST = ("tests/ray_serve/", "tests/accelerators/", "tests/e2e/", "tests/test_design_map")
_ON_A_CLUSTER = tuple(f"tests/ray_serve/test_{name}.py" for name in ("fleet", "ranks", "workers"))


def find_file(node_id: str) -> str:
    """The file of a test, by its path from the project's folder."""
    return node_id.partition("::")[0]


def sort_by_length(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files known to be long first, then those with slow tests; otherwise as they were."""
    slow = {find_file(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> tuple[int, bool]:
        file = find_file(item.nodeid)
        places = [i for i, begin in enumerate(_LONGEST_FIRST) if file.startswith(begin)]
        return min(places, default=len(_LONGEST_FIRST)), file not in slow

    return sorted(items, key=rank)


class FileScheduling(LoadFileScheduling):
    """A file's tests in one process, and those of all files on a Ray cluster."""

    def _split_scope(self, nodeid: str) -> str:
        file = find_file(nodeid)
        return "a Ray cluster" if file in _ON_A_CLUSTER else file
