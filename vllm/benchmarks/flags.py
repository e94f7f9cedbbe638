"""The flags of ``vllm bench`` and ``vllm cache``; what they lead to loads when a command runs.

Each group is a dataclass of options (``vllm.config.options``), as ``vllm serve``'s flags are.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.config.options import option
from vllm.config.parallel import DATA_PARALLEL_ROUTINGS
from vllm.utils.argparse_utils import FlexibleArgumentParser, IgnoredFlag, RefusedFlag, human_int
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.option_flags import add_option_flags

BACKENDS = ("openai", "vllm", "openai-chat", "openai-responses")
DATASETS = (
    *("random", "sharegpt", "custom", "prefix_repetition", "timed_trace", "repeat"),
    *("sonnet", "burstgpt", "spec_bench", "hf", "random-mm"),
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
        RefusedFlag((f"--blazedit-{name}",), advice="use custom with lines of your own")
        for name in ("min-distance", "max-distance")
    ),
)


# What stands below the headings of some groups in --help.
_ABOUT = {
    "dataset: repeat": "beginning: all prompts share one beginning of --repeat-share. whole: "
    "--repeat-rate of the requests repeat one of the last --repeat-pool prompts. rounds: "
    "--repeat-pool prompts come back each round, --repeat-share of each unchanged, the rest new.",
    "other settings": "Every combination is replayed.",
}


@dataclass(frozen=True)
class TargetOptions:
    """The server, and what is asked of it."""

    backend: str = option(
        "openai",
        "Which route is asked; openai and vllm: /v1/completions.",
        group="server",
        choices=BACKENDS,
    )
    base_url: str | None = option(None, "Instead of --host and --port.", group="server")
    host: str = option("127.0.0.1", "Of the server.", group="server")
    port: int = option(8000, "Of the server.", group="server", parse=int)
    endpoint: str | None = option(None, "The route, where it is not the API's own.", group="server")
    model: str | None = option(None, "Default: the first that the server lists.", group="server")
    served_model_name: str | None = option(
        None, "Sent as model, where --model names a folder.", group="server"
    )
    tokenizer: str | None = option(None, "Folder or hub id. Default: the model's.", group="server")
    skip_tokenizer_init: bool = option(False, "Count made-up prompts in words.", group="server")
    header: tuple[str, ...] = option(
        (), "Sent with every request.", group="server", many=True, metavar="NAME=VALUE"
    )
    extra_body: dict[str, Any] = option(
        {}, "Fields of every request.", group="server", metavar="JSON"
    )
    ready_check_timeout_sec: float = option(
        0.0,
        "How long to wait for the server; 0: it must be there.",
        group="server",
        metavar="SECONDS",
    )
    profile: bool = option(
        False, "Call /start_profile and /stop_profile around it.", group="server"
    )
    temperature: float | None = option(None, "Default: the server's.", group="sampling")
    top_p: float | None = option(None, "Default: the server's.", group="sampling")
    top_k: int | None = option(None, "Default: the server's.", group="sampling", parse=int)
    min_p: float | None = option(None, "Default: the server's.", group="sampling")
    repetition_penalty: float | None = option(None, "Default: the server's.", group="sampling")
    frequency_penalty: float | None = option(None, "Default: the server's.", group="sampling")
    presence_penalty: float | None = option(None, "Default: the server's.", group="sampling")
    logprobs: int | None = option(None, "Asked for with every token.", group="sampling", parse=int)
    ignore_eos: bool = option(
        False,
        "Ask for answers of the full length, which OpenAI's own servers do not know.",
        group="sampling",
    )


@dataclass(frozen=True)
class TrafficOptions:
    """When requests arrive."""

    request_rate: float = option(
        float("inf"), "inf: all at once.", group="traffic", metavar="PER_SECOND"
    )
    burstiness: float = option(
        1.0, "1: a Poisson process; below it burstier, above it more even.", group="traffic"
    )
    max_concurrency: int | None = option(
        None, "Requests open at a time. Default: any number.", group="traffic"
    )
    probe_request_rate: float = option(
        0.0,
        "Also send short new prompts, beside the load and its --max-concurrency, and report their "
        "times apart: what somebody sees who comes while the load runs.",
        group="traffic",
        metavar="PER_SECOND",
    )
    num_warmups: int = option(0, "Requests sent before.", group="traffic")
    ramp_up_strategy: str | None = option(
        None, "How the rate grows from start to end.", group="traffic", choices=RAMP_UPS
    )
    ramp_up_start_rps: float | None = option(None, "Requests per second.", group="traffic")
    ramp_up_end_rps: float | None = option(None, "Requests per second.", group="traffic")
    request_id_prefix: str = option("bench-", "Of the requests' ids.", group="traffic")
    disable_tqdm: bool = option(False, "No progress bar.", group="traffic")


@dataclass(frozen=True)
class DatasetOptions:
    """Where prompts come from."""

    dataset_name: str = option(
        "random", "Where prompts come from.", group="dataset", choices=DATASETS
    )
    dataset_path: Path | None = option(
        None, "File of a dataset that is read; hf: a folder.", group="dataset"
    )
    num_prompts: int = option(1000, "Requests.", group="dataset")
    seed: int = option(0, "Of prompts and arrivals. Default: 0.", group="dataset", parse=int)
    disable_shuffle: bool = option(
        False, "custom, spec_bench, hf: in the file's order.", group="dataset"
    )
    strict: bool = option(
        False, "Refuse a file with a bad line; else it is skipped.", group="dataset"
    )
    input_len: int | None = option(None, "Of any made-up dataset.", group="dataset")
    output_len: int | None = option(None, "Of any dataset.", group="dataset")
    random_input_len: int = option(1024, "Tokens.", group="dataset: random")
    random_output_len: int = option(128, "Tokens.", group="dataset: random")
    random_prefix_len: int = option(
        0, "Tokens that all prompts begin with.", group="dataset: random"
    )
    random_range_ratio: float = option(
        0.0, "Lengths vary by this share, up and down.", group="dataset: random"
    )
    random_mm_base_items_per_request: int = option(
        1, "Pictures of a request.", group="dataset: random-mm"
    )
    random_mm_num_mm_items_range_ratio: float = option(
        0.0, "Their number varies by this share, up and down.", group="dataset: random-mm"
    )
    random_mm_limit_mm_per_prompt: str = option(
        '{"image": 255}', "Most of a request.", group="dataset: random-mm", metavar="JSON"
    )
    random_mm_bucket_config: str = option(
        "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}",
        "Shares of sizes: (height, width, 1).",
        group="dataset: random-mm",
        metavar="SHARES",
    )
    random_mm_repeat_rate: float = option(
        0.0, "Share of pictures that were sent before.", group="dataset: random-mm"
    )
    prefix_repetition_num_prefixes: int = option(
        10, "How many there are.", group="dataset: prefix_repetition"
    )
    prefix_repetition_prefix_len: int = option(256, "Tokens.", group="dataset: prefix_repetition")
    prefix_repetition_suffix_len: int = option(256, "Tokens.", group="dataset: prefix_repetition")
    prefix_repetition_output_len: int = option(128, "Tokens.", group="dataset: prefix_repetition")
    repeat_reading: str = option("rounds", "See above.", group="dataset: repeat", choices=READINGS)
    repeat_input_len: int = option(8192, "Tokens.", group="dataset: repeat")
    repeat_output_len: int = option(1024, "Tokens.", group="dataset: repeat")
    repeat_share: float = option(0.9, "0 to 1.", group="dataset: repeat")
    repeat_rate: float = option(0.9, "0 to 1.", group="dataset: repeat")
    repeat_pool: int = option(32, "Prompts.", group="dataset: repeat")
    sharegpt_output_len: int | None = option(
        None, "Tokens. Default: as in the file.", group="dataset: files"
    )
    custom_output_len: int = option(256, "Tokens, where a line says none.", group="dataset: files")
    sonnet_input_len: int = option(550, "Tokens.", group="dataset: files")
    sonnet_output_len: int = option(150, "Tokens.", group="dataset: files")
    sonnet_prefix_len: int = option(200, "Tokens.", group="dataset: files")
    spec_bench_output_len: int = option(256, "Tokens.", group="dataset: files")
    spec_bench_category: str | None = option(None, "Default: all.", group="dataset: files")
    hf_split: str = option("train", "Part of the files' names.", group="dataset: files")
    hf_subset: str | None = option(
        None, "Folder, or part of the files' names.", group="dataset: files"
    )
    hf_output_len: int = option(128, "Tokens.", group="dataset: files")
    trace_block_size: int = option(
        512, "timed_trace: tokens under one hash id. Default: 512.", group="dataset: files"
    )
    trace_speed: float = option(1.0, "timed_trace: how many times as fast.", group="dataset: files")


@dataclass(frozen=True)
class ServeResultOptions:
    """What ``vllm bench serve`` reports, and where it goes."""

    percentile_metrics: str = option(
        DEFAULT_METRICS,
        "Which to give percentiles of: ttft, tpot, itl, e2el.",
        group="result",
        metavar="NAMES",
    )
    metric_percentiles: str = option("99", "Comma-separated.", group="result", metavar="NUMBERS")
    goodput: tuple[str, ...] = option(
        (),
        "Also count requests that keep these limits, e.g. ttft:500.",
        group="result",
        many=True,
        metavar="METRIC:MS",
    )
    label: str | None = option(None, "Stands in the result.", group="result")
    metadata: tuple[str, ...] = option(
        (), "Stand in the result.", group="result", many=True, metavar="KEY=VALUE"
    )
    save_result: bool = option(False, "Write a JSON file.", group="result")
    save_detailed: bool = option(False, "With an entry per request.", group="result")
    append_result: bool = option(False, "As a line of the file.", group="result")
    result_dir: Path | None = option(None, "Default: this folder.", group="result")
    result_filename: str | None = option(
        None, "Default: made of backend, rate, model and time.", group="result"
    )
    plot: Path | None = option(None, "Needs the extra vllm[bench].", group="result", metavar="PNG")
    plot_timeline: Path | None = option(None, "A line per request.", group="result", metavar="PNG")


@dataclass(frozen=True)
class LatencyOptions:
    """One batch, again and again."""

    input_len: int = option(32, "Tokens of each prompt.", group="latency")
    output_len: int = option(128, "Tokens of each answer.", group="latency")
    batch_size: int = option(8, "Prompts at a time.", group="latency")
    num_iters_warmup: int = option(10, "Batches before the first that counts.", group="latency")
    num_iters: int = option(30, "Batches.", group="latency")
    disable_tqdm: bool = option(False, "No progress bar.", group="latency")


@dataclass(frozen=True)
class ThroughputOptions:
    """Many prompts."""

    disable_tqdm: bool = option(False, "No progress bar.", group="throughput")


@dataclass(frozen=True)
class StartupOptions:
    """Starts of a server."""

    model: str = option("deepseek-v4", "Folder or hub id.", group="start")
    num_iters: int = option(3, "Starts.", group="start", parse=int)
    num_iters_warmup: int = option(
        1,
        "The first start of a fresh checkout also compiles bytecode. Default: 1.",
        group="start",
        parse=int,
    )
    output_json: Path | None = option(None, "Write one JSON object.", group="start", metavar="FILE")


@dataclass(frozen=True)
class ReplayOptions:
    """A trace, and the servers that it is replayed on."""

    trace_block_size: int = option(512, "Tokens under one hash id.", group="load")
    trace_speed: float = option(1.0, "Times as fast; inf: all at once.", group="load")
    max_concurrency: int | None = option(
        None, "Requests that clients have open. Default: any number.", group="load"
    )
    every: int = option(1, "Only each such line.", group="load")
    limit: int | None = option(None, "At most so many requests.", group="load")
    max_output_tokens: int | None = option(
        None, "Cut answers; 1 replays prompts alone: faster.", group="load"
    )
    strict: bool = option(False, "Refuse a bad line.", group="load")
    seed: int = option(0, "Of accepted drafts.", group="load", parse=int)
    model: str = option(
        "v4-flash",
        f"{', '.join(GEOMETRIES)}, a config.json, a folder or hub id. Default: v4-flash.",
        group="server",
    )
    policies: tuple[str, ...] = option(
        ("auto",),
        "As --prefix-cache-retention-interval of vllm serve, or off: no cache; several are "
        "compared.",
        group="server",
        many=True,
        metavar="INTERVAL[+pins]",
    )
    block_size: tuple[int, ...] = option(
        (128,), "Tokens; several are compared.", group="server", parse=human_int, many=True
    )
    pool_gib: tuple[float, ...] = option(
        (16.0,),
        "KV cache of a server; several are compared.",
        group="server",
        parse=float,
        many=True,
        metavar="GIB",
    )
    dtype: str = option("bfloat16", "Of the model.", group="server")
    kv_cache_dtype: str = option("auto", "As that of vllm serve.", group="server")
    max_num_batched_tokens: int = option(8192, "Of a step.", group="server")
    max_num_seqs: int = option(128, "Of a step.", group="server")
    mtp: int = option(0, "Drafts a step; 0: none.", group="server", parse=int, metavar="DRAFTS")
    mtp_acceptance: float = option(
        0.7, "Chance of each draft, if the one before it stood.", group="server"
    )
    data_parallel_size: int = option(
        1,
        "Engine cores, each with a pool of --pool-gib. Default: 1.",
        group="server",
        parse=int,
        metavar="N",
    )
    dp_policy: str = option(
        "prefix",
        "As --data-parallel-routing of vllm serve. Default: prefix.",
        group="server",
        choices=DATA_PARALLEL_ROUTINGS,
    )
    servers: int | None = option(
        None,
        "Servers behind a balancer, each with a pool of --pool-gib; requests are read as they "
        "come, so traces may be longer than memory.",
        group="many servers",
        metavar="N",
    )
    balancer: tuple[str, ...] = option(
        ("prefix",),
        "Whom to compare; joint: one server with the memory and the speed of all. Default: prefix.",
        group="many servers",
        choices=BALANCERS,
        many=True,
    )
    copies: int = option(
        1, "Of every line, each with prompts of its own. Default: 1.", group="many servers"
    )
    news_delay_ms: float = option(
        0.0,
        "How late the balancer hears what a step did to a cache. Default: 0.",
        group="many servers",
    )
    burst: tuple[float, float, float] | None = option(
        None,
        "FACTOR times as many requests for SECONDS, every EVERY seconds, fewer between.",
        group="many servers",
        parse=float,
        count=3,
        metavar=("FACTOR", "SECONDS", "EVERY"),
    )
    lose: tuple[float, float, float] | None = option(
        None,
        "COUNT servers die AT seconds, and serve again BACK seconds later, empty.",
        group="many servers",
        parse=float,
        count=3,
        metavar=("COUNT", "AT", "BACK"),
    )
    rolling_restart: tuple[float, float] | None = option(
        None,
        "From AT seconds on every server is drained and restarted, which takes it BACK seconds, "
        "one after another.",
        group="many servers",
        parse=float,
        count=2,
        metavar=("AT", "BACK"),
    )
    warm_up: tuple[float, float, float] | None = option(
        None,
        "What a server that comes back pulls of other servers' caches before it serves: for "
        "SECONDS and GIB at most, at GIB_PER_S. Default: it begins empty.",
        group="many servers",
        parse=float,
        count=3,
        metavar=("SECONDS", "GIB", "GIB_PER_S"),
    )
    cost: Path | None = option(
        None, "Coefficients, as vllm cache simulate fits them.", group="clock", metavar="FILE"
    )
    decode_stride: int = option(
        1, "Tokens a decode step brings; more is faster, and coarser. Default: 1.", group="clock"
    )
    percentile_metrics: str = option(
        "ttft,tpot,e2el",
        "Which to give percentiles of: ttft, tpot, itl, e2el.",
        group="result",
        metavar="NAMES",
    )
    metric_percentiles: str = option(
        "50,90,99", "Comma-separated.", group="result", metavar="NUMBERS"
    )
    goodput_ttft_ms: float | None = option(
        None, "Also count requests whose first token came sooner.", group="result"
    )


@dataclass(frozen=True)
class GridResultOptions:
    """How settings are run, and where what came of them goes."""

    processes: int = option(2, "For several settings.", group="result", parse=int)
    output_json: Path | None = option(
        None, "Write one JSON object.", group="result", metavar="FILE"
    )
    plot: Path | None = option(None, "Needs the extra vllm[bench].", group="result", metavar="PNG")
    disable_tqdm: bool = option(False, "No progress bar.", group="result")


@dataclass(frozen=True)
class SimulateOptions:
    """A recorded trace under other settings."""

    per_request: Path | None = option(
        None,
        "Write request_id, prompt_tokens and cached_tokens of each request.",
        group="report",
        metavar="JSONL",
    )
    save_cost: Path | None = option(None, "For vllm bench replay.", group="report", metavar="FILE")
    strict: bool = option(False, "Refuse a bad line.", group="report")
    policies: tuple[str, ...] | None = option(
        None,
        "As --prefix-cache-retention-interval of vllm serve, or off: no cache. Default: the "
        "recorded one, auto if none was recorded.",
        group="other settings",
        many=True,
        metavar="INTERVAL[+pins]",
    )
    block_size: tuple[int, ...] | None = option(
        None,
        "Tokens, multiples of the recorded one, which is the default.",
        group="other settings",
        parse=human_int,
        many=True,
    )
    pool_gib: tuple[float, ...] | None = option(
        None,
        "KV cache. Default: the recorded size.",
        group="other settings",
        parse=float,
        many=True,
        metavar="GIB",
    )
    disk_gib: tuple[float, ...] | None = option(
        None,
        "Of a recorded cache folder.",
        group="other settings",
        parse=float,
        many=True,
        metavar="GIB",
    )


@dataclass(frozen=True)
class ExplainOptions:
    """Why one request missed."""

    trace: Path | None = option(None, "Instead of a live server.", group="request", metavar="FILE")
    url: str = option("http://127.0.0.1:8000", "Of the live server.", group="request")
    api_key: str | None = option(None, "Of the live server.", group="request")
    json: bool = option(False, "Print one JSON object.", group="request")
    remedies: bool = option(True, "Replay to find what would have helped.", group="request")
    strict: bool = option(False, "Refuse a bad line of the trace.", group="request")


def add_serve_flags(parser: FlexibleArgumentParser) -> None:
    """Add the flags of ``vllm bench serve``."""
    parser.add_ignored_flags(_IGNORED_SERVE_FLAGS)
    parser.add_refused_flags(_REFUSED_SERVE_FLAGS)
    for owner in (TargetOptions, TrafficOptions, DatasetOptions, ServeResultOptions):
        add_option_flags(parser, owner, _ABOUT)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all datasets."""
    add_option_flags(parser, DatasetOptions, _ABOUT)


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench latency``."""
    add_option_flags(parser, LatencyOptions)
    _add_engine_flags(parser)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench throughput``."""
    add_option_flags(parser, ThroughputOptions)
    _add_engine_flags(parser)
    # Both have --seed: the prompts' is the engine's.
    add_dataset_flags(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Write one JSON object.")
    parser.add_argument("--model", default=EngineArgs.model, help="Folder or hub id.")
    parser.set_defaults(enable_prefix_caching=None)
    parser.conflict_handler = "resolve"
    EngineArgs.add_cli_args(parser)


def add_startup_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench startup``."""
    add_option_flags(parser, StartupOptions)
    parser.add_argument(
        "--serve-flags", nargs=argparse.REMAINDER, default=[], help="For vllm serve; the last."
    )


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench replay``."""
    parser.add_argument("trace", type=Path, help="JSON lines in the Mooncake project's form.")
    add_option_flags(parser, ReplayOptions)
    add_option_flags(parser, GridResultOptions)


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm cache simulate``."""
    parser.add_argument("trace", type=Path, help="As vllm serve --cache-trace wrote it.")
    add_option_flags(parser, SimulateOptions, _ABOUT)
    add_option_flags(parser, GridResultOptions)


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm cache explain``."""
    parser.add_argument("request_id", help="The id of the response.")
    parser.add_argument(
        "earlier_id", nargs="?", help="Of an earlier one: say also where the two prompts part."
    )
    add_option_flags(parser, ExplainOptions)
