"""A load and its holder, frame by frame: the ways in which transfers fail in the field."""

import pytest

from benchmarks.transfer_engines import MANIFEST
from tests.distributed.kv_transfer.handover.builders import HOLDER, ME, Engines
from vllm.distributed.kv_transfer.handover.frames import FrameError, Head, Kind
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.pulling import Conversation, Load, PullTimeouts
from vllm.distributed.kv_transfer.handover.serving import Frame, Serving


def hand_in(conversation: Conversation, frame: Frame, now: float = 0.0) -> list[Frame]:
    """Give a conversation a frame, as a driver does; returns what it says."""
    head = Head.unpack(frame[0])
    data = memoryview(b"".join(bytes(piece) for piece in frame[1:]))
    target = conversation.target(head)
    if target is None:
        kept = data if conversation.wants_payload(head) else b""
        return list(conversation.receive(head, kept, now))
    for piece in target:
        piece[:] = data[: len(piece)]
        data = data[len(piece) :]
    return list(conversation.receive(head, None, now))


def answers(serving: Serving, frames: list[Frame]) -> list[Frame]:
    """Give a holder frames; returns all it answers, copied as a wire would."""
    copied: list[Frame] = []
    for frame in frames:
        for answer in serving.handle(Head.unpack(frame[0]), b"".join(map(bytes, frame[1:]))):
            copied.append([bytes(piece) for piece in answer])
    return copied


def talk(conversation: Conversation, serving: Serving, now: float = 0.0) -> None:
    """Let both talk until nobody has anything to say."""
    frames = list(conversation.connected(is_greeted=False))
    while frames:
        frames = [
            f for answer in answers(serving, frames) for f in hand_in(conversation, answer, now)
        ]


def pulled(load: Load, serving: Serving) -> list[Frame]:
    """Greet, pull, and return the frames of rows with the end behind them."""
    (welcome,) = answers(serving, list(load.connected(is_greeted=False)))
    return answers(serving, hand_in(load, welcome))


@pytest.mark.parametrize("dense_from", [0, 16, 64, 112, 128])
def test_a_prefix_comes_whole(dense_from: int) -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, blocks = engines.load("a", dense_from=dense_from)
    talk(load, engines.serving())
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(blocks, prompt=1)
    assert not engines.has_rows(blocks, prompt=2)
    returning = engines.returning("a")
    talk(returning, engines.serving())
    assert returning.outcome is not None
    assert returning.outcome.succeeded
    assert engines.leases.collect() == {"a"}


def test_nothing_is_asked_for_where_all_is_here() -> None:
    load, _ = Engines().load("a", num_tokens=0)
    assert load.outcome is not None
    assert load.outcome.succeeded


@pytest.mark.parametrize("what", ["block_size", "weights", "dtype", "tensor parallel"])
def test_engines_that_disagree_are_told_apart_in_one_line(what: str) -> None:
    # "P and D disagree on block size, dtype, layout, TP: starts, then wrong".
    engines = Engines()
    engines.offer("a", prompt=1)
    other = Hello({**MANIFEST, what: "other"}, "holder", "run-p")
    load, _ = engines.load("a")
    talk(load, engines.serving(other))
    assert load.outcome is not None
    assert not load.outcome.succeeded
    reason = load.outcome.reason
    assert "\n" not in reason
    ours = MANIFEST.get(what, "(not told)")
    assert all(part in reason for part in (what, "'other'", f"'{ours}'", "holder", "puller"))


def test_a_holder_that_was_started_anew_has_nothing() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, _ = engines.load("a")
    talk(load, engines.serving(Hello(dict(MANIFEST), "holder", "run-q")))
    assert load.outcome is not None
    assert "started anew" in load.outcome.reason


def test_a_state_pool_that_is_not_sent_is_missed() -> None:
    # "A state pool was never sent: fluent but wrong": all regions or no success.
    engines = Engines()
    engines.offer("a", prompt=1)
    load, blocks = engines.load("a")
    serving = engines.serving()
    *rows, last, end = pulled(load, serving)
    for frame in rows:
        hand_in(load, frame)
    again = hand_in(load, end)
    assert load.outcome is None
    # Only what is missing is asked for once more.
    answered = answers(serving, again)
    assert [Head.unpack(frame[0]).index for frame in answered] == [Head.unpack(last[0]).index, 0]
    hand_in(load, answered[0])
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(blocks, prompt=1)


@pytest.mark.parametrize("place", [0, 1, -2])
def test_changed_rows_are_asked_for_again(place: int) -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, blocks = engines.load("a")
    serving = engines.serving()
    frames = pulled(load, serving)
    changed = [frames[place][0], b"".join(frames[place][1:])]
    changed[1] = bytes([changed[1][0] ^ 1]) + changed[1][1:]
    frames[place] = changed
    asked = [said for frame in frames for said in hand_in(load, frame)]
    assert load.num_dropped == 1
    for answer in answers(serving, asked):
        hand_in(load, answer)
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(blocks, prompt=1)


def test_late_and_doubled_rows_change_nothing() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, blocks = engines.load("a")
    old = pulled(load, engines.serving())
    load.broken("closed", 0.0)
    # The blocks of the lease hold other rows by the time the old frames arrive.
    fresh = pulled(load, engines.serving())
    for frame in (*old, fresh[0], fresh[0], *reversed(fresh[:-1])):
        hand_in(load, frame)
    assert load.num_dropped == len(old) - 1 + 2
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(blocks, prompt=1)


def test_rows_of_another_request_are_dropped() -> None:
    engines = Engines()
    for prompt, lease in ((1, "a"), (2, "b")):
        engines.offer(lease, prompt)
    load, blocks = engines.load("a")
    serving = engines.serving()
    mine = pulled(load, serving)
    other, _ = engines.load("b")
    other._generation = load._generation - 1
    other._make_generation = lambda: load._generation
    foreign = pulled(other, engines.serving())
    for frame in foreign[:-1]:
        hand_in(load, frame)
    assert load.num_dropped == len(foreign) - 1
    for frame in mine:
        hand_in(load, frame)
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(blocks, prompt=1)


def test_a_peer_that_is_gone_does_not_stall_a_request() -> None:
    # "Stalls when a peer dies": no progress for as long as the timeouts lasts is the end.
    engines = Engines()
    load, _ = engines.load("a", timeouts=PullTimeouts(quiet_s=5.0, stuck_s=2.0))
    now, tries = 0.0, 0
    while load.outcome is None:
        now = max(now, load.retry_at)
        load.broken("refused", now)
        tries += 1
    assert 2.0 <= now <= 3.5
    assert 5 <= tries <= 20
    assert "refused" in load.outcome.reason


def test_a_peer_that_answers_slowly_is_bounded_by_the_deadline() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, _ = engines.load("a", deadline_s=20.0)
    frames = pulled(load, engines.serving())
    hand_in(load, frames[0], now=19.0)
    assert load.wait_s(19.0, 19.0) == 1.0
    load.check_deadline(20.0)
    assert load.outcome is not None
    assert "deadline" in load.outcome.reason
    # What still comes is not written anywhere.
    head = Head.unpack(frames[1][0])
    assert load.target(head) is None


def test_a_lease_that_is_not_known_yet_is_asked_for_again() -> None:
    engines = Engines()
    load, blocks = engines.load("a")
    with pytest.raises(FrameError, match="not known"):
        talk(load, engines.serving())
    load.broken("not known", 0.1)
    assert load.outcome is None
    engines.offer("a", prompt=1)
    talk(load, engines.serving())
    assert engines.has_rows(blocks, prompt=1)


def test_a_holder_that_greets_and_has_nothing_is_given_up() -> None:
    engines = Engines()
    load, _ = engines.load("a", timeouts=PullTimeouts(quiet_s=5.0, stuck_s=2.0))
    now = 0.0
    while load.outcome is None:
        now = max(now, load.retry_at)
        with pytest.raises(FrameError, match="not known"):
            talk(load, engines.serving(), now)
        load.broken("not known", now)
    assert 2.0 <= now <= 3.5


@pytest.mark.parametrize(("breaks_at", "is_over"), [(10.5, False), (11.0, True)])
def test_the_first_greeting_is_progress_and_no_later_one(breaks_at: float, is_over: bool) -> None:
    engines = Engines()
    load, _ = engines.load("a", timeouts=PullTimeouts(quiet_s=5.0, stuck_s=2.0))
    for now in (9.0, 10.0):
        with pytest.raises(FrameError, match="not known"):
            talk(load, engines.serving(), now)
    load.broken("not known", breaks_at)
    assert (load.outcome is not None) is is_over


def test_a_lease_that_has_ended_is_not_asked_for_again() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    engines.leases.end("a")
    load, _ = engines.load("a")
    talk(load, engines.serving())
    assert load.outcome is not None
    assert "has ended" in load.outcome.reason


def test_a_lease_that_ends_while_it_is_read_sends_no_further_row() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, _ = engines.load("a")
    serving = engines.serving()
    (welcome,) = answers(serving, list(load.connected(is_greeted=False)))
    (pull,) = hand_in(load, welcome)
    stream = serving.handle(Head.unpack(pull[0]), bytes(pull[1]))
    next(stream)
    engines.leases.end("a")
    # Not before the reader is through.
    assert engines.leases.collect() == set()
    rest = list(stream)
    assert [Head.unpack(frame[0]).kind for frame in rest] == [Kind.FAIL]
    assert engines.leases.collect() == {"a"}


@pytest.mark.parametrize("num_tokens", [112, 144])
def test_a_pull_that_does_not_fit_its_lease_is_refused(num_tokens: int) -> None:
    engines = Engines()
    engines.offer("a", prompt=1, num_tokens=128)
    load, _ = engines.load("a", num_tokens=num_tokens)
    talk(load, engines.serving())
    assert load.outcome is not None
    assert "128 tokens" in load.outcome.reason


def test_nothing_is_answered_before_a_greeting() -> None:
    engines = Engines()
    engines.offer("a", prompt=1)
    load, _ = engines.load("a")
    (pull,) = load.connected(is_greeted=True)
    with pytest.raises(FrameError, match="greeting"):
        answers(engines.serving(), [pull])


def test_the_holder_takes_no_answers() -> None:
    engines = Engines()
    serving = engines.serving()
    load, _ = engines.load("a")
    answers(serving, list(load.connected(is_greeted=False)))
    (welcome,) = answers(engines.serving(), list(load.connected(is_greeted=False)))
    with pytest.raises(FrameError, match="WELCOME"):
        answers(serving, [welcome])
    assert HOLDER.instance != ME.instance
