"""What a library would cost where the tree has code of its own (ADR 7).

    pip install --no-deps --target /tmp/extra sse-starlette    # not a dependency
    PYTHONPATH=/tmp/extra python -m benchmarks.own_or_library sse
    python -m benchmarks.own_or_library metrics
    python -m benchmarks.own_or_library wire

``sse``: an event stream's processor time for an event and for a stream, by ``EventStreamResponse``
(with and without the middleware of ``--sse-keep-alive-interval``) and by sse-starlette.
``metrics``: one counter and one histogram moved, in memory and in prometheus_client's multi-process
mode, and a scrape of four processes.
``wire``: rows of one block after the other from one process to another, by the handover's sockets
and by pyzmq without copies, and how soon the puller hears that the holder was killed.

Ways take turns, figures are medians of the turns. One JSON line each.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import zmq
from starlette.types import Message, Scope

from benchmarks.result import print_result
from vllm.distributed.kv_transfer.handover.frames import HEAD_BYTES, Head, Kind
from vllm.distributed.kv_transfer.handover.sockets import (
    PeerClosedError,
    receive,
    receive_into,
    send,
    set_options,
)
from vllm.entrypoints.openai.disconnect import EventStreamResponse
from vllm.entrypoints.openai.keep_alive import KeepAliveMiddleware

_EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" token"}]}\n\n'
_KEEP_ALIVE_S = 15.0
# A block of DeepSeek-V4-Flash's pool.
_BLOCK_BYTES = 775_488
_DIGEST = bytes(8)


# ---- event streams ---------------------------------------------------------------------------


async def _events(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield _EVENT
        await asyncio.sleep(0)  # as a token that another step brings


async def _ignore(_: Message) -> None:
    return None


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _closed() -> None:
    return None


async def _own(count: int, scope: Scope) -> None:
    await EventStreamResponse(_events(count), _closed, "bench")(scope, _never, _ignore)


async def _own_kept_alive(count: int, scope: Scope) -> None:
    response = EventStreamResponse(_events(count), _closed, "bench")
    await KeepAliveMiddleware(response, interval_s=_KEEP_ALIVE_S)(scope, _never, _ignore)


async def _library(count: int, scope: Scope) -> None:
    from sse_starlette import EventSourceResponse  # noqa: PLC0415  # installed for this alone

    await EventSourceResponse(_events(count), ping=int(_KEEP_ALIVE_S))(scope, _never, _ignore)


def measure_sse(num_streams: int, num_events: int, turns: int) -> dict[str, Any]:
    """Return microseconds of processor time for an event, and for a stream of one event."""
    ways = {"own": _own, "own with keep-alive": _own_kept_alive, "sse-starlette": _library}
    scope = {"type": "http", "method": "POST", "headers": [], "state": {}}

    async def spend(way: Callable[[int, Scope], Awaitable[None]], count: int) -> float:
        began = time.process_time()
        await asyncio.gather(*(way(count, dict(scope)) for _ in range(num_streams)))
        return (time.process_time() - began) / num_streams * 1e6

    async def measure() -> dict[str, Any]:
        events: dict[str, list[float]] = {name: [] for name in ways}
        streams: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                one = await spend(way, 1)
                streams[name].append(one)
                events[name].append((await spend(way, num_events + 1) - one) / num_events)
        return {
            "streams": num_streams,
            "event_us": {n: round(statistics.median(v), 2) for n, v in events.items()},
            "stream_us": {n: round(statistics.median(v), 1) for n, v in streams.items()},
        }

    return asyncio.run(measure())


# ---- metrics ---------------------------------------------------------------------------------

_METRICS = """
import sys, time
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
from vllm.v1.metrics.prometheus import ITL_BUCKETS
registry = CollectorRegistry()
counter = Counter("tokens", "Tokens.", ["model"], registry=registry).labels("m")
times = Histogram("itl", "Seconds.", ["model"], buckets=ITL_BUCKETS, registry=registry).labels("m")
others = [Counter(f"c{i}", "Of a server.", ["model"], registry=registry) for i in range(60)]
more = [
    Histogram(f"h{i}", "Of a server.", ["model"], buckets=ITL_BUCKETS, registry=registry)
    for i in range(15)
]
for metric in others: metric.labels("m").inc()
for metric in more: metric.labels("m").observe(0.01)
N = 50_000
began = time.process_time()
for _ in range(N): counter.inc()
inc = time.process_time() - began
began = time.process_time()
for _ in range(N): times.observe(0.01)
observe = time.process_time() - began
print(inc / N * 1e6, observe / N * 1e6)
sys.stdout.flush()
sys.stdin.readline()
began = time.process_time()
for _ in range(5):
    if sys.argv[1] == "files":
        whole = CollectorRegistry()
        multiprocess.MultiProcessCollector(whole)
        text = generate_latest(whole)
    else:
        from vllm.entrypoints.openai.metrics_exchange import merge_metrics
        text = merge_metrics([generate_latest(registry) for _ in range(4)])
print((time.process_time() - began) / 5 * 1e3)
"""


def measure_metrics(turns: int, num_processes: int = 4) -> dict[str, Any]:
    """Return microseconds of an increment and an observation, milliseconds of a scrape."""
    found: dict[str, list[list[float]]] = {"memory": [], "files": []}
    for _ in range(turns):
        for way, results in found.items():
            with tempfile.TemporaryDirectory() as folder:
                environment = dict(os.environ)
                if way == "files":
                    environment["PROMETHEUS_MULTIPROC_DIR"] = folder
                processes = [
                    subprocess.Popen(
                        [sys.executable, "-c", _METRICS, way],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    for _ in range(num_processes)
                ]
                firsts = [_line_of(process) for process in processes]
                assert processes[0].stdin is not None
                processes[0].stdin.write("\n")
                processes[0].stdin.flush()
                scrape = _line_of(processes[0])
                for process in processes:
                    process.communicate("\n")
            results.append([*firsts[0], *scrape])
    names = ("inc_us", "observe_us", "scrape_ms")
    return {
        way: {
            n: round(statistics.median(column), 3)
            for n, column in zip(names, zip(*rows, strict=True), strict=True)
        }
        for way, rows in found.items()
    }


def _line_of(process: "subprocess.Popen[str]") -> list[float]:
    assert process.stdout is not None
    return [float(number) for number in process.stdout.readline().split()]


# ---- the handover's wire ---------------------------------------------------------------------


def _hold_sockets(pipe: Connection, num_blocks: int) -> None:
    pool = memoryview(bytearray(_BLOCK_BYTES * 8))
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    set_options(connection)
    for i in range(num_blocks):
        place = i % 8 * _BLOCK_BYTES
        rows = pool[place : place + _BLOCK_BYTES]
        send(connection, [Head(Kind.ROWS, 1, i, _BLOCK_BYTES, _DIGEST).pack(), rows])
    pipe.send(time.process_time())
    time.sleep(600)


def _pull_sockets(port: int, pool: memoryview, num_blocks: int) -> Callable[[], None]:
    connection = socket.create_connection(("127.0.0.1", port))
    set_options(connection)
    left_s = _left(60.0)
    for i in range(num_blocks):
        Head.unpack(receive(connection, HEAD_BYTES, left_s))
        place = i % 8 * _BLOCK_BYTES
        receive_into(connection, [pool[place : place + _BLOCK_BYTES]], left_s)

    def wait_for_the_end() -> None:
        try:
            receive(connection, 1, left_s)
        except (PeerClosedError, ConnectionResetError):
            connection.close()

    return wait_for_the_end


def _left(seconds: float) -> Callable[[float], float]:
    return lambda last: last + seconds - time.monotonic()


def _hold_zmq(pipe: Connection, num_blocks: int) -> None:
    pool = memoryview(bytearray(_BLOCK_BYTES * 8))
    context = zmq.Context()
    # A pair blocks when the other side does not read; a ROUTER would drop what is too much.
    holder = context.socket(zmq.PAIR)
    holder.setsockopt(zmq.SNDHWM, 8)
    pipe.send(holder.bind_to_random_port("tcp://127.0.0.1"))
    holder.recv()
    for i in range(num_blocks):
        place = i % 8 * _BLOCK_BYTES
        rows = pool[place : place + _BLOCK_BYTES]
        head = Head(Kind.ROWS, 1, i, _BLOCK_BYTES, _DIGEST).pack()
        holder.send_multipart([head, rows], copy=False)
    pipe.send(time.process_time())
    time.sleep(600)


def _pull_zmq(port: int, pool: memoryview, num_blocks: int) -> Callable[[], None]:
    context = zmq.Context.instance()
    puller = context.socket(zmq.PAIR)
    puller.setsockopt(zmq.RCVHWM, 8)
    puller.setsockopt(zmq.LINGER, 0)
    monitor = puller.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    puller.connect(f"tcp://127.0.0.1:{port}")
    puller.send(b"pull")
    for i in range(num_blocks):
        Head.unpack(puller.recv())
        place = i % 8 * _BLOCK_BYTES
        puller.recv_into(pool[place : place + _BLOCK_BYTES])

    def wait_for_the_end() -> None:
        monitor.recv_multipart()
        puller.disable_monitor()
        puller.close()

    return wait_for_the_end


def measure_wire(turns: int, num_blocks: int) -> dict[str, Any]:
    """Return GB/s, processor seconds of a gigabyte, and milliseconds to hear of a kill."""
    ways: dict[str, Sequence[Any]] = {
        "sockets": (_hold_sockets, _pull_sockets),
        "pyzmq": (_hold_zmq, _pull_zmq),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    pool = memoryview(bytearray(_BLOCK_BYTES * 8))
    spawn = multiprocessing.get_context("spawn")
    gigabytes = num_blocks * _BLOCK_BYTES / 1e9
    for _ in range(turns):
        for name, (hold, pull) in ways.items():
            here, there = spawn.Pipe()
            holder = spawn.Process(target=hold, args=(there, num_blocks), daemon=True)
            holder.start()
            port = here.recv()
            began, spent = time.monotonic(), time.process_time()
            wait_for_the_end = pull(port, pool, num_blocks)
            wall, spent = time.monotonic() - began, time.process_time() - spent
            holders = here.recv()
            holder.kill()
            killed = time.monotonic()
            wait_for_the_end()
            heard = time.monotonic() - killed
            found[name].append([gigabytes / wall, (spent + holders) / gigabytes, heard * 1e3])
            holder.join()
    names = ("gb_per_s", "cpu_s_per_gb", "killed_heard_ms")
    return {
        "blocks": num_blocks,
        **{
            way: {
                n: round(statistics.median(column), 3)
                for n, column in zip(names, zip(*rows, strict=True), strict=True)
            }
            for way, rows in found.items()
        },
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sse", "metrics", "wire"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--events", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1000)
    args = parser.parse_args()
    if args.what == "sse":
        figures = measure_sse(args.streams, args.events, args.turns)
    elif args.what == "metrics":
        figures = measure_metrics(args.turns)
    else:
        figures = measure_wire(args.turns, args.blocks)
    print_result("own_or_library", {"what": args.what, "turns": args.turns}, figures)


if __name__ == "__main__":
    main()
