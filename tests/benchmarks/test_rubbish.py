"""Rubbish is the same for the same seed, and of every kind."""

import pytest

from benchmarks.rubbish import Tally
from benchmarks.rubbish_requests import Rubbish, RubbishMaker

SCHEMA = {
    "paths": {
        "/v1/things": {
            "post": {
                "requestBody": {
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}
                    }
                }
            }
        },
        "/health": {"get": {}},
    },
    "components": {"schemas": {"Thing": {"properties": {"odd_name": {}, "max_tokens": {}}}}},
}


def _make(seed: int, count: int = 400) -> list[Rubbish]:
    maker = RubbishMaker(SCHEMA, seed)
    return [maker.make() for _ in range(count)]


def test_a_seed_says_it_all() -> None:
    assert _make(1) == _make(1)
    assert _make(1) != _make(2)


def test_every_kind_comes_and_routes_fields_are_hit() -> None:
    made = _make(1)
    kinds = {"wrong value", "noise", "cut", "deep", "huge", "twice", "encoding", "method"}
    assert {one.kind for one in made} == kinds | {"path", "header", "raw", "leaves"}
    assert any(b'"odd_name"' in one.data for one in made)
    assert all(one.data for one in made)


@pytest.mark.parametrize(
    ("status", "is_fault"),
    [
        ("200", False),
        ("400", False),
        ("503", False),
        ("none", False),
        ("500", True),
        ("late", True),
    ],
)
def test_what_counts_as_a_fault(status: str, is_fault: bool) -> None:
    tally = Tally()
    tally.add(Rubbish("deep", b"x"), status, 0.5)
    assert bool(tally.faults) == is_fault
    assert tally.slowest == {"deep": 0.5}
