"""Every kind of cache and interval: KV events rebuild a served engine's index, tokens included."""

import json
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.kv_events_subscriber import PrefixIndex
from tests.model_executor.models.decoder.checkpoints import FAMILIES, VOCAB_SIZE
from tests.v1.engine.test_cache_keeps_outputs import Session
from vllm.distributed.kv_events import EventPublisher, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

UNIT = 32
NUM_PROMPTS = 14
POOL_BYTES = {**dict.fromkeys(FAMILIES, 1 << 20), "deepseek-v4": 3 << 20}


class Recorder(EventPublisher):
    """Keeps what a subscriber would decode."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def publish(self, batch: KVEventBatch) -> None:
        """Take a batch as it travels."""
        self.events += msgspec.msgpack.decode(msgspec.msgpack.encode(batch))[1]

    def shutdown(self) -> None:
        """Nothing is open."""


def start(family: str, interval: str, folder: Path) -> EngineCore:
    """Return an engine with random weights and a pool that is soon full."""
    arguments: dict[str, Any] = {"model": "deepseek-v4"}
    if family != "deepseek-v4":
        (folder / "config.json").write_text(json.dumps(FAMILIES[family]), encoding="utf-8")
        arguments = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    config = EngineArgs(
        **arguments,
        block_size=UNIT,
        max_model_len=512,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=POOL_BYTES[family],
        prefix_cache_retention_interval=interval,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    ).create_vllm_config()
    return EngineCore(config, UniProcExecutor)


def entries_of(core: EngineCore) -> Counter[tuple[int, int | bytes]]:
    """Return what the cache itself holds, as events name it."""
    coordinator = core.scheduler.kv_cache_manager.coordinator
    index = coordinator.index
    entries: Counter[tuple[int, int | bytes]] = Counter()
    for block in coordinator.block_pool.blocks:
        for key in index.keys_of(block):
            group = next(g for g in index.keys if index.holds_key(g, key, block))
            entries[group, maybe_convert_block_hash(key)] += 1
    windows = [group.group_id for group in coordinator.geometry.windows]
    for record in index.checkpoints.values():
        for group, blocks in zip(windows, record.blocks, strict=True):
            if blocks:
                entries[group, maybe_convert_block_hash(record.prefix_hash)] += 1
    return entries


INTERVALS = ("0", "auto", "none")
# The caches of the other families are Llama's: full attention in every layer.
KINDS = ("deepseek-v4", "gemma3", "llama", "mistral", "qwen3.5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "interval"),
    # Windows beside full attention, as Gemma 3's.
    [*product(KINDS, INTERVALS), ("gemma4", "auto"), ("gpt-oss", "auto")],
)
def test_events_rebuild_the_index_and_tokens_foretell_hits(
    family: str, interval: str, tmp_path: Path
) -> None:
    core = start(family, interval, tmp_path)
    core.scheduler.kv_event_publisher = recorder = Recorder()
    session, view, draw = Session(core), PrefixIndex(), random.Random(24)
    known: list[list[int]] = [[]]
    num_hits = num_removed = 0
    for _ in range(NUM_PROMPTS):
        shared = draw.choice(known)
        end = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 200))]
        prompt = shared[: draw.randrange(len(shared) + 1)] + end
        foretold = view.foretell(prompt)
        name = session.add(prompt, draw.randrange(1, 40))
        session.run()
        answer = session.answers[name]
        assert answer.stats is not None
        assert answer.stats.num_cached_tokens == foretold
        num_hits += answer.stats.num_cached_tokens > 0
        known.append([*prompt, *answer.tokens][:300])
        for event in recorder.events:
            num_removed += event["type"] == "BlockRemoved"
            if event["type"] == "BlockStored":
                num_tokens = len(event["block_hashes"]) * event["block_size"]
                assert len(event["token_ids"]) == num_tokens
            view.apply(event)
        recorder.events.clear()
        assert view.entries == entries_of(core)
    assert num_hits > 2
    assert num_removed > 0, "the pool was never full"
    core.shutdown()
