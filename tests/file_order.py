"""Which tests a run's processes side by side get, and which first.

The longest files come first, so that none is left when everything else is done; those that share a
Ray cluster, or a server, stay together: each process would start one of its own.
"""

from collections.abc import Mapping, Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

_LONGEST_FIRST = ("tests/ray_serve/", "tests/accelerators/", "tests/e2e/", "tests/test_design_map")
_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "tests/ray_serve/test_": ("fleet", "ranks", "workers"),
    "tests/e2e/test_": ("agent_loops", "messages_client", "responses_client"),
}
_SCOPES = {
    f"{begin}{name}.py": f"{begin}{names[0]}.py and others"
    for begin, names in _TOGETHER.items()
    for name in names
}


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
    """A file's tests in one process, and those of all files that stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file = find_file(nodeid)
        return _SCOPES.get(file, file)
