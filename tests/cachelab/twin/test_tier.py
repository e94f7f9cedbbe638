"""The twin of an engine with a cache folder and host memory, whatever its threads did when."""

import json
import random
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cachelab.twin.recorded_run import SMALL_LLAMA, compare_told, small_settings
from vllm.cachelab.trace.events import DiskChange, DiskObject
from vllm.cachelab.twin.rebuild import check_rebuilt, settings_of
from vllm.cachelab.twin.tier import ReplayedStore, key_of
from vllm.cachelab.twin.trace_file import read_trace
from vllm.entrypoints.cli.main import main
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.cache_trace import make_header
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.settings import read_settings
from vllm.v1.kv_offload.store.folder import CacheFolder
from vllm.v1.kv_offload.store.records import ObjectSpec

MTP = {"method": "mtp", "num_speculative_tokens": 2}


class Agents:
    """Conversations that go on over lives of the engine, some turns side by side."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._texts = [self._draw(200) for _ in range(3)]
        self._count = 0

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 2000) for _ in range(count)]

    def live(self, num_rounds: int, **arguments: Any) -> None:
        """Run an engine for some rounds, and reset it in the middle."""
        config = EngineArgs(
            block_size=32, max_model_len=1024, max_num_batched_tokens=256, **arguments
        ).create_vllm_config()
        core = EngineCore(config, UniProcExecutor)
        engine = LLMEngine(config, InlineCore(lambda: core))
        for number in range(num_rounds):
            for agent in self._rng.sample(range(3), self._rng.choice((1, 2))):
                self._ask(engine, agent)
            if number == num_rounds // 2:
                core.step()
                core.reset_prefix_cache(reset_running_requests=True)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        agent = int(output.request_id.split("-")[0])
                        self._texts[agent] += output.outputs[0].token_ids
        while core.has_work():
            core.step()
        engine.shutdown()

    def _ask(self, engine: LLMEngine, agent: int) -> None:
        self._count += 1
        if len(self._texts[agent]) > 700:
            del self._texts[agent][200:]
        self._texts[agent] += self._draw(self._rng.randrange(5, 120))
        # Some wait for their grammar first, and for a tier then.
        form = StructuredOutputsParams(regex="[a-z ]{20,40}") if self._count % 3 == 0 else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._rng.randrange(2, 20),
            ignore_eos=True,
            structured_outputs=form,
        )
        prompt = {"prompt_token_ids": list(self._texts[agent])}
        engine.add_request(f"{agent}-{self._count}", prompt, params)


def tiers(folder: Path, **extra: Any) -> dict[str, Any]:
    """Return arguments of an engine with a cache folder."""
    tier = {"type": "fs", "root_dir": str(folder / "cache"), "max_size": "3MiB"}
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    extra = {"secondary_tiers": [tier], "always_restore": True, **extra}
    return {
        "kv_cache_memory_bytes": 6 << 20,
        "kv_transfer_config": {**raw, "kv_connector_extra_config": extra},
    }


def live_twice(folder: Path, **arguments: Any) -> dict[str, int]:
    """Run two lives of an engine, compare the twin of each, and return what they hit by source."""
    agents = Agents(seed=3)
    sums: dict[str, int] = {}
    for life in ("first", "second"):
        path = folder / life
        agents.live(6, cache_trace=str(path), **arguments)
        for name, count in compare_told(read_trace(path, is_strict=True)).items():
            sums[name] = sums.get(name, 0) + count
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "more"),
    [
        ({}, {}),
        ({"cpu_bytes_to_use": "2MiB", "warm": 2}, {"speculative_config": MTP}),
        ({"always_restore": False, "store_threshold": 2}, {}),
        ({"cpu_bytes_to_use": "2MiB"}, {"async_scheduling": True}),
    ],
    ids=["disk", "disk and host, MTP", "selective", "disk and host, a step ahead"],
)
def test_every_request_hits_what_it_hit(
    tmp_path: Path, extra: dict[str, Any], more: dict[str, Any]
) -> None:
    sums = live_twice(tmp_path, **tiers(tmp_path, **extra), **more)
    # A disk that hangs for a second is no fault of the twin's.
    from_tiers = sum(sums.get(name, 0) for name in ("disk", "host", "restore_failed"))
    assert from_tiers or "store_threshold" in extra
    assert sums["pool"]


@pytest.mark.slow
def test_a_folder_that_another_process_writes_to_is_of_no_use(tmp_path: Path) -> None:
    with closing(CacheFolder(tmp_path / "cache", 3 << 20)):
        sums = live_twice(tmp_path, **tiers(tmp_path))
    assert sums["pool"]
    assert not sums.get("disk", 0)


@pytest.mark.slow
def test_simulate_compares_sources_and_tries_other_disks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows, grid = tmp_path / "t.jsonl", tmp_path / "rows", tmp_path / "grid.json"
    agents = Agents(seed=5)
    for _ in range(2):
        agents.live(4, cache_trace=str(path), **tiers(tmp_path))
    text = path.read_text()
    assert str(tmp_path) not in text
    flags = ("--per-request", rows, "--output-json", grid, "--disk-gib", 0.001, 1)
    assert main(["cache", "simulate", str(path), *map(str, flags), "--disable-tqdm"]) == 0
    count = len(read_trace(path).requests)
    out = capsys.readouterr().out
    assert f"Sources of hits and reasons of misses equal for {count} of {count} requests." in out
    for row in map(json.loads, rows.read_text().splitlines()):
        assert sum(row["sources"].values()) == row["cached_tokens"]
    runs = json.loads(grid.read_text())["runs"]
    assert [run["disk_bytes"] for run in runs] == [3 << 20, (1 << 30) // 1000, 1 << 30]
    assert runs[1]["hit_rate"] <= runs[2]["hit_rate"]
    assert "--prefix-cache-disk-size 1073741824" in runs[2]["flags"]


@pytest.mark.slow
def test_a_server_without_a_cache_records_what_one_would_have_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, grid = tmp_path / "t.jsonl", tmp_path / "grid.json"
    Agents(seed=5).live(
        4, cache_trace=str(path), enable_prefix_caching=False, kv_cache_memory_bytes=6 << 20
    )
    flags = ("--output-json", str(grid), "--pool-gib", "0.01", "--disable-tqdm")
    assert main(["cache", "simulate", str(path), *flags]) == 0
    assert "| `off` (recorded) |" in capsys.readouterr().out
    recorded, cached = json.loads(grid.read_text())["runs"]
    assert (recorded["policy"], recorded["hit_rate"]) == ("off", 0)
    assert recorded["flags"].endswith(" --no-enable-prefix-caching")
    assert (cached["policy"], cached["hit_rate"] > 0.3) == ("auto", True)


def _object(name: bytes, sequence: int = 0) -> DiskObject:
    return DiskObject(1, b64encode(name * 16).decode(), 32, 100, sequence)


def test_a_replayed_disk_changes_between_the_questions_between_which_it_did() -> None:
    changes = [
        DiskChange(1, "put", _object(b"b", 2)),
        DiskChange(2, "evicted", _object(b"a")),
        DiskChange(3, "gone", _object(b"b")),
        DiskChange(5, "refused", _object(b"c")),
    ]
    store = ReplayedStore(changes)
    store.open([_object(b"a", 1)], 2)
    a, b, c = (key_of(_object(name)) for name in (b"a", b"b", b"c"))

    def find() -> list[bool]:
        return [found is not None for found in store.find([a, b])]

    assert find() == [True, False]
    assert find() == [True, True]
    assert find() == [False, True]
    assert find() == [False, False]
    spec = ObjectSpec(c, 32, 100)
    assert store.reserve([spec]) == [None]
    assert (store.was_given_up(a), store.was_given_up(b)) == (True, False)
    (reservation,) = store.reserve([spec])
    assert reservation is not None


def test_workers_share_pages_and_cores_share_host_memory(tmp_path: Path) -> None:
    extra = tiers(tmp_path, cpu_bytes_to_use="4MiB")["kv_transfer_config"]
    settings = small_settings(
        hf_config=SMALL_LLAMA,
        parallel={"tensor_parallel_size": 2, "data_parallel_size": 2},
        tier={
            "class": "vllm.cachelab.sim.tier:SimTier",
            "extra": extra["kv_connector_extra_config"],
        },
    )
    config = settings.make_config()
    header = make_header(config, settings.make_plan(config))
    # One of the two key heads, in fp32.
    assert header.groups == [(32, 32 * 2 * 16 * 4)]
    rebuilt = settings_of(header)
    check_rebuilt(header, rebuilt)
    assert read_settings(rebuilt.make_config()).host_bytes == 2 << 20
