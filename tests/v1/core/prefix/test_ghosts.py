"""The memory of what was evicted."""

from tests.v1.core.prefix.unit_caches import h
from vllm.v1.core.prefix.ghosts import GhostList


def test_ghosts_are_bounded_and_drop_the_oldest() -> None:
    ghosts = GhostList(capacity=2)
    for name in ("a", "b", "a", "c"):
        ghosts.add(h(name))
    assert h("b") not in ghosts
    assert h("a") in ghosts
    assert len(ghosts) == 2
    ghosts.discard([h("a")])
    assert h("a") not in ghosts
    ghosts.discard([h("never seen")])
    assert len(ghosts) == 1
    ghosts.clear()
    assert h("c") not in ghosts
