"""Which cached prefixes continue which, against a plain table of parents."""

import random

import pytest

from tests.v1.core.prefix.unit_caches import h
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.prefix.lineage import Lineage


def path(name: str) -> list[BlockHash]:
    """Return the chained hashes of a prompt whose units are letters."""
    return [h(name[: i + 1]) for i in range(len(name))]


def check(lineage: Lineage, parents: dict[BlockHash, BlockHash | None]) -> None:
    assert lineage.parents == parents
    known = [*parents, h("unknown")]
    for one in known:
        children = [child for child, parent in parents.items() if parent == one]
        assert lineage.parent_of(one) == parents.get(one)
        assert lineage.is_leaf(one) == (one in parents and not children)
        assert lineage.has_other_continuation(one, None) == bool(children)
        for child in children:
            assert lineage.has_other_continuation(one, child) == (len(children) > 1)
        assert lineage.has_other_continuation(one, h("unknown")) == bool(children)


@pytest.mark.parametrize("seed", range(6))
def test_units_come_and_go(seed: int) -> None:
    draw, lineage = random.Random(seed), Lineage()
    parents: dict[BlockHash, BlockHash | None] = {}
    for _ in range(120):
        if parents and draw.random() < 0.4:
            gone = draw.choice(list(parents))
            lineage.remove(gone)
            del parents[gone]
        else:
            # Few letters: prompts share beginnings; a step publishes a part of one.
            units = path("".join(draw.choice("ab") for _ in range(draw.randrange(1, 6))))
            first = draw.randrange(len(units))
            before = units[first - 1] if first else None
            added = units[first:]
            lineage.add(added, [before, *added[:-1]])
            for unit, parent in zip(added, [before, *added[:-1]], strict=True):
                parents.setdefault(unit, parent)
        check(lineage, parents)
    lineage.clear()
    check(lineage, {})
