from vllm.v1.core.retention.auto.yields import Yields, spare_kind
from vllm.v1.core.retention.policy import ASKED_FOR


def test_kinds_grow_fourfold() -> None:
    edges = [d for d in range(100_000) if d and spare_kind(d) != spare_kind(d - 1)]
    assert edges == [256, 1024, 4096, 16_384, 65_536]


def test_a_kind_that_is_hit_as_often_as_those_asked_for_is_promising() -> None:
    yields = Yields()
    for _ in range(20):
        yields.note_made(ASKED_FOR)
        yields.note_made(1)
        yields.note_made(2)
    for count in range(1, 9):
        yields.note_hit(ASKED_FOR)
        yields.note_hit(1)
        # A few hits may be chance.
        assert yields.is_promising(1) == (count >= 4)
    assert not yields.is_promising(2)
    yields.note_hit(ASKED_FOR)
    assert not yields.is_promising(1)


def test_what_was_long_ago_counts_less() -> None:
    yields = Yields()
    for _ in range(40):
        yields.note_made(1)
        yields.note_hit(1)
    for _ in range(100_000):
        yields.note_made(1)
        yields.note_made(ASKED_FOR)
    assert not yields.is_promising(1)
