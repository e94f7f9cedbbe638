"""A real server under ``vllm bench serve``, recorded: its twin hits what it hit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess
from vllm.entrypoints.cli.main import main

_FLAGS = (
    "--max-num-batched-tokens",
    "256",
    "--max-num-seqs",
    "6",
    "--enable-prompt-tokens-details",
)
_MTP = '{"method": "mtp", "num_speculative_tokens": 1}'


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server records."""
    return tmp_path_factory.mktemp("trace") / "cache.jsonl"


@pytest.fixture(scope="module")
def recorded_server(trace_path: Path) -> Iterator[ServerProcess]:
    """A server with a drafter and a pool that a few prompts fill."""
    flags = (*_FLAGS, "--cache-trace", str(trace_path), "--speculative-config", _MTP)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CHECK_INVARIANTS": "0"}
    small = ("--num-gpu-blocks-override", "420", "--max-model-len", "2048")
    with ServerProcess(
        trace_path.with_name("log.txt"), *flags, *small, environment=environment
    ) as server:
        yield server


def _bench(server: ServerProcess, tmp_path: Path, *flags: str) -> dict[str, Any]:
    place = ("--result-dir", str(tmp_path), "--result-filename", "r.json", "--save-result")
    common = ("--base-url", server.url, "--ignore-eos", "--save-detailed", "--disable-tqdm")
    assert main(["bench", "serve", *common, *place, *flags]) == 0
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert result["failed"] == 0
    return result


def _explain(server: ServerProcess, request_id: str) -> httpx.Response:
    # A replay in a process of its own, which must load first.
    url = f"{server.url}/v1/cache/explain/{request_id}?remedies=false"
    return httpx.get(url, timeout=120)


_REPEAT = ("--dataset-name", "repeat", "--repeat-pool", "6", "--repeat-output-len", "6")


def test_live_equals_twin_request_by_request(
    recorded_server: ServerProcess, trace_path: Path, tmp_path: Path
) -> None:
    live: dict[str, int] = {}
    kept = recorded_server.post("/v1/cache/prefixes", {"tokens": [9] * 256, "ttl": 2.5}).json()
    for number, backend in enumerate(("openai", "openai-chat")):
        for input_len in ("120", "500"):
            result = _bench(
                recorded_server,
                tmp_path,
                *("--backend", backend, *_REPEAT, "--repeat-input-len", input_len),
                *("--num-prompts", "18", "--max-concurrency", "6", "--seed", str(number)),
                *("--request-id-prefix", f"{backend}-{input_len}-"),
            )
            assert result["output_lens"] == [6] * 18
            live |= dict(zip(result["request_ids"], result["cached_tokens"], strict=True))
        recorded_server.post("/reset_prefix_cache?reset_running_requests=true", {})
    assert sum(live.values())
    assert kept["num_tokens"] == 256
    assert recorded_server.get("/v1/cache/prefixes").status_code == 200
    some_id = max(live, key=lambda name: live[name])
    told = _explain(recorded_server, some_id).json()
    assert (told["request_id"], told["cached_tokens"]) == (some_id, live[some_id])
    assert _explain(recorded_server, "nobody").status_code == 404
    assert recorded_server.stop() == 0
    out = tmp_path / "per_request.jsonl"
    assert main(["cache", "simulate", str(trace_path), "--per-request", str(out), "--strict"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {row["request_id"]: row["cached_tokens"] for row in rows}
    assert {name: n for name, n in found.items() if not name.startswith("prefix-")} == live
