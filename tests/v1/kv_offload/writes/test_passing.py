"""Which states a full tier gives up: those that their conversation has left behind."""

from hashlib import sha256

import pytest

from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.host_store import make_host_store
from vllm.v1.kv_offload.store.records import ObjectKey, ObjectSpec
from vllm.v1.kv_offload.writes.passing import note_passage
from vllm.v1.kv_offload.writes.tracking import Passage

UNIT, GROUP = 32, 64
LAYOUT = ObjectLayout((), (), UNIT, UNIT, GROUP)
SIZE = 4000


def _hashes(text):
    """One hash for each character: a prefix's."""
    return [sha256(text[: i + 1].encode()).digest() for i in range(len(text))]


class _Folder:
    """A tier and the conversations that go through it."""

    def __init__(self):
        store = make_host_store([SIZE], 1, 1 << 20)
        assert store is not None
        self.store = store

    def keep(self, text, kind, *, is_shared=False):
        key = ObjectKey.of(kind, _hashes(text)[-1])
        spec = ObjectSpec(key, len(text) * UNIT, SIZE, None, is_shared)
        self.store.writer.commit([r for r in self.store.reserve([spec]) if r is not None])

    def turn(self, text, hit="", *, keeps=True):
        """A prompt begins behind what it hits, and leaves a state at its end."""
        hashes = _hashes(text)
        if hit:
            note_passage(self.store, LAYOUT, Passage(hashes, len(hit) * UNIT, is_hit=True))
        for end in range(GROUP // UNIT, len(text) + 1, GROUP // UNIT):
            self.keep(text[:end], ObjectKind.ROWS)
        if keeps:
            self.keep(text, ObjectKind.STATE)
        note_passage(self.store, LAYOUT, Passage(hashes, len(text) * UNIT, is_hit=False))

    def go(self):
        """All objects in the order in which they go."""
        table = self.store.state.entries.table
        while (index := table.next_victim(())) is not None:
            yield table.describe(index)
            table.remove(index)

    def order(self):
        """The same, as (is a state, units)."""
        return [
            (found.extent.key.kind is ObjectKind.STATE, found.position // UNIT)
            for found in self.go()
        ]


def test_what_a_conversation_left_behind_goes_first_and_its_last_two_states_do_not():
    folder = _Folder()
    folder.turn("lmnopq")
    folder.turn("abcd")
    folder.turn("abcdef", hit="abcd")
    folder.turn("abcdefgh", hit="abcdef")
    # Then the older conversation, of each its end first: rows were used all at one time.
    older = [(True, 6), (False, 6), (False, 4), (False, 2)]
    states, rows = [(True, 6), (True, 8)], [(False, 8), (False, 6), (False, 4), (False, 2)]
    assert folder.order() == [(True, 4), *older, *states, *rows]


@pytest.mark.parametrize("is_told", [True, False], ids=["seen to part", "hit by several"])
def test_where_prompts_part_is_nobodys_to_leave_behind(is_told):
    folder = _Folder()
    folder.turn("sy", keeps=False)
    folder.keep("sy", ObjectKind.STATE, is_shared=is_told)
    if not is_told:
        folder.turn("sykl", hit="sy")
    folder.turn("opqrstuvwx")
    folder.turn("syab", hit="sy")
    folder.turn("syabcd", hit="syab")
    folder.turn("syabcdef", hit="syabcd")
    gone = folder.order()
    assert gone[0] == (True, 4)
    # Then what was not used since.
    assert (True, 2) not in gone[:6]


def test_a_state_that_is_hit_again_is_one_to_keep_again():
    folder = _Folder()
    folder.turn("abcd")
    folder.turn("abcdef", hit="abcd")
    folder.turn("abcdefgh", hit="abcdef")
    # Its user went back to an early turn.
    folder.turn("abcdkl", hit="abcd")
    assert folder.order()[0] != (True, 4)


def test_what_a_prompt_hits_in_the_pool_is_used_on_the_disk_too():
    folder = _Folder()
    folder.turn("abcd")
    folder.turn("wxyz")
    note_passage(folder.store, LAYOUT, Passage(_hashes("abcd"), 4 * UNIT, is_hit=True))
    names = {h[:16] for h in _hashes("abcd")}
    assert [found.extent.key.digest in names for found in folder.go()] == [False] * 3 + [True] * 3
