"""From flags to whom to ask and how fast."""

import argparse
from typing import Any

from vllm.benchmarks.arrivals import Arrivals
from vllm.benchmarks.client.dialects import DIALECTS
from vllm.benchmarks.client.target import Target
from vllm.benchmarks.flags import SAMPLING
from vllm.exceptions import ConfigError


def make_arrivals(args: argparse.Namespace) -> Arrivals:
    """Return the arrivals that a command line asks for.

    Raises:
        ConfigError: A rate or a limit is out of range.
    """
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {args.max_concurrency} must be at least 1.")
    return Arrivals(
        args.request_rate,
        args.burstiness,
        args.ramp_up_strategy,
        args.ramp_up_start_rps,
        args.ramp_up_end_rps,
    )


def make_target(args: argparse.Namespace, model: str) -> Target:
    """Return the server that a command line asks for.

    Raises:
        ConfigError: A header is no NAME=VALUE.
    """
    headers = {}
    for entry in args.header:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--header {entry!r} must be NAME=VALUE.")
        headers[name] = value
    sampling: dict[str, Any] = {
        name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None
    }
    if args.logprobs is not None:
        is_chat = args.backend == "openai-chat"
        sampling |= (
            {"logprobs": True, "top_logprobs": args.logprobs}
            if is_chat
            else {"logprobs": args.logprobs}
        )
    if args.ignore_eos:
        sampling["ignore_eos"] = True
    return Target(
        args.base_url or f"http://{args.host}:{args.port}",
        DIALECTS[args.backend],
        model,
        args.endpoint,
        headers,
        sampling | args.extra_body,
    )
