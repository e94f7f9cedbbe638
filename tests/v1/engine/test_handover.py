"""Two engines in one process, over the loopback interface: the tokens of one."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ports import free_ports
from tests.v1.engine.test_cache_keeps_outputs import (
    MIN_SHARE,
    Answer,
    Session,
    count_preferred,
    make_core,
    random_tokens,
)
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.handover.orders import HandoverOrders, LoadOrder
from vllm.distributed.kv_transfer.handover.regions import list_regions
from vllm.distributed.kv_transfer.handover.serving import find_block
from vllm.distributed.kv_transfer.handover.worker import HandoverWorker
from vllm.exceptions import UserInputError
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.messages import FinishReason

pytestmark = pytest.mark.slow

_WAIT_S = 120.0
MAX_LEN = 450
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2)


def config_of(role: str, port: int, policy: str = "recompute", **extra: Any) -> KVTransferConfig:
    raw = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": port}
    raw |= {"kv_connector_extra_config": extra, "kv_load_failure_policy": policy}
    return KVTransferConfig.from_dict(raw)


class Pair:
    """A prefilling and a decoding engine, stepped in turns."""

    num_ports = 1

    def __init__(self, **settings: Any) -> None:
        self.port = free_ports(self.num_ports)
        taking = settings.pop("taking", {})
        policy, extra = settings.pop("policy", "recompute"), settings.pop("extra", {})
        giving = config_of("kv_producer", self.port, **extra)
        self.p = Session(self.make(giving, **settings))
        settings |= taking
        self.d = Session(
            self.make(config_of("kv_consumer", self.port, policy, **extra), **settings)
        )
        self._alive = [self.p, self.d]

    def make(self, transfer: KVTransferConfig, **settings: Any) -> EngineCore:
        """Make one of the engines."""
        return make_core(transfer=transfer, **settings)

    def step(self) -> None:
        """Step both, and give the threads between them a turn."""
        self.p.step()
        self.d.step()
        time.sleep(0.0005)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not done():
            assert time.monotonic() < deadline
            self.step()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Let the first engine compute a prompt; returns what its client is told."""
        asked = {"do_remote_decode": True}
        request_id = self.p.add(prompt, 1, transfer=asked)
        answer = self.p.answers[request_id]
        self.until(lambda: answer.finish_reason is not None)
        assert answer.transfer is not None
        return answer.transfer

    def run(self) -> None:
        """Go on until nothing is left to do."""
        self.until(lambda: not (self.p.core.has_work() or self.d.core.has_work()))

    def answer(self, prompt: list[int], max_tokens: int = 8) -> Answer:
        """Prefill here, decode there."""
        request_id = self.d.add(prompt, max_tokens, transfer=self.prefill(prompt))
        self.run()
        return self.d.answers[request_id]

    def check_free(self) -> None:
        """Nothing is held on either side."""
        for session in (self.p, self.d):
            manager = session.core.scheduler.kv_cache_manager
            manager.check_invariants()
            assert manager.usage == 0
            pool = manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def kill_prefill(self) -> None:
        """End the prefilling engine, whatever it holds."""
        self.p.core.shutdown()
        self._alive.remove(self.p)

    def shutdown(self) -> None:
        for session in self._alive:
            session.core.shutdown()


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    pairs: list[Pair] = []

    def make(**settings: Any) -> Pair:
        pairs.append(Pair(**{"unit": 32, "num_blocks": 600, "budget": 256, **settings}))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.shutdown()


@pytest.fixture(scope="module")
def reference() -> Iterator[Session]:
    """One engine without a prefix cache."""
    core: EngineCore = make_core(32, num_blocks=2000, budget=2048, caching=False)
    yield Session(core)
    core.shutdown()


def check_answers(reference: Session, session: Session, ids: list[str]) -> None:
    """An engine alone would have said the same."""
    compared = total = 0
    for request_id in ids:
        prompt, max_tokens = session.prompts[request_id]
        answer = session.answers[request_id]
        assert len(answer.tokens) == max_tokens
        compared += count_preferred(reference, prompt, answer.tokens)
        total += max_tokens
        assert answer.stats is not None
        missed = sum(answer.stats.miss_tokens.values())
        assert answer.stats.num_cached_tokens + missed == len(prompt)
    assert compared / total >= MIN_SHARE, f"only {compared} of {total} tokens were comparable"


@pytest.mark.parametrize("speculative", [None, MTP])
@pytest.mark.parametrize("caching", [True, False])
def test_prompts_of_many_lengths(
    make_pair: Callable[..., Pair],
    reference: Session,
    speculative: SpeculativeConfig | None,
    caching: bool,
) -> None:
    pair = make_pair(speculative=speculative, taking={"caching": caching})
    rng = random.Random(11)
    for length in (20, 32, 33, 97, 128, 129, 300):
        answer = pair.answer(random_tokens(rng, length))
        expected = (length - 1) // 32 * 32
        assert answer.stats is not None
        assert answer.stats.num_external_tokens == answer.stats.num_cached_tokens == expected
    check_answers(reference, pair.d, list(pair.d.prompts))
    pair.check_free()


class Spy:
    """Notes what workers hold and load, and compares the rows when a load is at its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offers: dict[str, tuple[HandoverWorker, PrefixBlocks]] = {}
        self.loads: dict[str, LoadOrder] = {}
        # By group of the KV cache, bytes that were compared.
        self.num_compared: Counter[int] = Counter()
        apply, collect = HandoverWorker.apply, HandoverWorker.collect

        def note(worker: HandoverWorker, orders: HandoverOrders) -> None:
            self.offers |= {name: (worker, blocks) for name, blocks in orders.offers.items()}
            self.loads |= {order.request_id: order for order in orders.loads}
            apply(worker, orders)

        def compare(worker: HandoverWorker) -> set[str]:
            received = collect(worker)
            for request_id in received:
                self._compare(worker, self.loads[request_id])
            return received

        monkeypatch.setattr(HandoverWorker, "apply", note)
        monkeypatch.setattr(HandoverWorker, "collect", compare)

    def _compare(self, worker: HandoverWorker, order: LoadOrder) -> None:
        holder, held = self.offers[order.remote.lease]
        for region in list_regions(worker._groups, order.remote.num_tokens, 0):
            theirs, ours = (
                b"".join(map(bytes, side._memory.source(region, find_block(*tables, region))))
                for side, tables in (
                    (holder, (held.bases, held.block_ids)),
                    (worker, (order.blocks.bases, order.blocks.block_ids)),
                )
            )
            assert ours == theirs, region
            self.num_compared[region.group_id] += len(ours) * any(ours)


def test_the_rows_of_every_group_travel(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    # "A state pool was never sent: fluent but wrong".
    spy = Spy(monkeypatch)
    pair = make_pair(speculative=MTP)
    # At 160 tokens both compressors are in the middle of their windows.
    pair.answer(random_tokens(random.Random(21), 170))
    config = pair.d.core.scheduler.kv_cache_config
    assert all(spy.num_compared[group] for group in range(len(config.kv_cache_groups)))


def test_decoding_ends_where_it_would(make_pair: Callable[..., Pair], reference: Session) -> None:
    # "Prefill completes, then decoding loops for ever, or repeats".
    pair = make_pair()
    prompt = random_tokens(random.Random(22), 140)
    alone = reference.answers[reference.add(prompt, 12)]
    reference.run()
    stop = alone.tokens[9]
    request_id = pair.d.add(prompt, 200, transfer=pair.prefill(prompt), stop_token_ids=[stop])
    pair.run()
    answer = pair.d.answers[request_id]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.tokens == alone.tokens[: alone.tokens.index(stop) + 1]


def test_what_was_received_is_hit_and_hits_shorten_what_travels(
    make_pair: Callable[..., Pair], reference: Session
) -> None:
    pair = make_pair()
    rng = random.Random(12)
    first = random_tokens(rng, 200)
    pair.answer(first)
    again = pair.answer(first)
    assert again.stats is not None
    # All of it was here: nothing was loaded, and the holder was told.
    assert (again.stats.num_cached_tokens, again.stats.num_external_tokens) == (192, 0)
    longer = pair.answer(first + random_tokens(rng, 100))
    assert longer.stats is not None
    assert (longer.stats.num_cached_tokens, longer.stats.num_external_tokens) == (288, 96)
    hits = pair.p.answers["q2"].stats
    assert hits is not None
    assert hits.num_cached_tokens >= 192, "the prefilling engine hits what it computed"
    check_answers(reference, pair.d, list(pair.d.prompts))
    pair.check_free()


def test_what_was_loaded_may_be_lost_and_is_computed(
    make_pair: Callable[..., Pair], reference: Session
) -> None:
    # "Retraction kills the engine".
    pair = make_pair(speculative=MTP)
    rng = random.Random(23)
    ids = [pair.d.add(p, 60, transfer=pair.prefill(p)) for p in [random_tokens(rng, 150)] * 2]
    pair.until(lambda: all(len(pair.d.answers[i].tokens) >= 4 for i in ids))
    assert pair.d.core.reset_prefix_cache(reset_running_requests=True)
    pair.run()
    assert pair.d.num_preemptions == 2
    check_answers(reference, pair.d, ids)
    pair.check_free()


@pytest.mark.parametrize(
    "settings", [{}, {"speculative": MTP}, {"is_ahead": True}], ids=["plain", "MTP", "ahead"]
)
def test_many_at_once_in_tight_pools(
    make_pair: Callable[..., Pair], reference: Session, settings: dict[str, Any]
) -> None:
    probe = reference.core.scheduler.kv_cache_config
    geometry = CacheGeometry.from_config(
        type(probe)(probe.num_blocks, [], probe.kv_cache_groups, hit_unit=32)
    )
    smallest = max_request_blocks(geometry, MAX_LEN, 2) + 1
    pair = make_pair(num_blocks=smallest + 12, max_len=MAX_LEN, **settings)
    rng = random.Random(13)
    base = random_tokens(rng, 250)
    waiting: dict[str, list[int]] = {}
    ids: list[str] = []
    aborted: list[str] = []

    def hand_on() -> None:
        """Send on what was prefilled, as a proxy does."""
        for request_id in list(waiting):
            params = pair.p.answers[request_id].transfer
            if params is not None:
                prompt = waiting.pop(request_id)
                ids.append(pair.d.add(prompt, rng.randrange(1, 50), transfer=params))
                if (len(ids) + len(aborted)) % 5 == 4:
                    aborted.append(ids.pop())
                    pair.d.core.abort_requests(aborted[-1:])

    for _ in range(16):
        prompt = base[: rng.randrange(1, 250)] + random_tokens(rng, rng.randrange(1, 90))
        waiting[pair.p.add(prompt, 1, transfer={"do_remote_decode": True})] = prompt
        for _ in range(rng.randrange(6)):
            pair.step()
        hand_on()
    while waiting:
        pair.step()
        hand_on()
    pair.run()
    assert len(ids) >= 12
    check_answers(reference, pair.d, ids)
    external = [pair.d.answers[i].stats for i in ids]
    assert sum(stats.num_external_tokens for stats in external if stats is not None) > 500
    pair.check_free()


def test_pairs_a_step_ahead_say_and_hit_the_same(make_pair: Callable[..., Pair]) -> None:
    found: list[list[Any]] = []
    for is_ahead in (False, True):
        pair, rng = make_pair(is_ahead=is_ahead), random.Random(24)
        assert isinstance(pair.d.core.scheduler, AsyncScheduler) == is_ahead
        text = random_tokens(rng, 150)
        for turn in range(3):
            answer = pair.answer(text, 5 + 15 * turn)
            text += answer.tokens + random_tokens(rng, 40)
        # The last turn, cut off where nobody ended.
        pair.answer(text[:200] + random_tokens(rng, 60), 3)
        pair.check_free()
        found.append(
            [
                (name, answer.tokens, answer.finish_reason, answer.stats)
                for session in (pair.p, pair.d)
                for name, answer in session.answers.items()
            ]
        )
    assert found[0] == found[1]
    assert all(sum(s.miss_tokens.values()) + s.num_cached_tokens for *_, s in found[1])


def test_several_answers_to_one_prompt_load_it_once(
    make_pair: Callable[..., Pair], reference: Session
) -> None:
    pair = make_pair()
    prompt = random_tokens(random.Random(14), 200)
    params = pair.prefill(prompt)
    ids = [pair.d.add(prompt, 6, transfer=params) for _ in range(3)]
    pair.run()
    loaded = [pair.d.answers[i].stats for i in ids]
    assert sorted(stats.num_external_tokens for stats in loaded if stats is not None) == [0, 0, 192]
    check_answers(reference, pair.d, ids)
    pair.check_free()


def test_aborts_meet_transfers(make_pair: Callable[..., Pair]) -> None:
    # "Blocks leak on P when D never acknowledges; on D when an abort meets a transfer".
    pair = make_pair()
    rng = random.Random(15)
    for num_steps in range(6):
        prompt = random_tokens(rng, 300)
        request_id = pair.d.add(prompt, 8, transfer=pair.prefill(prompt))
        for _ in range(num_steps):
            pair.step()
        pair.d.core.abort_requests([request_id])
        pair.run()
        pair.check_free()


def test_what_is_refused_may_be_withdrawn(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    rng = random.Random(20)
    prompt = random_tokens(rng, 100)
    params = pair.prefill(prompt)
    with pytest.raises(UserInputError, match="another prompt"):
        pair.d.add(random_tokens(rng, 100), 4, transfer=params)
    assert pair.p.core.scheduler.kv_cache_manager.usage > 0
    pair.p.core.withdraw_prefixes([params["remote_request_id"], "never heard of"])
    pair.run()
    pair.check_free()
    # Whoever comes after all computes it.
    request_id = pair.d.add(prompt, 4, transfer=params)
    pair.run()
    stats = pair.d.answers[request_id].stats
    assert stats is not None
    assert stats.num_external_tokens == 0


def test_an_unread_lease_expires(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(extra={"lease_timeout_s": 0.2})
    prompt = random_tokens(random.Random(16), 300)
    params = pair.prefill(prompt)
    assert pair.p.core.scheduler.kv_cache_manager.usage > 0
    pair.run()
    pair.check_free()
    # Too late: computed here, without a wrong token.
    request_id = pair.d.add(prompt, 4, transfer=params)
    pair.run()
    assert len(pair.d.answers[request_id].tokens) == 4


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefilling_engine_that_died(
    make_pair: Callable[..., Pair], reference: Session, policy: str
) -> None:
    # "D answers with garbage after a failed receive"; "recompute unsupported for hybrid caches".
    pair = make_pair(policy=policy, extra={"stuck_timeout_s": 0.2, "drain_timeout_s": 0.01})
    prompt = random_tokens(random.Random(17), 300)
    params = pair.prefill(prompt)
    pair.kill_prefill()
    request_id = pair.d.add(prompt, 6, transfer=params)
    answer = pair.d.answers[request_id]
    deadline = time.monotonic() + _WAIT_S
    while answer.finish_reason is None:
        assert time.monotonic() < deadline
        pair.d.step()
    if policy == "fail":
        assert answer.finish_reason is FinishReason.ERROR
        assert not answer.tokens
    else:
        check_answers(reference, pair.d, [request_id])
    assert pair.d.core.scheduler.kv_cache_manager.usage == 0


def test_a_request_with_the_wrong_prefix_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    rng = random.Random(18)
    params = pair.prefill(random_tokens(rng, 100))
    with pytest.raises(UserInputError, match="another prompt"):
        pair.d.add(random_tokens(rng, 100), 4, transfer=params)
    with pytest.raises(UserInputError, match="remote_num_tokens=96"):
        pair.d.add(random_tokens(rng, 90), 4, transfer=params)
    with pytest.raises(UserInputError, match="kv_consumer"):
        pair.p.add(random_tokens(rng, 100), 4, transfer=params)
    with pytest.raises(UserInputError, match="kv_producer"):
        pair.d.add(random_tokens(rng, 100), 4, transfer={"do_remote_decode": True})
    for session in (pair.p, pair.d):
        assert not session.core.scheduler.requests


def test_prompt_logprobs_are_computed_here(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    prompt = random_tokens(random.Random(19), 100)
    params = pair.prefill(prompt)
    request_id = pair.d.add(prompt, 2, prompt_logprobs=1, transfer=params)
    pair.run()
    answer = pair.d.answers[request_id]
    assert answer.prompt_rows is not None
    assert answer.stats is not None
    assert answer.stats.num_cached_tokens == 0
    pair.check_free()
