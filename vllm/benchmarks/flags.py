"""The flags of ``vllm bench``; what they lead to loads when a command runs."""

import argparse
from pathlib import Path
from typing import Any

from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.config.parallel import DATA_PARALLEL_ROUTINGS
from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    IgnoredFlag,
    RefusedFlag,
    human_int,
    json_object,
)
from vllm.v1.engine.engine_args import EngineArgs

BACKENDS = ("openai", "vllm", "openai-chat", "openai-responses")
DATASETS = (
    *("random", "sharegpt", "custom", "prefix_repetition", "timed_trace", "repeat"),
    *("sonnet", "burstgpt", "spec_bench", "hf"),
)
READINGS = ("beginning", "whole", "rounds")
BALANCERS = ("prefix", "round-robin", "least-load", "session", "first-block", "joint")
RAMP_UPS = ("linear", "exponential")
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
DEFAULT_METRICS = "ttft,tpot,itl"
_ONLY_TEXT = "only text is sent, and only answers are measured"
# Flags of vLLM's command that make no difference here, and those whose effect is missing.
_IGNORED_SERVE_FLAGS = (
    IgnoredFlag(("--no-oversample",), "a dataset with too few prompts is sent once", True),
    IgnoredFlag(("--trust-remote-code",), "no code of a checkpoint is run", True),
    IgnoredFlag(("--tokenizer-mode",), "there is one tokenizer for a model"),
)
_REFUSED_SERVE_FLAGS = (
    RefusedFlag(("--use-beam-search",), is_switch=True, advice="beams share no steps to measure"),
    RefusedFlag(("--lora-modules",), advice="name the adapter with --model"),
    RefusedFlag(("--no-stream",), is_switch=True, advice="times to tokens need a stream"),
    RefusedFlag(("--hf-name",), advice="give a local copy with --dataset-path FOLDER"),
    RefusedFlag(("--random-batch-size",), harmless=("1",), advice=_ONLY_TEXT),
    RefusedFlag(("--is-reranker",), is_switch=True, advice=_ONLY_TEXT),
    *(
        RefusedFlag((f"--random-mm-{name}",), advice=_ONLY_TEXT)
        for name in (
            *("base-items-per-request", "num-mm-items-range-ratio"),
            *("limit-mm-per-prompt", "bucket-config"),
        )
    ),
    *(
        RefusedFlag((f"--blazedit-{name}",), advice="use custom with lines of your own")
        for name in ("min-distance", "max-distance")
    ),
)


def add_serve_flags(parser: FlexibleArgumentParser) -> None:
    """Add all flags."""
    parser.add_ignored_flags(_IGNORED_SERVE_FLAGS)
    parser.add_refused_flags(_REFUSED_SERVE_FLAGS)
    add_target_flags(parser)
    add_traffic_flags(parser)
    add_dataset_flags(parser)
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics",
        default=DEFAULT_METRICS,
        metavar="NAMES",
        help="Which to give percentiles of: ttft, tpot, itl, e2el.",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="NUMBERS", help="Comma-separated."
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Also count requests that keep these limits, e.g. ttft:500.",
    )
    group.add_argument("--label", help="Stands in the result.")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Stand in the result."
    )
    group.add_argument("--save-result", action="store_true", help="Write a JSON file.")
    group.add_argument("--save-detailed", action="store_true", help="With an entry per request.")
    group.add_argument("--append-result", action="store_true", help="As a line of the file.")
    group.add_argument("--result-dir", type=Path, help="Default: this folder.")
    group.add_argument("--result-filename", help="Default: made of backend, rate, model and time.")
    group.add_argument("--plot", type=Path, metavar="PNG", help="Needs the extra vllm[bench].")
    group.add_argument("--plot-timeline", type=Path, metavar="PNG", help="A line per request.")


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="openai",
        help="Which route is asked; openai and vllm: /v1/completions.",
    )
    group.add_argument("--base-url", help="Instead of --host and --port.")
    group.add_argument("--host", default="127.0.0.1", help="Of the server.")
    group.add_argument("--port", type=int, default=8000, help="Of the server.")
    group.add_argument("--endpoint", help="The route, where it is not the API's own.")
    group.add_argument("--model", help="Default: the first that the server lists.")
    group.add_argument("--served-model-name", help="Sent as model, where --model names a folder.")
    group.add_argument("--tokenizer", help="Folder or hub id. Default: the model's.")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="Count made-up prompts in words."
    )
    group.add_argument(
        "--header", nargs="*", default=[], metavar="NAME=VALUE", help="Sent with every request."
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="Fields of every request.",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="How long to wait for the server; 0: it must be there.",
    )
    group.add_argument(
        "--profile", action="store_true", help="Call /start_profile and /stop_profile around it."
    )
    sampling = parser.add_argument_group("sampling")
    for name in SAMPLING:
        kind: Any = int if name == "top_k" else float
        flag = f"--{name.replace('_', '-')}"
        sampling.add_argument(flag, type=kind, help="Default: the server's.")
    sampling.add_argument("--logprobs", type=int, help="Asked for with every token.")
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Ask for answers of the full length, which OpenAI's own servers do not know.",
    )


def add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of arrivals."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="PER_SECOND",
        help="inf: all at once.",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="1: a Poisson process; below it burstier, above it more even.",
    )
    group.add_argument(
        "--max-concurrency", type=human_int, help="Requests open at a time. Default: any number."
    )
    group.add_argument(
        "--probe-request-rate",
        type=float,
        default=0.0,
        metavar="PER_SECOND",
        help="Also send short new prompts, beside the load and its --max-concurrency, and report "
        "their times apart: what somebody sees who comes while the load runs.",
    )
    group.add_argument("--num-warmups", type=human_int, default=0, help="Requests sent before.")
    group.add_argument(
        "--ramp-up-strategy", choices=RAMP_UPS, help="How the rate grows from start to end."
    )
    group.add_argument("--ramp-up-start-rps", type=float, help="Requests per second.")
    group.add_argument("--ramp-up-end-rps", type=float, help="Requests per second.")
    group.add_argument("--request-id-prefix", default="bench-", help="Of the requests' ids.")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all datasets."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", choices=DATASETS, default="random", help="Where prompts come from."
    )
    group.add_argument(
        "--dataset-path", type=Path, help="File of a dataset that is read; hf: a folder."
    )
    group.add_argument("--num-prompts", type=human_int, default=1000, help="Requests.")
    group.add_argument("--seed", type=int, default=0, help="Of prompts and arrivals. Default: 0.")
    group.add_argument(
        "--disable-shuffle",
        action="store_true",
        help="custom, spec_bench, hf: in the file's order.",
    )
    group.add_argument(
        "--strict", action="store_true", help="Refuse a file with a bad line; else it is skipped."
    )
    group.add_argument("--input-len", type=human_int, help="Of any made-up dataset.")
    group.add_argument("--output-len", type=human_int, help="Of any dataset.")
    _add_made_up(parser)
    files = parser.add_argument_group("dataset: files")
    files.add_argument(
        "--sharegpt-output-len", type=human_int, help="Tokens. Default: as in the file."
    )
    files.add_argument(
        "--custom-output-len", type=human_int, default=256, help="Tokens, where a line says none."
    )
    files.add_argument("--sonnet-input-len", type=human_int, default=550, help="Tokens.")
    files.add_argument("--sonnet-output-len", type=human_int, default=150, help="Tokens.")
    files.add_argument("--sonnet-prefix-len", type=human_int, default=200, help="Tokens.")
    files.add_argument("--spec-bench-output-len", type=human_int, default=256, help="Tokens.")
    files.add_argument("--spec-bench-category", help="Default: all.")
    files.add_argument("--hf-split", default="train", help="Part of the files' names.")
    files.add_argument("--hf-subset", help="Folder, or part of the files' names.")
    files.add_argument("--hf-output-len", type=human_int, default=128, help="Tokens.")
    files.add_argument(
        "--trace-block-size",
        type=human_int,
        default=512,
        help="timed_trace: tokens under one hash id. Default: 512.",
    )
    files.add_argument(
        "--trace-speed", type=float, default=1.0, help="timed_trace: how many times as fast."
    )


def _add_made_up(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset: random")
    group.add_argument("--random-input-len", type=human_int, default=1024, help="Tokens.")
    group.add_argument("--random-output-len", type=human_int, default=128, help="Tokens.")
    group.add_argument(
        "--random-prefix-len", type=human_int, default=0, help="Tokens that all prompts begin with."
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="Lengths vary by this share, up and down.",
    )
    group = parser.add_argument_group("dataset: prefix_repetition")
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=human_int, default=10, help="How many there are."
    )
    group.add_argument(
        "--prefix-repetition-prefix-len", type=human_int, default=256, help="Tokens."
    )
    group.add_argument(
        "--prefix-repetition-suffix-len", type=human_int, default=256, help="Tokens."
    )
    group.add_argument(
        "--prefix-repetition-output-len", type=human_int, default=128, help="Tokens."
    )
    group = parser.add_argument_group(
        "dataset: repeat",
        "beginning: all prompts share one beginning of --repeat-share. whole: --repeat-rate of the "
        "requests repeat one of the last --repeat-pool prompts. rounds: --repeat-pool prompts come "
        "back each round, --repeat-share of each unchanged, the rest new.",
    )
    group.add_argument("--repeat-reading", choices=READINGS, default="rounds", help="See above.")
    group.add_argument("--repeat-input-len", type=human_int, default=8192, help="Tokens.")
    group.add_argument("--repeat-output-len", type=human_int, default=1024, help="Tokens.")
    group.add_argument("--repeat-share", type=float, default=0.9, help="0 to 1.")
    group.add_argument("--repeat-rate", type=float, default=0.9, help="0 to 1.")
    group.add_argument("--repeat-pool", type=human_int, default=32, help="Prompts.")


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench latency``."""
    group = parser.add_argument_group("latency")
    group.add_argument("--input-len", type=human_int, default=32, help="Tokens of each prompt.")
    group.add_argument("--output-len", type=human_int, default=128, help="Tokens of each answer.")
    group.add_argument("--batch-size", type=human_int, default=8, help="Prompts at a time.")
    group.add_argument(
        "--num-iters-warmup",
        type=human_int,
        default=10,
        help="Batches before the first that counts.",
    )
    group.add_argument("--num-iters", type=human_int, default=30, help="Batches.")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    _add_common(parser, group)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench throughput``."""
    group = parser.add_argument_group("throughput")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    _add_common(parser, group)
    # Both have --seed: the prompts' is the engine's.
    add_dataset_flags(parser)


def _add_common(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-json", type=Path, metavar="FILE", help="Write one JSON object.")
    parser.add_argument("--model", default=EngineArgs.model, help="Folder or hub id.")
    parser.set_defaults(enable_prefix_caching=None)
    parser.conflict_handler = "resolve"
    EngineArgs.add_cli_args(parser)


def add_startup_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench startup``."""
    parser.add_argument("--model", default="deepseek-v4", help="Folder or hub id.")
    parser.add_argument("--num-iters", type=int, default=3, help="Starts.")
    parser.add_argument(
        "--num-iters-warmup",
        type=int,
        default=1,
        help="The first start of a fresh checkout also compiles bytecode. Default: 1.",
    )
    parser.add_argument(
        "--serve-flags", nargs=argparse.REMAINDER, default=[], help="For vllm serve; the last."
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Write one JSON object.")


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench replay``."""
    parser.add_argument("trace", type=Path, help="JSON lines in the Mooncake project's form.")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace-block-size", type=human_int, default=512, help="Tokens under one hash id."
    )
    load.add_argument(
        "--trace-speed", type=float, default=1.0, help="Times as fast; inf: all at once."
    )
    load.add_argument(
        "--max-concurrency",
        type=human_int,
        help="Requests that clients have open. Default: any number.",
    )
    load.add_argument("--every", type=human_int, default=1, help="Only each such line.")
    load.add_argument("--limit", type=human_int, help="At most so many requests.")
    load.add_argument(
        "--max-output-tokens", type=human_int, help="Cut answers; 1 replays prompts alone: faster."
    )
    load.add_argument("--strict", action="store_true", help="Refuse a bad line.")
    load.add_argument("--seed", type=int, default=0, help="Of accepted drafts.")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--model",
        default="v4-flash",
        help=f"{', '.join(GEOMETRIES)}, a config.json, a folder or hub id. Default: v4-flash.",
    )
    server.add_argument(
        "--policies",
        nargs="+",
        default=["auto"],
        metavar="INTERVAL[+pins]",
        help="As --prefix-cache-retention-interval of vllm serve, or off: no cache; several are "
        "compared.",
    )
    server.add_argument(
        "--block-size",
        nargs="+",
        type=human_int,
        default=[128],
        help="Tokens; several are compared.",
    )
    server.add_argument(
        "--pool-gib",
        nargs="+",
        type=float,
        default=[16.0],
        metavar="GIB",
        help="KV cache of a server; several are compared.",
    )
    server.add_argument("--dtype", default="bfloat16", help="Of the model.")
    server.add_argument("--kv-cache-dtype", default="auto", help="As that of vllm serve.")
    server.add_argument("--max-num-batched-tokens", type=human_int, default=8192, help="Of a step.")
    server.add_argument("--max-num-seqs", type=human_int, default=128, help="Of a step.")
    server.add_argument(
        "--mtp", type=int, default=0, metavar="DRAFTS", help="Drafts a step; 0: none."
    )
    server.add_argument(
        "--mtp-acceptance",
        type=float,
        default=0.7,
        help="Chance of each draft, if the one before it stood.",
    )
    _add_core_flags(server)
    _add_fleet_flags(parser)
    clock = parser.add_argument_group("clock")
    clock.add_argument(
        "--cost", type=Path, metavar="FILE", help="Coefficients, as vllm cache simulate fits them."
    )
    clock.add_argument(
        "--decode-stride",
        type=human_int,
        default=1,
        help="Tokens a decode step brings; more is faster, and coarser. Default: 1.",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,e2el",
        metavar="NAMES",
        help="Which to give percentiles of: ttft, tpot, itl, e2el.",
    )
    result.add_argument(
        "--metric-percentiles", default="50,90,99", metavar="NUMBERS", help="Comma-separated."
    )
    result.add_argument(
        "--goodput-ttft-ms", type=float, help="Also count requests whose first token came sooner."
    )
    _add_grid_result(result)


def _add_grid_result(group: Any) -> None:
    """Add how settings are run, and where what came of them goes."""
    group.add_argument("--processes", type=int, default=2, help="For several settings.")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="Write one JSON object.")
    group.add_argument("--plot", type=Path, metavar="PNG", help="Needs the extra vllm[bench].")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")


def _add_core_flags(server: Any) -> None:
    """Add how many engine cores there are, and who gets a request."""
    server.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Engine cores, each with a pool of --pool-gib. Default: 1.",
    )
    server.add_argument(
        "--dp-policy",
        choices=DATA_PARALLEL_ROUTINGS,
        default="prefix",
        help="As --data-parallel-routing of vllm serve. Default: prefix.",
    )


def _add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of many servers and what stands in front of them."""
    fleet = parser.add_argument_group("many servers")
    fleet.add_argument(
        "--servers",
        type=human_int,
        metavar="N",
        help="Servers behind a balancer, each with a pool of --pool-gib; requests are read as they "
        "come, so traces may be longer than memory.",
    )
    fleet.add_argument(
        "--balancer",
        nargs="+",
        choices=BALANCERS,
        default=["prefix"],
        help="Whom to compare; joint: one server with the memory and the speed of all. Default: "
        "prefix.",
    )
    fleet.add_argument(
        "--copies",
        type=human_int,
        default=1,
        help="Of every line, each with prompts of its own. Default: 1.",
    )
    fleet.add_argument(
        "--news-delay-ms",
        type=float,
        default=0.0,
        help="How late the balancer hears what a step did to a cache. Default: 0.",
    )
    fleet.add_argument(
        "--burst",
        nargs=3,
        type=float,
        metavar=("FACTOR", "SECONDS", "EVERY"),
        help="FACTOR times as many requests for SECONDS, every EVERY seconds, fewer between.",
    )
    fleet.add_argument(
        "--lose",
        nargs=3,
        type=float,
        metavar=("COUNT", "AT", "BACK"),
        help="COUNT servers die AT seconds, and serve again BACK seconds later, empty.",
    )
    fleet.add_argument(
        "--rolling-restart",
        nargs=2,
        type=float,
        metavar=("AT", "BACK"),
        help="From AT seconds on every server is drained and restarted, which takes it BACK "
        "seconds, one after another.",
    )
    fleet.add_argument(
        "--warm-up",
        nargs=3,
        type=float,
        metavar=("SECONDS", "GIB", "GIB_PER_S"),
        help="What a server that comes back pulls of other servers' caches before it serves: for "
        "SECONDS and GIB at most, at GIB_PER_S. Default: it begins empty.",
    )


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm cache simulate``."""
    parser.add_argument("trace", type=Path, help="As vllm serve --cache-trace wrote it.")
    parser.add_argument(
        "--per-request",
        type=Path,
        metavar="JSONL",
        help="Write request_id, prompt_tokens and cached_tokens of each request.",
    )
    parser.add_argument("--save-cost", type=Path, metavar="FILE", help="For vllm bench replay.")
    parser.add_argument("--strict", action="store_true", help="Refuse a bad line.")
    grid = parser.add_argument_group("other settings", "Every combination is replayed.")
    grid.add_argument(
        "--policies",
        nargs="+",
        metavar="INTERVAL[+pins]",
        help="As --prefix-cache-retention-interval of vllm serve, or off: no cache. "
        "Default: the recorded one, auto if none was recorded.",
    )
    grid.add_argument(
        "--block-size",
        nargs="+",
        type=human_int,
        help="Tokens, multiples of the recorded one, which is the default.",
    )
    grid.add_argument(
        "--pool-gib",
        nargs="+",
        type=float,
        metavar="GIB",
        help="KV cache. Default: the recorded size.",
    )
    grid.add_argument(
        "--disk-gib", nargs="+", type=float, metavar="GIB", help="Of a recorded cache folder."
    )
    _add_grid_result(grid)


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm cache explain``."""
    parser.add_argument("request_id", help="The id of the response.")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Instead of a live server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Of the live server.")
    parser.add_argument("--api-key", help="Of the live server.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument(
        "--no-remedies", action="store_true", help="Do not replay to find what would have helped."
    )
    parser.add_argument("--strict", action="store_true", help="Refuse a bad line of the trace.")
