"""How long a server takes to turn away ten thousand requests of rubbish, and whether it survives.

    python -m benchmarks.rubbish [--requests 10000] [--streams 32] [--seed 1] [--url URL]

Starts a server on the embedded checkpoint (or takes the one at --url), sends it what
``rubbish_requests`` makes, and prints one JSON line. Exit code 1: an answer of 500 or above other
than 503, an answer that took longer than --limit seconds, or a server that is not healthy and idle
afterwards.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.result import percentiles, print_result
from benchmarks.rubbish_requests import Rubbish, RubbishMaker

_READ_BYTES = 65_536
_NO_ANSWER = "none"


@dataclass(slots=True)
class Tally:
    """What came back.

    Attributes:
        faults: Requests that were answered wrongly, told in words.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, rubbish: Rubbish, status: str, seconds: float) -> None:
        """Count one answer."""
        self.statuses[status] += 1
        self.kinds[rubbish.kind] += 1
        self.seconds.append(seconds)
        self.slowest[rubbish.kind] = max(seconds, self.slowest.get(rubbish.kind, 0.0))
        if status == "late" or (status.isdigit() and int(status) >= 500 and status != "503"):
            self.faults.append(f"{status}: {rubbish.kind}: {rubbish.data[:2000]!r}")


async def send(host: str, port: int, rubbish: Rubbish) -> str:
    """Write one request; return the status of its answer, or "none"."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return "refused"
    status = _NO_ANSWER
    # A server may well close on what is no HTTP, before it has read all of it.
    with contextlib.suppress(ConnectionError):
        writer.write(rubbish.data)
        await writer.drain()
        first = b"" if rubbish.kind == "raw" else await reader.readline()
        parts = first.split()
        if len(parts) > 1 and parts[1].isdigit():
            status = parts[1].decode()
        while not rubbish.leaves and await reader.read(_READ_BYTES):
            pass
    writer.close()
    return status


async def send_all(
    url: str, num_requests: int, num_streams: int, seed: int, limit_s: float = 60.0
) -> Tally:
    """Send rubbish to a server, many at a time."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    host, port = parts.hostname, parts.port
    async with httpx.AsyncClient() as client:
        schema = (await client.get(url + "/openapi.json")).json()
    maker, tally = RubbishMaker(schema, seed), Tally()
    rest = iter(range(num_requests))

    async def work() -> None:
        for _ in rest:
            rubbish = maker.make()
            begin = time.monotonic()
            try:
                async with asyncio.timeout(limit_s):
                    status = await send(host, port, rubbish)
            except TimeoutError:
                status = "late"
            tally.add(rubbish, status, time.monotonic() - begin)

    await asyncio.gather(*(work() for _ in range(num_streams)))
    return tally


def find_unrest(url: str, limit_s: float = 30.0) -> list[str]:
    """Return what keeps a server from being healthy and idle; waits a while for it."""
    names = (
        "vllm:num_requests_running{",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
    )
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if httpx.get(url + "/health", timeout=limit_s).status_code != 200:
                return ["the server is not healthy"]
            lines = httpx.get(url + "/metrics", timeout=limit_s).text.splitlines()
        except httpx.HTTPError as error:
            return [f"the server does not answer: {error!r}"]
        busy = [x for x in lines if x.startswith(names) and float(x.rsplit(" ", 1)[1])]
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(0.1)


def main() -> int:
    """Send rubbish, print one JSON line; return 1 when the server did wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--url", help="Of a server that runs; default: one is started.")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log.txt"
            # A short context bounds what the few requests cost that are no rubbish after all.
            flags = ("deepseek-v4", "--max-model-len", "2048", "--disable-uvicorn-access-log")
            url = stack.enter_context(LiveServer(log, *flags)).url
        begin = time.monotonic()
        tally = asyncio.run(send_all(url, args.requests, args.streams, args.seed, args.limit))
        seconds = time.monotonic() - begin
        tally.faults += find_unrest(url)
        if args.url is None and (found := log.read_text().find("Traceback")) >= 0:
            tally.faults.append("the log has a traceback")
            print(log.read_text()[max(0, found - 500) : found + 10_000], file=sys.stderr)
    for fault in tally.faults[:20]:
        print(fault, file=sys.stderr)
    config = {"requests": args.requests, "streams": args.streams, "seed": args.seed}
    values = {
        "seconds": round(seconds, 1),
        "requests_per_second": round(args.requests / seconds, 1),
        "seconds_per_request": {**percentiles(tally.seconds), "max": round(max(tally.seconds), 3)},
        "slowest": {kind: round(longest, 2) for kind, longest in sorted(tally.slowest.items())},
        "statuses": dict(sorted(tally.statuses.items())),
        "kinds": dict(sorted(tally.kinds.items())),
        "faults": len(tally.faults),
    }
    print_result("rubbish", config, values)
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
