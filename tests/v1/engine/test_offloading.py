"""Prefixes kept on a disk: an engine that starts anew answers as one that never stopped."""

import os
import random
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core, random_tokens
from tests.v1.executor.rank_engines import run_engine
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.kv_offload.store import ObjectStore

pytestmark = pytest.mark.slow

_WAIT_S = 60.0
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2)


def config_of(root: Path, size: str = "64MiB", **extra: Any) -> KVTransferConfig:
    tier = {"type": "fs", "root_dir": str(root), "max_size": size}
    # Tests are about right answers: nothing may depend on how quick this machine is.
    settings = {"secondary_tiers": [tier], "always_restore": True, **extra}
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return KVTransferConfig.from_dict({**raw, "kv_connector_extra_config": settings})


def start(root: Path | None, *, unit: int = 32, size: str = "64MiB", **settings: Any) -> Session:
    transfer = None if root is None else config_of(root, size)
    settings = {"num_blocks": 3000, "budget": 256, **settings}
    session = Session(make_core(unit, transfer=transfer, **settings))
    if root is not None:
        deadline = time.monotonic() + _WAIT_S
        while keeper_of(session.core).is_opening:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    return session


def keeper_of(core: EngineCore):
    return core.scheduler.connector._tier.keeper


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
        store = keeper_of(session.core).store
        if store is not None:
            assert store.find_faults() == []


def stop(session: Session, *, is_killed: bool = False) -> None:
    if is_killed:
        # As a kill leaves it: what was not acknowledged is gone with the process.
        session.core.scheduler.connector.drain_timeout_s = 0.0
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
    cells = store._table.cells
    superseded = [e.position for e in store.list_objects() if cells["superseded"][e.cell]]
    states = [e.position for e in store.list_objects() if e.extent.key.kind == 2]
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
    rows = [o for o in store_of(again).list_objects() if o.extent.key.kind == 1]
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
    assert store_of(session).list_objects()
    assert session.core.reset_prefix_cache(reset_connector=True)
    assert store_of(session).list_objects() == []
    stop(session)
    again = start(root)
    assert answer(again, KEPT) == cold(KEPT)
    assert hits(again) == [0, 0]
    stop(again)


@pytest.mark.parametrize("trouble", ["file", "open", "foreign", "busy", "tiny"])
def test_a_folder_of_no_use_costs_only_the_tier(tmp_path, trouble):
    root = tmp_path / "cache"
    other = None
    if trouble == "file":
        root.write_text("not a folder")
    elif trouble == "busy":
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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_families_go_on_after_a_restart(tmp_path, family):
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(family, checkpoint)
    rng = random.Random(21)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(n)] for n in (100, 333)]
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "block_size": 32,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
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


def test_other_weights_are_another_identity(tmp_path):
    rng = random.Random(22)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(300)]]
    found = []
    for name in ("one", "two"):
        checkpoint = tmp_path / name
        write_checkpoint("llama", checkpoint)
        file = next(iter(sorted(checkpoint.glob("*.safetensors"))))
        data = bytearray(file.read_bytes())
        if name == "two":
            data[-1] ^= 1  # one bit of one value
        file.write_bytes(data)
        arguments: dict[str, Any] = {"model": str(checkpoint), "max_model_len": 512}
        _, cached = run_engine(
            prompts,
            prefix_cache_dir=str(tmp_path / "cache"),
            prefix_cache_disk_size="64MiB",
            kv_cache_memory_bytes=64 << 20,
            **arguments,
        )
        found += cached
    assert found == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefix_cache_disk_size": "8GiB"}, "set --prefix-cache-dir"),
        ({"prefix_cache_dir": "x", "prefix_cache_disk_size": "much"}, "no size"),
        ({"prefix_cache_dir": "x", "enable_prefix_caching": False}, "turn it on"),
        ({"prefix_cache_dir": "x", "prefix_caching_hash_algo": "xxhash"}, "can be forged"),
        ({"prefix_cache_dir": "x", "kv_transfer_config": {}}, "leave one of them out"),
        ({"prefix_cache_dir": "x", "cache_trace": "y"}, "does not record"),
    ],
)
def test_wrong_settings_are_told(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**arguments).create_vllm_config()
    assert list(tmp_path.iterdir()) == []
