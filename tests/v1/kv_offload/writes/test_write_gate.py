"""vllm/v1/kv_offload/writes/write_gate.py"""

from collections import deque

import pytest

from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.records import ObjectKey
from vllm.v1.kv_offload.writes import write_gate
from vllm.v1.kv_offload.writes.tracking import Candidate
from vllm.v1.kv_offload.writes.write_budget import WriteBudget
from vllm.v1.kv_offload.writes.write_gate import WriteGate

SIZE = 100


def _candidates(names: str) -> deque[Candidate]:
    keys = (ObjectKey(ObjectKind.ROWS, name.encode() * 16) for name in names)
    return deque(Candidate(key, [], 0, 32) for key in keys)


def _gate(policy: str = "write_through", per_day: int | None = None) -> WriteGate:
    return WriteGate(policy, WriteBudget(per_day, lambda: 0.0), lambda: False, lambda _: SIZE)


def _ready(gate: WriteGate) -> str:
    names = "".join(candidate.key.digest[:1].decode() for candidate in gate.ready)
    gate.ready.clear()
    return names


def _take(gate: WriteGate, names: str) -> str:
    waiting = _candidates(names)
    gate.take(waiting)
    assert not waiting
    return _ready(gate)


def test_at_once_or_for_a_second_request() -> None:
    assert _take(_gate(), "aba") == "aba"
    gate = _gate("write_through_selective")
    assert _take(gate, "ab") == ""
    assert _take(gate, "cab") == "ab"
    # Who asked for that is not told that it was not written for want of a request.
    assert gate.num_unproven == 0


def test_a_scarce_budget_is_for_what_was_wanted_twice() -> None:
    gate = _gate(per_day=10 * SIZE)
    assert _take(gate, "ab") == "ab"
    gate.budget.spend(6 * SIZE)
    assert _take(gate, "acd") == "a"
    assert gate.num_unproven == 2


@pytest.mark.parametrize("per_day", [None, 10 * SIZE])
def test_a_full_folder_counts_where_nobody_set_a_budget(per_day: int | None) -> None:
    gate = _gate(per_day=per_day)
    gate.begin(4 * SIZE, 4 * SIZE)
    assert _take(gate, "a") == ("a" if per_day else "")
    # Wanted again, but more than the folder holds came between.
    assert _take(gate, "bcdea") == ("bcdea" if per_day else "")


def test_what_was_seen_is_remembered_as_far_as_the_folder_reaches() -> None:
    gate = _gate("write_through_selective")
    gate.begin(3 * SIZE, 0)
    assert _take(gate, "abca") == "a"
    gate.begin(2 * SIZE, 0)
    assert _take(gate, "xyzx") == ""


def test_a_reset_forgets_what_was_seen_too() -> None:
    gate = _gate("write_through_selective")
    gate.take(_candidates("aa"))
    gate.clear()
    assert gate.num_waiting == 0
    assert _take(gate, "a") == ""


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_oldest_are_dropped_when_too_many_wait(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_gate, "_MAX_WAITING", 2)
    gate = _gate(policy)
    gate.take(_candidates("abcd"))
    assert gate.num_waiting == gate.num_dropped == 2
    assert gate.has_work is (policy == "write_through")
    gate.end()
    gate.take(deque())
    assert _ready(gate) == "cd"
