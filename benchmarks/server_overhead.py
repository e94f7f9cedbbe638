"""What the HTTP server adds to the engine's time for an output token.

    python -m benchmarks.server_overhead [--streams 1 32 128] [--tokens 64] [--schema]

For each number of streams, twice the same work: by ``AsyncLLM`` alone (token ids, no text), and by
``vllm serve`` with a client that only counts events. Both run the model in a process of its own, so
the difference is what detokenising, streaming, HTTP and the client cost. Also the processor time of
the server process per token, which other work on the machine disturbs less. With ``--schema`` every
answer follows a JSON schema, the engine's own ones too. One JSON line for each number of streams.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result
from vllm import EngineArgs, SamplingParams
from vllm.config.speculative import NO_DRAFTS
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

_MODEL = "deepseek-v4"
_PROMPT_TOKENS = 32
# Long enough never to end by itself.
_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}


def make_prompts(num_streams: int) -> list[list[int]]:
    """Return prompts that share nothing, so that no stream waits for another's prefix."""
    return [
        [500 + i] + [300 + (7 * i + k) % 900 for k in range(_PROMPT_TOKENS)]
        for i in range(num_streams)
    ]


async def run_engine(num_streams: int, num_tokens: int, with_schema: bool) -> float:
    """Return seconds between the first and the last token of all streams, by the engine alone."""
    engine = AsyncLLM.from_engine_args(
        EngineArgs(_MODEL, block_size=32, speculative_config=dict(NO_DRAFTS))
    )
    params = SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        temperature=0,
        structured_outputs=StructuredOutputsParams(json=_SCHEMA) if with_schema else None,
    )
    try:
        await asyncio.gather(
            *(_drain(engine, f"warm{i}", p, params) for i, p in enumerate(make_prompts(1)))
        )
        spans = await asyncio.gather(
            *(_drain(engine, f"r{i}", p, params) for i, p in enumerate(make_prompts(num_streams)))
        )
    finally:
        engine.shutdown()
    return max(last for _, last in spans) - min(first for first, _ in spans)


async def _drain(
    engine: AsyncLLM, request_id: str, prompt: list[int], params: SamplingParams
) -> tuple[float, float]:
    """Read one answer; return when its first and its last output came."""
    first = last = 0.0
    tokens = TokensPrompt(prompt_token_ids=prompt)
    async for _ in engine.generate(tokens, params, request_id):
        last = time.monotonic()
        first = first or last
    return first, last


async def run_server(port: int, num_streams: int, num_tokens: int, with_schema: bool) -> float:
    """Return the same span, as clients of a server see it."""
    further: dict[str, Any] = {"structured_outputs": {"json": _SCHEMA}} if with_schema else {}
    bodies = [
        {
            "prompt": p,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            **further,
        }
        for p in make_prompts(num_streams)
    ]
    spans = await asyncio.gather(*(_stream(port, body) for body in bodies))
    return max(last for _, last in spans) - min(first for first, _ in spans)


async def _stream(port: int, body: dict[str, Any]) -> tuple[float, float]:
    """Read one stream as bytes: a client that parsed them would measure itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    first = last = 0.0
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode())
    while piece := await reader.read(65_536):
        if b"data: {" in piece:
            last = time.monotonic()
            first = first or last
    writer.close()
    return first, last


def measure(num_streams: int, num_tokens: int, runs: int, with_schema: bool) -> dict[str, Any]:
    """Return microseconds per output token, medians over some runs."""
    num_later = num_streams * (num_tokens - 1)
    engine_s = [asyncio.run(run_engine(num_streams, num_tokens, with_schema)) for _ in range(runs)]
    server_s, cpu_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        drafts = ("--speculative-config", json.dumps(dict(NO_DRAFTS)))
        flags = (_MODEL, "--block-size", "32", "--disable-uvicorn-access-log", *drafts)
        with LiveServer(Path(folder) / "log.txt", *flags) as server:
            process = psutil.Process(server.process.pid)
            asyncio.run(run_server(server.port, 1, num_tokens, with_schema))
            for _ in range(runs):
                before = process.cpu_times()
                server_s.append(
                    asyncio.run(run_server(server.port, num_streams, num_tokens, with_schema))
                )
                after = process.cpu_times()
                cpu_s.append(after.user + after.system - before.user - before.system)
    engine_us = statistics.median(engine_s) / num_later * 1e6
    server_us = statistics.median(server_s) / num_later * 1e6
    return {
        "engine_us_per_token": round(engine_us, 1),
        "server_us_per_token": round(server_us, 1),
        "beyond_engine_us_per_token": round(server_us - engine_us, 1),
        "ratio": round(server_us / engine_us, 3),
        "server_cpu_us_per_token": round(
            statistics.median(cpu_s) / (num_streams * num_tokens) * 1e6, 1
        ),
    }


def main() -> None:
    """Measure every number of streams and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--schema", action="store_true", help="Answers follow a JSON schema.")
    args = parser.parse_args()
    for num_streams in args.streams:
        config = {"streams": num_streams, "tokens": args.tokens, "schema": args.schema}
        values = measure(num_streams, args.tokens, args.runs, args.schema)
        print_result("server_overhead", {**config, "runs": args.runs}, values)


if __name__ == "__main__":
    main()
