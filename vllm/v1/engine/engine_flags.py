"""The engine's command-line flags."""

import argparse

from vllm.config.cache import CACHE_DTYPES, HASH_ALGOS
from vllm.config.load import LOAD_FORMATS
from vllm.config.model import DTYPES, QUANTIZATIONS
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import EXECUTOR_BACKENDS
from vllm.config.scheduler import POLICIES
from vllm.logger import LOG_FORMATS
from vllm.utils.argparse_utils import human_int, human_int_or_auto, json_object
from vllm.v1.engine.data_parallel.flags import add_data_parallel_flags

TOKENIZER_MODES = ("auto", "deepseek_v4")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``EngineArgs.from_cli_args`` reads."""
    _add_model_args(parser.add_argument_group("model"))
    _add_cache_args(parser.add_argument_group("KV cache"))
    _add_scheduler_args(parser.add_argument_group("scheduling"))
    _add_parallel_args(parser.add_argument_group("parallelism"))
    add_data_parallel_flags(parser.add_argument_group("data parallel"))
    _add_observability_args(parser.add_argument_group("observability"))


def _add_model_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        nargs="+",
        help="Names that clients may use; the first stands in responses. Default: the model.",
    )
    group.add_argument("--tokenizer", help="Folder or hub id of the tokenizer, if not the model's.")
    group.add_argument("--tokenizer-mode", choices=TOKENIZER_MODES, default="auto")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto: float32 on a CPU, else the model's."
    )
    group.add_argument(
        "--quantization",
        "-q",
        choices=QUANTIZATIONS,
        help="int8: round plain weights to eight bits as they load (docs/native.md). What the "
        "checkpoint quantises itself stays so without this flag.",
    )
    group.add_argument("--load-format", choices=LOAD_FORMATS, default="auto")
    group.add_argument("--revision", help="Branch, tag or commit of a hub id. Default: main.")
    group.add_argument(
        "--download-dir", help="Where hub ids are kept. Default: the Hugging Face cache (HF_HOME)."
    )
    group.add_argument("--seed", type=human_int, default=0)
    group.add_argument(
        "--max-model-len",
        type=human_int_or_auto,
        help="Longest prompt + answer in tokens (1k, 2M); -1 or auto: what fits in memory. "
        "Default: the model's context.",
    )
    group.add_argument(
        "--hf-overrides",
        type=json_object,
        default={},
        metavar="JSON",
        help="Values over those of the checkpoint's config.json; objects in it are merged.",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="Sampling defaults over the checkpoint's: '{\"temperature\": 0.5}'.",
    )
    group.add_argument(
        "--max-logprobs", type=human_int, default=20, help="Most a request may ask for; -1: all."
    )
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Never capture graphs; so far only an Ascend NPU can (docs/ascend.md).",
    )


def _add_cache_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size",
        type=human_int,
        help="Tokens of a KV block: for DeepSeek-V4 32 (default), 64 or 128.",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default="auto",
        help="Type of cached rows; auto: the model's. fp8: an Ascend A5's own pages.",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.92,
        help="Share of the device's memory to use (GPU; on a CPU see --kv-cache-memory-bytes).",
    )
    group.add_argument(
        "--kv-cache-memory-bytes", type=human_int, help="Exact size of the KV pool (2G)."
    )
    group.add_argument("--num-gpu-blocks-override", type=human_int, help="Exact number of blocks.")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="Reuse the KV cache of equal prefixes. Default: on.",
    )
    group.add_argument("--prefix-caching-hash-algo", choices=HASH_ALGOS, default="sha256")
    group.add_argument(
        "--prefix-cache-retention-interval",
        metavar="{auto,none,0,N}",
        help="Which window state is kept for later requests: auto (default), 0 where prompts and "
        "answers end and part, N also every N tokens, none every common multiple of all blocks.",
    )
    group.add_argument(
        "--prefix-cache-pinned-share",
        type=float,
        metavar="SHARE",
        help="Share of the KV pool that windows pinned under VLLM_PIN_SWA_TOKENS=1 may hold, 0 to "
        "1; default: VLLM_PIN_MAX_SHARE (0.25).",
    )
    group.add_argument(
        "--prefix-cache-dir",
        metavar="DIR",
        help="Folder of your own in which cached prefixes outlive the server "
        "(docs/durable_cache.md). Default: none.",
    )
    group.add_argument(
        "--prefix-cache-disk-size",
        metavar="SIZE",
        help="What its files may take, such as 8GiB. Default: a quarter of what is free, at most "
        "16GiB.",
    )
    _add_cache_report_args(group)


def _add_cache_report_args(group: argparse._ArgumentGroup) -> None:
    """Who else hears of the cache, or gets its rows."""
    group.add_argument(
        "--kv-events-config",
        type=json_object,
        metavar="JSON",
        help="Publish what enters and leaves the prefix cache: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
    )
    group.add_argument(
        "--kv-transfer-config",
        type=json_object,
        metavar="JSON",
        help="Prefill apart from decode (docs/disaggregation.md): "
        '{"kv_connector": "TcpConnector", "kv_role": "kv_producer", "kv_port": 14579}.',
    )
    group.add_argument(
        "--cache-trace",
        metavar="FILE",
        help="Record what decides about the prefix cache, hashes and no text, for vllm cache "
        "simulate and explain.",
    )
    group.add_argument(
        "--cache-trace-max-bytes",
        type=human_int,
        default=ObservabilityConfig.cache_trace_max_bytes,
        help="Of the trace and the part before it (FILE.1), together. Default: 256M.",
    )


def _add_scheduler_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=human_int, help="Requests running at a time.")
    group.add_argument(
        "--max-num-batched-tokens", type=human_int, help="Tokens of one step over all requests."
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="Compute long prompts in several steps. Default: on.",
    )
    group.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs")
    group.add_argument(
        "--max-num-queued-reqs",
        type=human_int,
        help="Waiting requests before new ones get 503. Default: no limit.",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=human_int,
        help="Tokens of prompts that wait for their first token before new ones get 503. "
        "Default: no limit.",
    )
    group.add_argument(
        "--speculative-config",
        "-sc",
        type=json_object,
        metavar="JSON",
        help='Draft tokens: {"method": "mtp", "num_speculative_tokens": 1 to 4}, or "ngram" with '
        "prompt_lookup_max and prompt_lookup_min.",
    )


def _add_parallel_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=human_int,
        default=1,
        metavar="N",
        help="Workers that share the model, each with a part of every matrix.",
    )
    group.add_argument(
        "--enable-expert-parallel",
        "-ep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Those workers hold whole experts instead of a part of each.",
    )
    group.add_argument(
        "--distributed-executor-backend",
        choices=EXECUTOR_BACKENDS,
        help="uni: one worker in the engine core's process; mp: a process each on this machine; "
        "ray: actors of a Ray cluster. Default: uni for one worker, else mp.",
    )


def _add_observability_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Do not log throughput and cache use.",
    )
    group.add_argument(
        "--kv-cache-metrics",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Histograms of how long blocks of the KV cache live and lie idle, on a sample.",
    )
    group.add_argument(
        "--kv-cache-metrics-sample",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="Share of the blocks that is sampled, above 0 to 1. Default: 0.01.",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="Send an OpenTelemetry span for each request to this collector "
        "(http://host:4318/v1/traces); needs the otel extra.",
    )
    group.add_argument(
        "--show-hidden-metrics-for-version",
        metavar="VERSION",
        help="Show metrics under their names of earlier versions too, whatever the version.",
    )
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json: one object a line."
    )
    group.add_argument(
        "--logging-config",
        "--log-config-file",
        metavar="FILE",
        help="A JSON or YAML file for logging.config.dictConfig, over our own settings.",
    )
