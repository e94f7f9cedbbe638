"""An engine core pulls what its neighbours use most, in one process: tokens, budgets, faults."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import ANY

import msgspec
import pytest

from tests.ports import free_ports
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core, random_tokens
from tests.v1.engine.test_handover import config_of
from tests.v1.engine.test_offloading import tiers_of, wait_open
from vllm.config import KVTransferConfig
from vllm.config.kv_transfer import join_configs
from vllm.distributed.kv_transfer.handover.sockets import find_port_range
from vllm.exceptions import UserInputError
from vllm.v1.engine.core_loop import CoreLoop
from vllm.v1.engine.questions import OfferPopular, PullPopular
from vllm.v1.engine.wire import Answer, FromCore
from vllm.v1.messages import PopularPrefix
from vllm.v1.metrics.stats import PullStats

pytestmark = pytest.mark.slow

_WAIT_S = 120.0
GIB = 1 << 30


# A slow machine loses nothing.
_PATIENT = {"load_timeout_s": 600, "stuck_timeout_s": 600, "quiet_timeout_s": 600}


def neighbour(
    num_blocks: int = 400,
    *,
    is_ahead: bool = False,
    folder: Path | None = None,
    other: KVTransferConfig | None = None,
) -> Session:
    """Return a core that shares its cache.

    Args:
        num_blocks: Of its pool.
        is_ahead: Whether it schedules ahead.
        folder: Where it has a tier on a disk, too.
        other: Another connector beside it, which serves requests.
    """
    raw = {
        "kv_connector": "NeighbourConnector",
        "kv_role": "kv_both",
        "kv_port": find_port_range("127.0.0.1", 0, 1),
        "kv_connector_extra_config": {**_PATIENT, "leaves_requests": other is not None},
    }
    transfer = KVTransferConfig.from_dict(raw)
    if other is not None:
        transfer = join_configs(transfer, other, named=other)
    if folder is not None:
        transfer = join_configs(KVTransferConfig.from_dict(tiers_of(folder, warm=2)), transfer)
    session = Session(
        make_core(32, num_blocks=num_blocks, budget=256, transfer=transfer, is_ahead=is_ahead)
    )
    if folder is not None:
        wait_open(session.core.scheduler.connector._parts[0])
    return session


class Pair:
    """A core that serves, and one that begins beside it."""

    def __init__(
        self,
        *,
        is_ahead: bool = False,
        folders: Sequence[Path | None] = (None, None),
        others: Sequence[KVTransferConfig | None] = (None, None),
    ) -> None:
        self.old, self.new = (
            neighbour(is_ahead=is_ahead, folder=folder, other=other)
            for folder, other in zip(folders, others, strict=True)
        )
        self.told: dict[int, list[FromCore]] = {0: [], 1: []}
        self.loops = [
            CoreLoop(session.core, self.told[i].append)
            for i, session in enumerate((self.old, self.new))
        ]

    def offer(self, max_bytes: int = GIB) -> list[PopularPrefix]:
        question = OfferPopular(max_bytes)
        self.loops[0].submit(question.to_message(7))
        self.loops[0].run_once()
        answer = self.told[0].pop()
        while not isinstance(answer, Answer):
            answer = self.told[0].pop()
        assert answer.call_id == 7
        return question.read(answer)

    def pull(
        self, prefixes: list[PopularPrefix], max_bytes: int = GIB, seconds: float = 3600.0
    ) -> PullStats:
        question = PullPopular(prefixes, max_bytes, seconds)
        self.loops[1].submit(question.to_message(9))
        deadline = time.monotonic() + _WAIT_S
        while True:
            for loop in self.loops:
                loop.run_once()
            answers = [m for m in self.told[1] if isinstance(m, Answer)]
            if answers and not any(s.core.has_work() for s in (self.old, self.new)):
                self.told[1].clear()
                (answer,) = answers
                return question.read(answer)
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def step_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not done():
            assert time.monotonic() < deadline
            for session in (self.old, self.new):
                session.step()
            time.sleep(0.0005)

    def check_free(self) -> None:
        for session in (self.old, self.new):
            manager = session.core.scheduler.kv_cache_manager
            manager.check_invariants()
            assert manager.usage == 0


def block_bytes(pair: Pair) -> int:
    info = pair.new.core.kv_cache_info
    return info.capacity_bytes // info.num_blocks


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(is_ahead=getattr(request, "param", False))
    yield pair
    for session in (pair.old, pair.new):
        session.core.shutdown()


def ask(session: Session, prompt: list[int]) -> tuple[list[int], int]:
    request_id = session.add(prompt, 6)
    session.run()
    answer = session.answers[request_id]
    assert answer.stats is not None
    return answer.tokens, answer.stats.num_cached_tokens


@pytest.mark.parametrize("pair", [False, True], ids=["plain", "a step ahead"], indirect=True)
def test_a_core_pulls_what_a_neighbour_uses_most_and_says_the_same(pair: Pair) -> None:
    rng = random.Random(3)
    common = random_tokens(rng, 400)
    prompts = [common + random_tokens(rng, length) for length in (40, 90, 150)]
    answers = [ask(pair.old, prompt)[0] for prompt in prompts]
    turns = [p + a + random_tokens(rng, 20) for p, a in zip(prompts, answers, strict=True)]
    ask(pair.old, prompts[0])
    offers = pair.offer()
    assert {offer.conversation for offer in offers} == {0, 1, 2}
    # Asked twice.
    assert offers[0].weight > offers[-1].weight
    assert pair.old.core.scheduler.kv_cache_manager.usage > 0
    report = pair.pull(offers)
    assert (report.num_prefixes, report.num_failed) == (len(offers), 0)
    assert report.num_tokens == sum(offer.num_tokens for offer in offers)
    # What they share came once.
    assert 0 < report.num_bytes < sum(offer.num_blocks for offer in offers) * block_bytes(pair)
    pair.check_free()
    for turn in [*turns, *prompts]:
        expected, hit = ask(pair.old, turn)
        assert hit > 400
        assert ask(pair.new, turn) == (expected, hit)
    assert pair.offer(0) == []


@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain", "a step ahead"])
def test_a_core_with_tiers_pulls_beside_them(
    is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As cores of one server, which share the root of their folder.
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    rng = random.Random(9)
    kept, hot, late = (random_tokens(rng, length) for length in (300, 330, 270))
    folders = [tmp_path / name for name in ("old", "new")]
    # The new core's disk has something of its last life.
    first = neighbour(folder=folders[1])
    expected = [ask(first, kept)[0]]
    first.core.shutdown()
    pair = Pair(is_ahead=is_ahead, folders=folders)
    expected += [ask(pair.old, hot)[0]]
    report = pair.pull(pair.offer())
    assert (report.num_prefixes > 0, report.num_failed) == (True, 0)
    pair.check_free()
    hooks = pair.new.core.scheduler.connector.hooks
    # Pulled, and brought back from the disk, side by side: nobody has asked yet.
    assert hooks.view_tiers().warm_start.state == "done"
    assert hooks.view_tiers().warm_start.num_prefixes == 1
    for prompt, tokens in zip((kept, hot), expected, strict=True):
        answered, hit = ask(pair.new, prompt)
        assert answered == tokens
        assert hit > 200
    expected += [ask(pair.new, late)[0]]
    pair.check_free()
    # What was pulled is in the new core's tier, like what it computed, once somebody used it.
    for session in (pair.old, pair.new):
        session.core.shutdown()
    again = neighbour(folder=folders[1])
    for prompt, tokens in zip((kept, hot, late), expected, strict=True):
        answered, hit = ask(again, prompt)
        assert answered == tokens
        assert hit > 200
    again.core.shutdown()


def test_a_core_that_takes_prompts_pulls_besides() -> None:
    """It decodes what another prefilled, before a pull and after it, and hits what it pulled."""
    rng, port = random.Random(12), free_ports()
    pair = Pair(others=[config_of("kv_producer", port), config_of("kv_consumer", port)])
    hot, cold, late = (random_tokens(rng, length) for length in (300, 210, 170))
    expected = ask(pair.old, hot)[0]

    def hand_over(prompt: list[int]) -> int:
        given = pair.old.answers[pair.old.add(prompt, 1, transfer={"do_remote_decode": True})]
        pair.step_until(lambda: given.finish_reason is not None)
        assert given.transfer is not None
        taken = pair.new.answers[pair.new.add(prompt, 6, transfer=given.transfer)]
        pair.step_until(lambda: not any(s.core.has_work() for s in (pair.old, pair.new)))
        assert taken.stats is not None
        assert taken.tokens == ask(pair.old, prompt)[0]
        return int(taken.stats.num_external_tokens)

    assert hand_over(cold) == (210 - 1) // 32 * 32
    report = pair.pull(pair.offer())
    assert (report.num_prefixes > 0, report.num_failed) == (True, 0)
    assert hand_over(late) == (170 - 1) // 32 * 32
    answered, hit = ask(pair.new, hot)
    assert (answered, hit > 200) == (expected, True)
    pair.check_free()
    for session in (pair.old, pair.new):
        session.core.shutdown()


def test_a_pull_keeps_to_its_budget_and_gives_back_what_it_does_not_take(pair: Pair) -> None:
    rng = random.Random(4)
    for _ in range(3):
        ask(pair.old, random_tokens(rng, 200))
    offers = pair.offer()
    report = pair.pull(offers, max_bytes=1)
    # One was under way when it was spent.
    assert (report.num_prefixes, report.num_failed) == (1, 0)
    pair.check_free()
    # They are held no more: whoever comes too late gets nothing, and serves all the same.
    late = pair.pull(offers)
    assert (late.num_prefixes, late.num_failed) == (0, len(offers) - 1)
    pair.check_free()
    # Nothing that is cached goes for what is pulled.
    large = [msgspec.structs.replace(offer, num_blocks=400) for offer in pair.offer()]
    assert pair.pull(large) == PullStats(seconds=ANY)
    pair.check_free()


def test_an_answer_that_ends_with_a_unit_is_offered_as_it_is_held() -> None:
    prompt, found = random_tokens(random.Random(6), 60), []
    stop = -1
    for is_ahead in (False, False, True):
        session = neighbour(is_ahead=is_ahead)
        # The last token ends the second unit, and its row is never computed; a step ahead it is,
        # but counts for nothing.
        stops = {"stop_token_ids": [stop]} if stop >= 0 else {}
        answer = session.answers[session.add(prompt, 50, **stops)]
        session.run()
        if not found:
            stop = answer.tokens[3]
            assert stop not in answer.tokens[:3]
        else:
            assert len(answer.tokens) == 4
        offers = session.core.scheduler.connector.hooks.offer_popular(GIB)
        found.append([offer.num_tokens for offer in offers])
        session.core.withdraw_prefixes([offer.lease for offer in offers])
        session.run()
        session.core.shutdown()
    assert found[1] == found[2] == [32]


def test_clients_transfer_nothing(pair: Pair) -> None:
    with pytest.raises(UserInputError, match="neither prefills"):
        pair.old.add([1, 2, 3], 1, transfer={"do_remote_decode": True})
