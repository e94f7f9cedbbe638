"""The bounded store of responses, against a plain model of it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm.entrypoints.openai.responses.store import ResponseStore, StoredResponse
from vllm.exceptions import ResponseNotFoundError


def make(
    name: str, previous: str | None = None, num_bytes: int = 10, **fields: Any
) -> StoredResponse:
    """A response with an item in and an item out."""
    return StoredResponse(
        response_id=name,
        previous_id=previous,
        input_items=[{"id": f"in_{name}", "type": "message"}],
        output_items=[{"id": f"out_{name}", "type": "message"}],
        body=name.encode(),
        num_bytes=num_bytes,
        **fields,
    )


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_conversation_is_read_oldest_first() -> None:
    store = ResponseStore(10, 1000, 100)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        store.put(make(name, previous))
    ids = [item["id"] for item in store.history("c")]
    assert ids == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert store.get("b").body == b"b"


def test_a_broken_conversation_is_not_continued() -> None:
    store = ResponseStore(10, 1000, 100)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(make(name, previous))
    store.delete("a")
    assert store.get("c").body == b"c"
    with pytest.raises(ResponseNotFoundError, match="continues 'a'") as raised:
        store.history("c")
    assert raised.value.param == "previous_response_id"


@pytest.mark.parametrize(("bounds", "kept"), [((2, 1000), "bc"), ((9, 25), "bc"), ((9, 9), "")])
def test_number_and_bytes_are_bounded(bounds: tuple[int, int], kept: str) -> None:
    store = ResponseStore(*bounds, 100)
    told = [store.put(make(name)) for name in "abc"]
    assert told == [bool(kept)] * 3
    assert len(store) == len(kept)
    assert store.num_bytes == 10 * len(kept)
    for name in "abc":
        if name in kept:
            assert store.find_item(f"out_{name}")["id"] == f"out_{name}"
        else:
            with pytest.raises(ResponseNotFoundError):
                store.get(name)
            with pytest.raises(ResponseNotFoundError):
                store.find_item(f"in_{name}")


def test_use_of_a_conversation_keeps_its_beginning() -> None:
    store = ResponseStore(3, 1000, 100)
    store.put(make("a"))
    store.put(make("x"))
    store.put(make("b", "a"))
    store.history("b")
    store.put(make("c", "b"))
    assert [item["id"] for item in store.history("c")][:2] == ["in_a", "out_a"]
    with pytest.raises(ResponseNotFoundError):
        store.get("x")


def test_age_counts_from_storing() -> None:
    clock = Clock()
    store = ResponseStore(10, 1000, 60, clock)
    store.put(make("a"))
    clock.now = 30
    store.put(make("b"))
    store.get("a")
    clock.now = 61
    with pytest.raises(ResponseNotFoundError):
        store.get("a")
    assert store.get("b").body == b"b"
    clock.now = 91
    with pytest.raises(ResponseNotFoundError):
        store.find_item("in_b")
    assert (len(store), store.num_bytes) == (0, 0)


def test_an_id_of_anothers_item_takes_nothing_over() -> None:
    store = ResponseStore(10, 1000, 60)
    store.put(make("a"))
    forged = StoredResponse("b", None, [{"id": "out_a", "type": "forged"}], [], b"b", 10)
    store.put(forged)
    assert store.find_item("out_a")["type"] == "message"
    store.delete("b")
    assert store.find_item("out_a")["type"] == "message"


class StoreMachine(RuleBasedStateMachine):
    """Random use; the model is a list in order of use."""

    MAX_RESPONSES, MAX_BYTES, MAX_AGE_S = 4, 50, 20

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = ResponseStore(self.MAX_RESPONSES, self.MAX_BYTES, self.MAX_AGE_S, self.clock)
        self.by_use: list[tuple[StoredResponse, float]] = []
        self.num_made = 0

    def _expire(self) -> None:
        oldest = self.clock.now - self.MAX_AGE_S
        self.by_use = [entry for entry in self.by_use if entry[1] >= oldest]

    def _chain(self, name: str) -> list[StoredResponse]:
        known = {response.response_id: response for response, _ in self.by_use}
        chain = []
        at: str | None = name
        while at is not None and at in known:
            chain.insert(0, known[at])
            at = known[at].previous_id
        return chain

    def _touch(self, chain: list[StoredResponse]) -> None:
        for response in chain:
            entry = next(e for e in self.by_use if e[0] is response)
            self.by_use.remove(entry)
            self.by_use.append(entry)

    @rule(num_bytes=st.integers(1, 60), back=st.integers(0, 5))
    def put(self, num_bytes: int, back: int) -> None:
        self._expire()
        self.num_made += 1
        previous = f"r{self.num_made - back}" if back else None
        response = make(f"r{self.num_made}", previous, num_bytes)
        assert self.store.put(response) == (num_bytes <= self.MAX_BYTES)
        if num_bytes <= self.MAX_BYTES:
            self.by_use.append((response, self.clock.now))
        while (
            len(self.by_use) > self.MAX_RESPONSES
            or sum(r.num_bytes for r, _ in self.by_use) > self.MAX_BYTES
        ):
            self.by_use.pop(0)

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.num_made)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self._expire()
        name = f"r{data.draw(st.integers(1, self.num_made))}"
        chain = self._chain(name)
        if not chain:
            with pytest.raises(ResponseNotFoundError):
                self.store.history(name)
            return
        self._touch(chain)
        if chain[0].previous_id is not None:
            with pytest.raises(ResponseNotFoundError):
                self.store.history(name)
        else:
            expected = [item for response in chain for item in response.items]
            assert self.store.history(name) == expected

    @precondition(lambda self: self.num_made)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self._expire()
        name = f"r{data.draw(st.integers(1, self.num_made))}"
        chain = self._chain(name)
        if not chain:
            with pytest.raises(ResponseNotFoundError):
                self.store.delete(name)
            return
        self._touch(chain)
        self.store.delete(name)
        self.by_use = [entry for entry in self.by_use if entry[0].response_id != name]

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.store) <= self.MAX_RESPONSES
        assert 0 <= self.store.num_bytes <= self.MAX_BYTES


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStore = pytest.mark.slow(StoreMachine.TestCase)
