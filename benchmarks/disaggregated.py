"""Prefill apart from decode, in real processes: is every answer that of one server?

    python -m benchmarks.disaggregated [--requests 1000] [--seed 0] [--no-mtp] [--cores 1]

Starts one server, a prefill server, a decode server and the example's proxy on this machine, with
pools so small that prompts wait for room. Mixed requests (lengths,
shared beginnings, n > 1 with seeds, streams, chats, several prompts, clients that leave) go to the
proxy; those that are read to their end go to the one server too. Says how many answers differ, what
came from the prefill server, and whether all blocks are free at the end. Prints one JSON line; a
difference or a lost block ends it with an error.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result

_PROXY = Path(__file__).parents[1] / "examples" / "disaggregated" / "proxy.py"
_TIMEOUT_S = 300.0
# One request of the longest length, and little more.
_TIGHT = ("--max-model-len", "1024", "--num-gpu-blocks-override", "190", "--max-num-seqs", "16")
_MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def transfer_flags(role: str, kv_port: int) -> tuple[str, str]:
    """Return the flags of one side."""
    config = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": kv_port}
    return "--kv-transfer-config", json.dumps(config)


def make_requests(count: int, seed: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (kind, path, body) of mixed requests."""
    rng = random.Random(seed)
    bases = [[rng.randrange(100, 2000) for _ in range(700)] for _ in range(4)]
    requests = []
    for number in range(count):
        head = rng.choice(bases)[: rng.choice((0, 40, 200, 450, 700))]
        tail = [rng.randrange(100, 2000) for _ in range(rng.randrange(1, 120))]
        body: dict[str, Any] = {
            "prompt": head + tail,
            "max_tokens": rng.randrange(1, 16),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        kind, path = "plain", "/v1/completions"
        draw = rng.random()
        if draw < 0.15:
            kind = "stream"
            body["stream"] = True
        elif draw < 0.3:
            kind = "n"
            body |= {"n": rng.randrange(2, 4), "temperature": 0.9, "seed": number}
        elif draw < 0.4:
            kind, path = "chat", "/v1/chat/completions"
            words = " ".join(f"w{token}" for token in body.pop("prompt")[:120])
            body["messages"] = [{"role": "user", "content": words}]
        elif draw < 0.5:
            kind = "leaves"
            body |= {"stream": True, "max_tokens": 200}
        elif draw < 0.55:
            kind = "prompts"
            body["prompt"] = [body["prompt"], tail]
        requests.append((kind, path, body))
    return requests


def ask(url: str, path: str, body: dict[str, Any], *, leaves: bool = False) -> dict[int, list[int]]:
    """Return the token ids of each answer; with ``leaves``, go after the first event."""
    found: dict[int, list[int]] = {}
    if not body.get("stream"):
        reply = httpx.post(url + path, json=body, timeout=_TIMEOUT_S)
        reply.raise_for_status()
        return {choice["index"]: choice["token_ids"] for choice in reply.json()["choices"]}
    with httpx.stream("POST", url + path, json=body, timeout=_TIMEOUT_S) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                found.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if leaves:
                break
    return found


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's series."""
    lines = httpx.get(url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def wait_free(url: str) -> bool:
    """Wait until no block is held; False if that takes too long."""
    deadline = time.monotonic() + 60
    while metric(url, "vllm:kv_cache_usage_perc") or metric(url, "vllm:num_requests_running"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def start_proxy(stack: ExitStack, prefill_url: str, decode_url: str) -> str:
    """Start the example's proxy, wait until it answers, and return its URL.

    Args:
        stack: Ends the proxy.
        prefill_url: Of the prefill server.
        decode_url: Of the decode server.

    Raises:
        RuntimeError: It does not answer.
    """
    port = free_port()
    command = [sys.executable, str(_PROXY), "--port", str(port), "--prefill", prefill_url]
    proxy = subprocess.Popen([*command, "--decode", decode_url])
    stack.callback(proxy.wait)
    stack.callback(proxy.terminate)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            httpx.get(url + "/health", timeout=5).raise_for_status()
            return url
        except httpx.HTTPError:
            time.sleep(0.1)
    raise RuntimeError(f"the proxy at {url} does not answer")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, ask everything, compare."""
    flags = ("deepseek-v4", "--block-size", "32", *_TIGHT)
    apart = (*(() if args.no_mtp else _MTP), "--data-parallel-size", str(args.cores))
    kv_port = free_port()
    with ExitStack() as stack:

        def start(name: str, *more: str) -> LiveServer:
            return stack.enter_context(LiveServer(folder / f"{name}.txt", *flags, *more))

        alone = start("alone")
        prefill = start("prefill", *apart, *transfer_flags("kv_producer", kv_port))
        decode = start("decode", *apart, *transfer_flags("kv_consumer", kv_port))
        url = start_proxy(stack, prefill.url, decode.url)

        def compare(entry: tuple[str, str, dict[str, Any]]) -> str:
            kind, path, body = entry
            found = ask(url, path, body, leaves=kind == "leaves")
            if kind == "leaves":
                return "left"
            return "equal" if found == ask(alone.url, path, body) else f"different ({kind})"

        requests = make_requests(args.requests, args.seed)
        with ThreadPoolExecutor(args.concurrency) as pool:
            outcomes = Counter(
                tqdm(pool.map(compare, requests), total=len(requests), mininterval=5)
            )
        kinds = Counter(kind for kind, _, _ in requests)
        return {
            "outcomes": dict(outcomes),
            "kinds": dict(kinds),
            "external_tokens": metric(decode.url, "vllm:external_prefix_cache_hits_total"),
            "local_hits": metric(decode.url, "vllm:prefix_cache_hits_total"),
            "preemptions": metric(decode.url, "vllm:num_preemptions_total"),
            "prefill_blocks_free": wait_free(prefill.url),
            "decode_blocks_free": wait_free(decode.url),
        }


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-mtp", action="store_true")
    parser.add_argument("--cores", type=int, default=1, help="Engine cores on either side.")
    parser.add_argument("--logs", type=Path, help="Folder for the servers' logs.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        values = run(args, args.logs or Path(temporary))
    config = {"requests": args.requests, "seed": args.seed, "mtp": not args.no_mtp}
    config["cores"] = args.cores
    print_result("disaggregated", config, values)
    wrong = {name for name in values["outcomes"] if name not in ("equal", "left")}
    if wrong or not (values["prefill_blocks_free"] and values["decode_blocks_free"]):
        raise SystemExit("Not every answer is that of one server, or a block is lost.")


if __name__ == "__main__":
    main()
