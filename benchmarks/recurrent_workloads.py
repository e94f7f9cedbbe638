"""Which setting of the prefix cache hits most where checkpoints are heavy: states, wide windows.

    python -m benchmarks.recurrent_workloads [--synthetic TRACE] [--conversation TRACE]
        [--models qwen3.5-4b ...] [--policies auto 0 1024 ... peer] [--only NAME ...] [--limit N]
        [--unit 128]

Serves traces in the geometry of released models, through the real cache manager at one unit
(``benchmarks.replay`` tells of traces and tails), and prints hit rates in % of prompt
tokens. Pools are given in tokens: so many would fit if nothing but keys and values was kept.
The chat trace is that of ``benchmarks.chat_trace``, with 2,000 conversations (``--conversations``).

``peer`` is what other engines do with these models, as a configuration of the same code and the
same bytes: a block is so long that its keys and values weigh as much as the states of as many
layers (528 tokens for Qwen 3.5 4B, 784 for 27B, 1,056 for 35B-A3B, 1,920 for Kimi), hits end at
such blocks, and checkpoints are kept at a prompt's last block and where prompts were seen to part.
For models with windows (Gemma 4) it is the same layout, with checkpoints there and nowhere else, no
lean or coarse boundary, nothing given up early, no window rebuilt, and every window row of a step
in blocks of the pool.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from tqdm import tqdm

from benchmarks.chat_trace import BLOCK, ChatShape, make_chat_trace
from benchmarks.policies import VariantPolicy
from benchmarks.prefix_driver import PrefixDriver
from benchmarks.replay import SPAN, read_trace
from benchmarks.result import print_result
from benchmarks.shapes import Prompt
from benchmarks.workloads import format_table, from_trace
from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.cachelab.sim.requests import PrefixUnits
from vllm.model_executor.models.decoder.config import DecoderConfig
from vllm.model_executor.models.decoder.kv_cache import (
    SUPPORTED_BLOCK_SIZES,
    decoder_kv_cache_specs,
)
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.layout.grouping import get_kv_cache_groups
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RecurrentStateSpec,
    StateShape,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

UNIT = 128
RECURRENT_MODELS = ("qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b", "kimi-linear", "glm-5.3-flash")
WINDOW_MODELS = ("gemma4-e4b", "gemma4-12b")
MODELS = (*RECURRENT_MODELS, *WINDOW_MODELS)
FIXED = ("0", "1024", "2048", "4096", "8192", "16384", "32768")
POLICIES = ("auto", *FIXED, "peer")
# Pools in thousands of tokens.
POOLS = {
    "synthetic": (1_000, 3_000, 8_000),
    "conversation": (1_000, 3_000, 8_000),
    "chat": (200, 400, 800),
}


@dataclass(frozen=True)
class _FakeDtype:
    """Stands in for a torch dtype: specs only ask for its item size."""

    itemsize: int


_BF16 = cast("torch.dtype", _FakeDtype(2))
_FP32 = cast("torch.dtype", _FakeDtype(4))
# All of a config that grouping asks for.
_AS_SERVED = cast(
    "VllmConfig",
    SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False)),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of the table.

    Attributes:
        model: Of ``GEOMETRIES``.
        workload: Of ``POOLS``.
        pool: Tokens, in thousands.
        policy: Its name.
        path: Of the trace, if it is a public one.
        limit: At most so many requests of a public trace.
        num_conversations: Of the chat trace.
        unit: Tokens of the smallest reusable prefix, but the peer's.
    """

    model: str
    workload: str
    pool: int
    policy: str
    path: Path | None
    limit: int | None = None
    num_conversations: int = 2000
    unit: int = UNIT

    @property
    def row(self) -> str:
        """The row's name."""
        return f"{self.model} {self.workload} {self.pool // 1000 or self.pool / 1000:g}M tokens"


def make_groups(model: str, unit: int = UNIT) -> list[KVCacheGroupSpec]:
    """Return the groups of a release at a unit, bf16 rows and float32 states."""
    raw = dict(GEOMETRIES[model])
    config = resolve_model(raw["architectures"]).parse_config(raw)
    assert isinstance(config, DecoderConfig)
    specs = decoder_kv_cache_specs(config, unit, _BF16, _FP32)
    return get_kv_cache_groups(_AS_SERVED, specs, hits_at_units=True)


def peer_block(groups: Sequence[KVCacheGroupSpec]) -> tuple[int, int]:
    """Return the tokens of the peer's blocks, and how many blocks a state takes there.

    Layers stand in groups of as many as there are attention layers, one block each. Blocks are
    multiples of 16 tokens, of latent rows of 128; an indexer's keys are left out.
    """
    specs = [spec for group in groups for spec in group.layer_specs().values()]
    (state,) = (spec for spec in specs if isinstance(spec, RecurrentStateSpec))
    rows = [spec for spec in specs if spec.keeps_every_token and spec.block_size == UNIT]
    shape = state.shape
    layer_bytes = 4 * shape.num_heads * shape.head_values
    layer_bytes += 2 * shape.num_channels * shape.num_columns
    row_bytes = rows[0].page_size_bytes // UNIT
    is_latent = isinstance(rows[0], FullAttentionSpec) and rows[0].head_size_v == 0
    multiple = 128 if is_latent else 16
    tokens = -(-layer_bytes // row_bytes)
    return -(-tokens // multiple) * multiple, -(-shape.num_layers // len(rows))


def make_cache(model: str, policy: str, num_tokens: int, unit: int = UNIT) -> KVCacheConfig:
    """Return the cache that a policy is tried on."""
    groups = make_groups(model, unit)
    if policy != "peer" or model in WINDOW_MODELS:
        dense = [g.kv_cache_spec for g in groups if g.kv_cache_spec.keeps_every_token]
        num_blocks = num_tokens * sum(Fraction(1, spec.block_size) for spec in dense)
        return KVCacheConfig(int(num_blocks), [], groups, hit_unit=unit)
    block, num_pieces = peer_block(make_groups(model))
    rows = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=128, dtype=_BF16)
    # One head a piece: what else it is made of does not matter to the cache.
    shape = StateShape(num_pieces, 1, 1, 1, 0, 1)
    state = RecurrentStateSpec(block_size=block, shape=shape, page_values=1, dtype=_FP32)
    specs = [KVCacheGroupSpec(["rows"], rows), KVCacheGroupSpec(["state"], state)]
    return KVCacheConfig(num_tokens // block, [], specs, hit_unit=block)


def make_retention(name: str, config: KVCacheConfig) -> RetentionPolicy:
    """Return a new policy by its name."""
    geometry = CacheGeometry.from_config(config)
    if name == "peer":
        return VariantPolicy(
            geometry,
            name,
            keeps_lean=False,
            keeps_coarse=False,
            supersedes=False,
            private_window=geometry.is_recurrent,
        )
    return make_policy(name, geometry, config.num_blocks - 1)


def make_prompts(run: Run) -> tuple[list[Prompt], int, int]:
    """Return prompts, the tokens of an id, and tokens that count as missed unserved."""
    if run.path is not None:
        traffic = from_trace(read_trace(run.path, limit=run.limit), "drop", False, 0)
        return traffic.prompts, SPAN, traffic.num_dropped
    lines = make_chat_trace(ChatShape(num_conversations=run.num_conversations), 0)
    # A token more than whole blocks, as in ``--tail drop``.
    prompts = [Prompt(int(line["input_length"]) + 1, (*line["hash_ids"], 0)) for line in lines]
    return prompts, BLOCK, 0


def measure(run: Run) -> float:
    """Serve a workload; returns hit tokens per prompt token."""
    prompts, span, num_dropped = make_prompts(run)
    config = make_cache(run.model, run.policy, run.pool * 1000, run.unit)
    assert config.hit_unit is not None
    longest = max(p.num_tokens + p.num_output_tokens for p in prompts)
    policy = make_retention(run.policy, config)
    driver = PrefixDriver(config, longest + 1, policy=policy, decode_stride=config.hit_unit)
    tokens = [0] * longest
    for number, prompt in enumerate(prompts):
        ids = PrefixUnits(number, prompt.span_ids, config.hit_unit, span)
        driver.serve(str(number), tokens[: prompt.num_tokens], ids, prompt.num_output_tokens)
        driver.outcomes.clear()
    return driver.stats.hit_tokens / (driver.stats.prompt_tokens + num_dropped)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--conversation", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--only", nargs="+", choices=tuple(POOLS), default=list(POOLS))
    parser.add_argument("--pools", nargs="+", type=int, help="thousands of tokens, for all")
    parser.add_argument("--limit", type=int, help="requests of a public trace")
    parser.add_argument("--conversations", type=int, default=2000, help="of the chat trace")
    parser.add_argument("--unit", type=int, choices=SUPPORTED_BLOCK_SIZES, default=UNIT)
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args(argv)


def make_runs(args: argparse.Namespace) -> list[Run]:
    """Return what a command line asks for; public traces only where their paths are given."""
    paths = {"synthetic": args.synthetic, "conversation": args.conversation}
    return [
        Run(
            model,
            workload,
            pool,
            policy,
            paths.get(workload),
            args.limit,
            args.conversations,
            args.unit,
        )
        for model in args.models
        for workload in args.only
        if workload not in paths or paths[workload] is not None
        for pool in args.pools or POOLS[workload]
        for policy in args.policies
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Serve everything, and print the table and the JSON line."""
    args = parse_args(argv)
    begin = time.perf_counter()
    runs = make_runs(args)
    rates: dict[str, dict[str, float]] = {run.row: {} for run in runs}
    with ProcessPoolExecutor(args.processes) as executor:
        waiting = {executor.submit(measure, run): run for run in runs}
        done = as_completed(waiting)
        for future in tqdm(done, total=len(waiting), desc="runs", mininterval=2.0, disable=None):
            run = waiting[future]
            rates[run.row][run.policy] = rate = future.result()
            tqdm.write(f"{run.row} under {run.policy}: {100 * rate:.2f}%", file=sys.stderr)
    print(format_table(rates, args.policies, FIXED))
    seconds = round(time.perf_counter() - begin, 1)
    rounded = {n: {p: round(rate, 5) for p, rate in row.items()} for n, row in rates.items()}
    config = json.loads(json.dumps(vars(args), default=str))
    print_result("recurrent_workloads", config, {"seconds": seconds, "hit_rates": rounded})


if __name__ == "__main__":
    main()
