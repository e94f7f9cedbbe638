"""Prefixes kept on a disk: an engine that starts anew answers as one that never stopped."""

import argparse
import fcntl
import os
import random
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import (
    VOCAB_SIZE,
    write_checkpoint,
    write_model,
)
from tests.model_executor.models.decoder.drafting import DRAFTING_MODELS, write_drafting_model
from tests.model_executor.models.decoder.reference import kimi_linear
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core, random_tokens
from tests.v1.engine.test_handover import Pair
from tests.v1.executor.rank_engines import run_engine
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.exceptions import ConfigError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_loop import CoreLoop
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.wire import AddRequests, Shutdown, StepOutputs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload import connector as connector_module
from vllm.v1.kv_offload.connector import OffloadingConnector
from vllm.v1.kv_offload.inspect import run_clear
from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.restores import tier_restores
from vllm.v1.kv_offload.settings import OffloadSettings
from vllm.v1.kv_offload.store.folder import CacheFolder, disk_bytes, read_marker
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.rows_file import RowsFile
from vllm.v1.kv_offload.tier import Tier
from vllm.v1.kv_offload.tier_view import WarmStart
from vllm.v1.messages import EngineCoreRequest

pytestmark = pytest.mark.slow

_WAIT_S = 60.0
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2)


def tiers_of(
    root: Path | None,
    size: str = "64MiB",
    host: str | None = None,
    warm: int = 0,
    writes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    # Tests are about right answers: nothing may depend on how quick this machine is.
    settings: dict[str, Any] = {"always_restore": True, "warm": warm}
    if root is not None:
        tier = {"type": "fs", "root_dir": str(root), "max_size": size, **(writes or {})}
        settings["secondary_tiers"] = [tier]
    if host is not None:
        settings["cpu_bytes_to_use"] = host
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**raw, "kv_connector_extra_config": settings}


def start(
    root: Path | None,
    *,
    unit: int = 32,
    size: str = "64MiB",
    host: str | None = None,
    warm: int = 0,
    writes: dict[str, Any] | None = None,
    **settings: Any,
) -> Session:
    transfer = None
    if root is not None or host is not None:
        transfer = KVTransferConfig.from_dict(tiers_of(root, size, host, warm, writes))
    settings = {"num_blocks": 3000, "budget": 256, **settings}
    session = Session(make_core(unit, transfer=transfer, **settings))
    if root is not None:
        wait_open(session.core.scheduler.connector)
    return session


def wait_open(connector: Any) -> None:
    """Wait until all of the folder's index is read, if the folder can be used."""
    deadline = time.monotonic() + _WAIT_S
    keeper = connector._tier.stores.keeper
    while keeper.is_opening or (keeper.store is not None and not keeper.store.state.is_ready):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tier_of(session: Session) -> Tier:
    return session.core.scheduler.connector._tier


def keeper_of(core: EngineCore):
    return core.scheduler.connector._tier.stores.keeper


def store_of(session: Session) -> ObjectStore:
    store = keeper_of(session.core).store
    assert store is not None
    return store


def answer(session: Session, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
    ids = [session.add(prompt, max_tokens) for prompt in prompts]
    session.run()
    check_free(session)
    return [session.answers[request_id].tokens for request_id in ids]


def hits(session: Session) -> list[int]:
    return [a.stats.num_cached_tokens for a in session.answers.values() if a.stats is not None]


def check_free(session: Session) -> None:
    manager = session.core.scheduler.kv_cache_manager
    manager.check_invariants()
    assert manager.usage == 0
    if session.core.scheduler.connector is not None:
        for store in (tier_of(session).stores.host, tier_of(session).stores.disk):
            if store is not None:
                assert store.content.find_faults() == []
                assert store.state.entries.pins == {}


def stop(session: Session, *, is_killed: bool = False) -> None:
    if is_killed:
        # As a kill leaves it: what was not acknowledged is gone with the process.
        session.core.scheduler.connector.hooks.drain_timeout_s = 0.0
    session.core.shutdown()


def prompts_of(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_tokens(rng, length) for length in lengths]


@cache
def _cold(prompt: tuple[int, ...], max_tokens: int, unit: int, mtp: bool) -> list[int]:
    session = start(None, unit=unit, speculative=MTP if mtp else None)
    (tokens,) = answer(session, [list(prompt)], max_tokens)
    stop(session)
    return tokens


def cold(
    prompts: list[list[int]], max_tokens: int = 8, unit: int = 32, mtp: bool = False
) -> list[list[int]]:
    """Return what an engine without a tier says; asked once for each prompt."""
    return [_cold(tuple(prompt), max_tokens, unit, mtp) for prompt in prompts]


KEPT = prompts_of(14, (200, 300))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps two prompts; copies of it are the tests' own."""
    root = tmp_path_factory.mktemp("kept") / "cache"
    session = start(root)
    assert answer(session, KEPT) == cold(KEPT)
    stop(session)
    return root


@pytest.fixture
def root(kept: Path, tmp_path: Path) -> Path:
    """A copy of the folder that keeps two prompts."""
    return shutil.copytree(kept, tmp_path / "cache")


@pytest.mark.parametrize(("unit", "mtp"), [(32, False), (32, True), (64, True), (128, False)])
def test_a_restart_loses_no_answer_and_no_boundary(tmp_path, unit, mtp):
    prompts = prompts_of(unit, (129, 200, 420, 70))
    settings = {"unit": unit, "speculative": MTP if mtp else None}
    expected = cold(prompts, 8, unit, mtp)
    first = start(tmp_path / "cache", **settings)
    assert answer(first, prompts) == expected
    stop(first)
    second = start(tmp_path / "cache", **settings)
    assert answer(second, prompts) == expected
    # Lean boundaries are kept, which are multiples of 128; 64 lies where nothing else does.
    assert hits(second) == [128, 128, 384, 64 if unit < 128 else 0]
    stop(second)


def test_a_chat_goes_on_where_it_was(tmp_path):
    rng = random.Random(5)
    prompt = random_tokens(rng, 200)
    known = 0
    for turn in range(3):
        expected = cold([prompt], 10)
        session = start(tmp_path / "cache")
        assert answer(session, [prompt], 10) == expected
        if turn:
            # Where a lean boundary lies close below, that one alone is kept.
            assert (known - 1) // 128 * 128 <= hits(session)[0] < known
        stop(session)
        prompt = prompt + expected[0]
        known = len(prompt)
        prompt = prompt + random_tokens(rng, 20)


def test_what_a_chat_has_left_behind_goes_first(tmp_path):
    rng = random.Random(6)
    session = start(tmp_path / "cache")
    prompt = random_tokens(rng, 150)
    for _ in range(4):
        (tokens,) = answer(session, [prompt], 4)
        prompt = prompt + tokens + random_tokens(rng, 130)
    store = store_of(session)
    cells = store.state.entries.table.cells
    superseded = [e.position for e in store.content.list_objects() if cells["superseded"][e.cell]]
    states = [e.position for e in store.content.list_objects() if e.extent.key.kind == 2]
    assert superseded
    assert max(superseded) < max(states)
    stop(session)


def test_other_continuations_share_a_beginning(tmp_path):
    rng = random.Random(8)
    head = random_tokens(rng, 800)
    prompts = [head + random_tokens(rng, 100 + i) for i in range(3)]
    expected = cold(prompts)
    session = start(tmp_path / "cache", num_blocks=600)
    assert [answer(session, [prompt])[0] for prompt in prompts] == expected
    stop(session)
    # Row groups of the shared beginning are there once.
    again = start(tmp_path / "cache", num_blocks=600)
    rows = [o for o in store_of(again).content.list_objects() if o.extent.key.kind == 1]
    assert len(rows) == len({o.extent.key for o in rows})
    assert [answer(again, [prompt])[0] for prompt in prompts] == expected
    assert min(hits(again)) >= 640
    stop(again)


def test_a_pool_far_too_small_hits_on_the_disk(tmp_path):
    prompts = prompts_of(3, tuple(range(200, 440, 30)))
    expected = cold(prompts)
    session = start(tmp_path / "cache", num_blocks=112, max_len=480)
    for _ in range(2):
        assert [answer(session, [prompt])[0] for prompt in prompts] == expected
    stats = [a.stats for a in session.answers.values()]
    assert sum(s.num_external_tokens for s in stats if s is not None) > 1000
    # Many at a time, too.
    assert answer(session, prompts) == expected
    stop(session)


def sources(session: Session) -> Counter[str]:
    found = [Counter(a.stats.external_sources) for a in session.answers.values() if a.stats]
    return sum(found, Counter())


def misses(session: Session) -> list[dict[str, int]]:
    found = [a.stats for a in session.answers.values() if a.stats is not None]
    for stats in found:
        assert stats.num_cached_tokens + sum(stats.miss_tokens.values()) == stats.num_prompt_tokens
    return [stats.miss_tokens for stats in found]


def test_host_memory_alone_keeps_what_the_pool_gives_up():
    prompts = prompts_of(3, tuple(range(200, 440, 30)))
    expected = cold(prompts)
    # Every object is copied out of the pool, and its seal is checked on the way back.
    session = start(None, host="32MiB", num_blocks=112, max_len=480)
    for _ in range(2):
        assert [answer(session, [prompt])[0] for prompt in prompts] == expected
    assert set(sources(session)) == {"host"}
    assert sources(session)["host"] > 1000
    assert answer(session, prompts) == expected
    assert session.core.reset_prefix_cache(reset_connector=True)
    assert tier_of(session).stores.host.content.list_objects() == []
    stop(session)


def test_both_tiers_behind_a_pool_far_too_small(tmp_path, monkeypatch):
    prompts = prompts_of(3, tuple(range(200, 440, 30)))
    expected = cold(prompts)
    session = start(tmp_path / "cache", host="3MiB", num_blocks=112, max_len=480)
    tier = tier_of(session)
    session.core.scheduler.log_stats = False  # counts stay here
    monkeypatch.setattr(tier.reports.events, "_is_on", True)
    batches: list[KVEventBatch] = []
    session.core.scheduler.kv_event_publisher = SimpleNamespace(
        publish=batches.append, shutdown=lambda: None
    )
    # Forward and back: what was used last is in host memory yet, the first ones on the disk alone.
    for order in (range(8), reversed(range(8))):
        for i in order:
            assert answer(session, [prompts[i]]) == [expected[i]]
    assert tier.stores.host.counts.evicted > 0
    assert tier.stores.host.content.used_bytes <= tier.stores.host.content.capacity_bytes <= 3 << 20
    assert set(sources(session)) == {"host", "disk"}
    session.core.scheduler.publish_kv_events()
    check_events([event for batch in batches for event in batch.events], tier)
    view = tier.view_tiers()
    stats = tier.take_stats()
    assert stats.restores["restored"] == sum(n > 0 for n in externals(session))
    # The page shows the same, and takes nothing from it.
    assert (view.stores, view.restores) == (stats.stores, stats.restores)
    for name, store in (("host", tier.stores.host), ("disk", tier.stores.disk)):
        seen = view.tiers[name]
        assert seen.state == "ready"
        assert seen.live_bytes == store.content.live_bytes <= seen.used_bytes <= seen.max_bytes
        assert sum(seen.objects.values()) == len(store.content.list_objects())
        assert (seen.hits, seen.read_bytes) == (stats.hits[name], stats.read_bytes[name])
    assert view.warm_start.state == "off"
    assert stats.stores["stored"] == len(tier.stores.disk.content.list_objects())
    assert stats.read_bytes["disk"] > 0
    stop(session)
    again = start(tmp_path / "cache", host="2MiB")
    assert answer(again, prompts[:2]) == expected[:2]
    assert set(sources(again)) == {"disk"}
    # What came from the disk stays in host memory.
    again.core.reset_prefix_cache()
    assert answer(again, prompts[:2]) == expected[:2]
    assert set(sources(again)) == {"host", "disk"}
    stop(again)


def externals(session: Session) -> list[int]:
    return [a.stats.num_external_tokens for a in session.answers.values() if a.stats]


def check_events(events: list[Any], tier: Tier) -> None:
    """What was announced and not taken back is what the tiers hold."""
    for medium, store in (("CPU", tier.stores.host), ("STORAGE", tier.stores.disk)):
        held: Counter[Any] = Counter()
        for event in events:
            if event.medium == medium:
                held[event.block_hashes[0]] += 1 if isinstance(event, BlockStored) else -1
        assert set(held.values()) <= {0, 1, 2}
        assert sum(held.values()) == len(store.content.list_objects())


def test_every_miss_of_a_tier_has_its_reason(root, monkeypatch):
    session = start(root)
    tier = tier_of(session)
    session.core.scheduler.log_stats = False  # counts stay here
    # Computing is far quicker than this disk.
    settings = replace(tier._settings, always_restore=False)
    monkeypatch.setattr(tier.restores, "_settings", settings)
    tier.stores._rates = Rates(bytes_per_s=1.0, tokens_per_s={0: 1e9})
    assert answer(session, KEPT[1:]) == cold(KEPT[1:])
    declined = {"restore_declined": 256, "first_seen": 32, "above_last_boundary": 12}
    assert misses(session)[-1] == declined
    monkeypatch.setattr(tier.restores, "_settings", replace(settings, always_restore=True))
    session.core.reset_prefix_cache()
    # The disk refuses.
    worker = session.core.executor._worker._runner._connector._connector._loader
    monkeypatch.setattr(worker._rows, "read", refuse)
    assert answer(session, KEPT[1:]) == cold(KEPT[1:])
    assert misses(session)[-1]["restore_failed"] == 256
    monkeypatch.undo()
    # What it gave is not what was written.
    session.core.reset_prefix_cache()
    _change(root, "rows.0", lambda data: data.__setitem__(slice(None), bytes(len(data))))
    assert answer(session, KEPT[1:]) == cold(KEPT[1:])
    assert misses(session)[-1]["corrupt"] == 256
    assert tier.take_stats().num_corrupt == 1
    stop(session)


def num_stored(session: Session) -> int:
    return len(store_of(session).content.list_objects())


@pytest.mark.parametrize("host", [None, "8MiB"])
def test_what_only_one_request_wanted_is_not_written(tmp_path, host):
    prompts = prompts_of(51, (300, 420))
    expected = cold(prompts)
    writes = {"write_policy": "write_through_selective"}
    session = start(tmp_path / "cache", host=host, writes=writes)
    assert answer(session, prompts) == expected
    assert num_stored(session) == 0
    # A hit in the pool, or in host memory, is a second wish.
    assert answer(session, prompts[1:]) == expected[1:]
    assert num_stored(session) > 0
    stop(session)
    again = start(tmp_path / "cache", writes=writes)
    assert answer(again, prompts) == expected
    assert hits(again) == [0, 384]
    stop(again)


def test_what_is_written_late_is_written_at_the_end_and_when_memory_gets_short(tmp_path):
    prompts = prompts_of(52, (300, 420, 350, 400))
    expected = cold(prompts)
    writes = {"write_policy": "write_back"}
    session = start(tmp_path / "cache", writes=writes)
    assert answer(session, prompts[:1]) == expected[:1]
    assert num_stored(session) == 0
    stop(session)
    session = start(tmp_path / "cache", writes=writes, num_blocks=160, max_len=480)
    assert answer(session, prompts[:1]) == expected[:1]
    assert hits(session) == [256]
    known = num_stored(session)
    for prompt, tokens in zip(prompts[1:], expected[1:], strict=True):
        assert num_stored(session) == known
        assert answer(session, [prompt]) == [tokens]
    assert num_stored(session) > known
    stop(session, is_killed=True)
    # A kill costs what was held back, and that alone.
    last = start(tmp_path / "cache", writes=writes)
    assert answer(last, prompts) == expected
    assert sum(hits(last)) >= 256 + 384
    stop(last, is_killed=True)


def test_a_start_brings_back_what_was_used_most(tmp_path):
    prompts = prompts_of(32, (300, 200, 260))
    expected = cold(prompts)
    first = start(tmp_path / "cache", warm=2)
    for prompt, tokens in zip([*prompts, *prompts[:2]], [*expected, *expected[:2]], strict=True):
        assert answer(first, [prompt]) == [tokens]
    stop(first)
    # The kill of one that did nothing forgets nothing.
    stop(start(tmp_path / "cache", warm=2), is_killed=True)
    second = start(tmp_path / "cache", warm=2)
    assert tier_of(second).view_tiers().warm_start.state == "waiting"
    second.run()
    check_free(second)
    assert tier_of(second).view_tiers().warm_start == WarmStart("done", 2, 256 + 128)
    assert answer(second, prompts) == expected
    # Two lie in the pool before anybody asks; the third was asked for once.
    assert externals(second) == [0, 0, 256]
    assert hits(second) == [256, 128, 256]
    stop(second)
    # None at all, and none that is not there.
    _change(tmp_path / "cache", "rows.0", lambda data: data.__setitem__(slice(None), bytes(9)))
    third = start(tmp_path / "cache", warm=2)
    third.run()
    assert answer(third, prompts[:1]) == expected[:1]
    assert hits(third) == [0]
    stop(third)


def test_a_prefix_that_somebody_asked_to_keep_stays_kept(tmp_path):
    (prompt,) = prompts_of(33, (300,))
    first = start(tmp_path / "cache", warm=1)
    request_id = first.add(prompt, 2, cache_ttls={256: 3600.0})
    first.run()
    (held,) = first.core.scheduler.held_prefixes()[0]
    assert (held.id, held.num_tokens, held.is_pinned) == (request_id, 256, True)
    stop(first)
    second = start(tmp_path / "cache", warm=1)
    second.run()
    (again,) = second.core.scheduler.held_prefixes()[0]
    assert (again.id, again.num_tokens, again.is_pinned) == (request_id, 256, True)
    assert 3000 < again.expires_in <= held.expires_in
    assert second.core.scheduler.held_prefixes(request_id) == ((), True)
    stop(second)
    third = start(tmp_path / "cache", warm=1)
    third.run()
    assert list(third.core.scheduler.held_prefixes()[0]) == []
    stop(third)


def refuse(extent: Any, bounce: Any = None) -> None:
    raise OSError(5, "Input/output error")


def test_what_the_disk_gave_up_is_told(tmp_path):
    prompts = prompts_of(4, (390, 520, 420, 500, 410, 430))
    session = start(tmp_path / "cache", num_blocks=300, size="3MiB")
    for prompt in prompts:
        answer(session, [prompt])
    assert store_of(session).counts.evicted > 0
    session.core.reset_prefix_cache()
    answer(session, prompts[:1])
    assert misses(session)[-1]["evicted_from_disk"] == 384
    stop(session)


class PairWithTier(Pair):
    """The decoding engine keeps prefixes on a disk, and takes the others from the first."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self._root = root
        super().__init__(**settings)

    def make(self, transfer: KVTransferConfig, **settings: Any) -> EngineCore:
        if transfer.kv_role == "kv_consumer":
            peer = {"kv_connector": "TcpConnector", "kv_role": "kv_consumer"}
            peer["kv_port"] = transfer.kv_port
            extra = {"connectors": [tiers_of(self._root), peer]}
            raw = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
            transfer = KVTransferConfig.from_dict({**raw, "kv_connector_extra_config": extra})
            assert transfer.has_tiers
        core = super().make(transfer, **settings)
        if transfer.kv_connector == "MultiConnector":
            wait_open(core.scheduler.connector._parts[0])
        return core


def test_a_tier_and_a_handover_stand_together(tmp_path):
    (prompt,) = prompts_of(31, (300,))
    (expected,) = cold([prompt])
    found = []
    for _ in range(2):
        pair = PairWithTier(tmp_path / "cache", unit=32, num_blocks=300, budget=256, max_len=450)
        try:
            answered = pair.answer(prompt)
            assert answered.tokens == expected
            assert answered.stats is not None
            found.append((answered.stats.num_external_tokens, answered.stats.hit_sources()))
            view = pair.d.core.scheduler.connector.hooks.view_tiers()
            assert list(view.tiers) == ["disk"]
            assert view.restores.get("restored", 0) == (len(found) > 1)
            # The prefilling engine is told that nothing of it is held for the other any more.
            pair.run()
            pair.check_free()
        finally:
            pair.shutdown()
    # The tier is nearer where it has as much.
    assert found == [(288, {"external": 288}), (288, {"disk": 288})]


def test_a_full_folder_that_nobody_reads_is_not_written_over(tmp_path):
    prompts = prompts_of(55, (520, 390, 520, 450, 420, 500, 480) * 2)
    written = {}
    for name, writes in (("ours", None), ("unlimited", {"write_budget_per_day": "1TiB"})):
        session = start(tmp_path / name, num_blocks=400, size="3MiB", writes=writes)
        for prompt in prompts:
            answer(session, [prompt])
        written[name] = store_of(session).counts.committed_bytes
        stop(session)
    # The folder once, and what was on its way when that was reached.
    assert 2 << 20 < written["ours"] < 7 << 19 < written["unlimited"]


def test_a_disk_far_too_small_evicts_and_never_lies(tmp_path):
    prompts = prompts_of(4, (260, 390, 520, 150, 420, 300, 280, 200))
    expected = cold(prompts)
    for _ in range(2):
        session = start(tmp_path / "cache", num_blocks=400, size="3MiB")
        assert [answer(session, [prompt])[0] for prompt in prompts] == expected
        store = store_of(session)
        assert store.counts.evicted > 0
        stop(session)
        used = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
        assert used <= 3 << 20


def test_a_kill_at_any_step_costs_no_answer(tmp_path):
    rng = random.Random(12)
    prompts = prompts_of(12, (200, 300))
    expected = cold(prompts)
    for _ in range(3):
        session = start(tmp_path / "cache")
        for prompt in prompts:
            session.add(prompt, 8)
        for _ in range(rng.randrange(1, 20)):
            session.step()
        stop(session, is_killed=True)
    last = start(tmp_path / "cache")
    assert answer(last, prompts) == expected
    stop(last)


def test_nothing_is_tried_while_a_prefix_comes_back(root, monkeypatch):
    session = start(root)
    may_read, is_waiting = threading.Event(), threading.Event()
    real = RowsFile.read

    def read_late(rows: RowsFile, extent: Any, bounce: Any = None) -> memoryview:
        may_read.wait(_WAIT_S)
        return real(rows, extent, bounce)

    waits: list[float] = []

    def find_wait_s() -> float:
        waits.append(_WAIT_S)
        is_waiting.set()
        return _WAIT_S

    monkeypatch.setattr(RowsFile, "read", read_late)
    monkeypatch.setattr(session.core, "find_wait_s", find_wait_s)
    sent: list[Any] = []
    loop = CoreLoop(session.core, sent.append)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    loop.submit(AddRequests([EngineCoreRequest("a", KEPT[1], params, time.time())]))
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert is_waiting.wait(_WAIT_S)
    may_read.set()
    began = time.monotonic()
    while not _is_finished(sent):
        # Nobody roused the loop: it sleeps for as long as it was told to.
        assert time.monotonic() < began + _WAIT_S / 2
        time.sleep(0.005)
    loop.submit(Shutdown())
    thread.join(_WAIT_S)
    assert len(waits) <= 4
    session.core.shutdown()


def _is_finished(sent: list[Any]) -> bool:
    steps = [message.outputs.outputs for message in sent if isinstance(message, StepOutputs)]
    return any(output.finished for outputs in steps for output in outputs)


def test_aborts_while_a_prefix_comes_back(root):
    session = start(root)
    for steps in range(4):
        request_id = session.add(KEPT[1], 8)
        for _ in range(steps):
            session.step()
        session.core.abort_requests([request_id])
        session.run()
        check_free(session)
        session.core.reset_prefix_cache()
    assert answer(session, KEPT) == cold(KEPT)
    stop(session)


def _change(root: Path, name: str, change) -> None:
    (path,) = root.glob(f"*/{name}")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows.0", lambda data: data.__setitem__(slice(None), os.urandom(len(data)))),
        ("rows.0", lambda data: data.__delitem__(slice(len(data) // 4, None))),
        ("rows.0", lambda data: data.extend(bytes(1 << 27))),
        ("index", lambda data: data.__setitem__(slice(None), os.urandom(len(data)))),
        ("index", lambda data: data.__delitem__(slice(1000, None))),
        ("meta", lambda data: data.__setitem__(50, data[50] ^ 1)),
    ],
    ids=["rows", "short-rows", "long-rows", "index", "short-index", "meta"],
)
def test_what_is_damaged_is_computed(root, name, change):
    _change(root, name, change)
    for _ in range(2):
        session = start(root)
        assert answer(session, KEPT) == cold(KEPT)
        stop(session)
    # It has been mended.
    assert hits(session) == [128, 256]
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) <= 64 << 20


def test_a_corrupt_object_is_forgotten(root):
    _change(root, "rows.0", lambda data: data.__setitem__(slice(None), bytes(len(data))))
    session = start(root)
    assert answer(session, KEPT[1:]) == cold(KEPT[1:])
    assert hits(session) == [0]
    assert store_of(session).counts.corrupt == 1
    stop(session)


def test_a_reset_forgets_the_disk(root):
    session = start(root)
    assert store_of(session).content.list_objects()
    assert session.core.reset_prefix_cache(reset_connector=True)
    assert store_of(session).content.list_objects() == []
    stop(session)
    again = start(root)
    assert answer(again, KEPT) == cold(KEPT)
    assert hits(again) == [0, 0]
    stop(again)


@pytest.mark.parametrize("trouble", ["open", "foreign", "busy", "tiny"])
def test_a_folder_of_no_use_costs_only_the_tier(tmp_path, trouble):
    root = tmp_path / "cache"
    other = None
    if trouble == "busy":
        other = start(root)
    else:
        root.mkdir(mode=0o755 if trouble == "open" else 0o700)
        if trouble == "foreign":
            (root / "notes.txt").write_text("mine")
    prompts, expected = KEPT[:1], cold(KEPT[:1])
    session = start(root, size="100kB" if trouble == "tiny" else "64MiB")
    assert keeper_of(session.core).store is None
    assert answer(session, prompts) == expected
    stop(session)
    if trouble == "foreign":
        assert [p.name for p in root.iterdir()] == ["notes.txt"]
    if other is not None:
        assert answer(other, prompts) == expected
        stop(other)


@pytest.mark.parametrize(
    ("family", "cache_dtype"),
    [
        *((family, "auto") for family in ("llama", "qwen3", "gemma3", "gemma4", "gpt-oss")),
        ("gemma4", "int8"),
    ],
)
def test_families_go_on_after_a_restart(tmp_path, family, cache_dtype):
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(family, checkpoint)
    rng = random.Random(21)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(n)] for n in (100, 333)]
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "block_size": 32,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 8 << 20,
        "kv_cache_dtype": cache_dtype,
    }
    expected, _ = run_engine(prompts, **arguments)
    root = tmp_path / "cache"
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "secondary_tiers": [{"type": "fs", "root_dir": str(root), "max_size": "64MiB"}],
            "always_restore": True,
        },
    }
    for expected_hits in ([0, 0], [96, 320]):
        tokens, found = run_engine(prompts, kv_transfer_config=transfer, **arguments)
        assert tokens == expected
        assert found == expected_hits


@pytest.mark.parametrize(
    ("model", "pool_bytes"), [("qwen 3.5", 1_200_000), ("kimi-linear", 300_000), ("glm", 700_000)]
)
def test_chats_over_recurrent_states_go_on_to_the_unit(tmp_path, model, pool_bytes):
    """Each turn in an engine of its own, whose pool holds hardly more than one request.

    Where the model has a block that drafts, it does.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": 2} if model in DRAFTING_MODELS else None
    if drafts:
        write_drafting_model(model, tmp_path / "checkpoint")
    else:
        write_model(kimi_linear(vocab_size=VOCAB_SIZE), tmp_path / "checkpoint", byte_level())
    arguments: dict[str, Any] = {
        "speculative_config": drafts,
        "model": str(tmp_path / "checkpoint"),
        "block_size": 32,
        "max_model_len": 512,
        "kv_cache_memory_bytes": pool_bytes,
    }
    rng = random.Random(9)
    head = [rng.randrange(5, VOCAB_SIZE) for _ in range(90)]
    chats = [head[: rng.randrange(90)] + [rng.randrange(5, VOCAB_SIZE)] * 40 for _ in range(3)]
    tiers = tiers_of(tmp_path / "cache", host="1MiB")
    for turn in range(3):
        expected, _ = run_engine(chats, **arguments)
        known = [len(chat) - 30 for chat in chats]
        answers, found = run_engine(chats, kv_transfer_config=tiers, **arguments)
        assert answers == expected
        if turn:
            # The last token of an answer is computed by nobody.
            assert found == [(n - 1) // 32 * 32 for n in known]
        for chat, tokens in zip(chats, answers, strict=True):
            chat += tokens + [rng.randrange(5, VOCAB_SIZE) for _ in range(30)]


def test_a_folder_that_never_opens_costs_only_the_tier(root, monkeypatch):
    """As on a disk that hangs: requests wait for it for a while, not for ever."""
    is_over = threading.Event()
    opened = OffloadSettings.open_folder

    def hang(self, hash_root):
        assert is_over.wait(_WAIT_S)
        return opened(self, hash_root)

    monkeypatch.setattr(OffloadSettings, "open_folder", hang)
    monkeypatch.setattr(tier_restores, "_PATIENT_S", 0.0)
    transfer = KVTransferConfig.from_dict(tiers_of(root))
    session = Session(make_core(32, transfer=transfer, num_blocks=3000, budget=256))
    assert answer(session, KEPT) == cold(KEPT)
    assert hits(session) == [0, 0]
    is_over.set()
    wait_open(session.core.scheduler.connector)
    stop(session)


@pytest.mark.parametrize("opens", [True, False], ids=["opens", "hangs"])
def test_a_run_that_ends_before_its_folder_is_open_waits_for_it(tmp_path, monkeypatch, opens):
    """As a script of two prompts does, whose weights are digested for the first time."""
    is_ending = threading.Event()
    find_identity = connector_module.find_identity

    def find_late(config, kv_config, layout, root, note, stop, **more):
        note(1, 2)
        assert is_ending.wait(_WAIT_S)
        if not opens:
            assert stop.wait(_WAIT_S)
        return find_identity(config, kv_config, layout, root, note, stop, **more)

    monkeypatch.setattr(connector_module, "find_identity", find_late)
    transfer = KVTransferConfig.from_dict(tiers_of(tmp_path / "cache"))
    session = Session(make_core(32, transfer=transfer, num_blocks=3000, budget=256))
    connector = session.core.scheduler.connector
    assert answer(session, KEPT) == cold(KEPT)
    begin_drain = connector.hooks.begin_drain
    monkeypatch.setattr(connector.hooks, "begin_drain", lambda: (begin_drain(), is_ending.set()))
    # Not for ever, either.
    connector.hooks.drain_timeout_s = _WAIT_S if opens else 0.01
    stop(session)
    monkeypatch.undo()
    again = start(tmp_path / "cache")
    assert answer(again, KEPT) == cold(KEPT)
    assert hits(again) == ([128, 256] if opens else [0, 0])
    stop(again)


def test_two_servers_that_start_at_once_have_one_hash_root(tmp_path, monkeypatch):
    """The second one finds the folder taken and its root not yet written."""
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    lock = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    written = []

    def write_root(seconds):
        # What the first server does meanwhile.
        os.close(lock)
        folder = CacheFolder(root, 64 << 20)
        written.append(folder.hash_root)
        folder.close()

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(
        connector_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=write_root)
    )
    config = EngineArgs(prefix_cache_dir=str(root)).create_vllm_config()
    OffloadingConnector.check_before_load(config)
    assert config.cache_config.prefix_hash_seed == written[0]
    assert len(written) == 1


def test_a_folder_cleared_during_a_start_is_found_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    root = tmp_path / "cache"
    config = EngineArgs(prefix_cache_dir=str(root), max_model_len=512).create_vllm_config()
    OffloadingConnector.check_before_load(config)
    assert run_clear(argparse.Namespace(folder=root)) == 0
    core = EngineCore(config, UniProcExecutor)
    wait_open(core.scheduler.connector)
    core.shutdown()
    assert read_marker(root) == config.cache_config.prefix_hash_seed


def test_several_models_share_a_folder_and_its_limit(tmp_path):
    """Two differ in one bit of one value."""
    rng = random.Random(22)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(300)]]
    for name, family in (("one", "llama"), ("two", "llama"), ("three", "gemma3")):
        write_checkpoint(family, tmp_path / name)
    file = next(iter(sorted((tmp_path / "two").glob("*.safetensors"))))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    root, limit = tmp_path / "cache", 4 << 20
    answers: dict[str, list[int]] = {}
    found = []
    for name in ("one", "two", "three") * 2:
        (tokens,), cached = run_engine(
            prompts,
            model=str(tmp_path / name),
            block_size=32,
            max_model_len=512,
            kv_cache_memory_bytes=8 << 20,
            kv_transfer_config=tiers_of(root, str(limit)),
        )
        assert answers.setdefault(name, tokens) == tokens
        found += cached
        assert disk_bytes(root) <= limit
    assert found == [0, 0, 0, 288, 288, 288]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefix_cache_disk_size": "8GiB"}, "set --prefix-cache-dir"),
        ({"prefix_cache_warm": 3}, "set --prefix-cache-dir"),
        (
            {"prefix_cache_dir": "x", "prefix_cache_warm": -1},
            "=-1 is out of range",
        ),
        ({"prefix_cache_dir": "a\0b"}, "holds a zero"),
        ({"prefix_cache_dir": "/dev/null"}, "^--prefix-cache-dir .*: /dev/null is no folder"),
        ({"prefix_cache_dir": "/dev/null/x/y"}, "^--prefix-cache-dir .*: /dev/null is no folder"),
        # A link.
        ({"prefix_cache_dir": "/proc/self/exe"}, "exe is no folder"),
        ({"prefix_cache_dir": "a" * 300}, "cannot be a folder"),
        ({"kv_offloading_size": 0.0}, "GiB of host memory"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "use native"),
        (
            {"prefix_cache_dir": "x", "prefix_cache_disk_size": "much"},
            "^--prefix-cache-disk-size='much'",
        ),
        (
            {"prefix_cache_dir": "x", "prefix_cache_write_policy": "later"},
            "^prefix_cache_write_policy='later'",
        ),
        (
            {"prefix_cache_dir": "x", "prefix_cache_write_budget": "-1"},
            "^--prefix-cache-write-budget='-1'",
        ),
        ({"prefix_cache_write_policy": "write_back"}, "set --prefix-cache-dir"),
        ({"prefix_cache_dir": "x", "enable_prefix_caching": False}, "turn it on"),
        ({"prefix_cache_dir": "x", "prefix_caching_hash_algo": "xxhash"}, "can be forged"),
        ({"prefix_cache_dir": "x", "kv_transfer_config": {}}, "kv_role"),
        (
            {"prefix_cache_dir": "x", "kv_transfer_config": {"kv_connector": "MultiConnector"}},
            "leave one out",
        ),
        (
            {
                "prefix_cache_dir": "x",
                "cache_trace": "y",
                "kv_transfer_config": {"kv_connector": "TcpConnector", "kv_role": "kv_consumer"},
            },
            "does not record",
        ),
    ],
)
def test_wrong_settings_are_told(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**arguments).create_vllm_config()
    assert list(tmp_path.iterdir()) == []
