"""Metrics of several server processes as one: each tells its own, who is asked adds them up."""

import asyncio
import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest

from vllm.exceptions import EngineError
from vllm.logger import init_logger

logger = init_logger(__name__)

# A peer that hangs must not hang a scrape.
_PEER_TIMEOUT_S = 5.0
_SUMMED = ("counter", "histogram", "summary")
# Every process counts these in full.
_SAME_EVERYWHERE = frozenset({"vllm:engine_core_deaths_total"})


class MetricsExchange:
    """Tells this process's metrics to its peers, and asks for theirs, over Unix sockets.

    Owns: this process's socket in the private folder.

    Args:
        folder: Where the sockets are; only this user may enter it.
        client: Number of this process, from 1.
        num_clients: How many there are.
    """

    def __init__(self, folder: str, client: int, num_clients: int) -> None:
        self._paths = [os.path.join(folder, f"metrics{i + 1}") for i in range(num_clients)]
        self._own = client - 1
        self._registry: CollectorRegistry | None = None
        self._server: asyncio.Server | None = None

    async def start(self, registry: CollectorRegistry) -> None:
        """Tell the metrics of a registry to whoever asks, from now on."""
        self._registry = registry
        self._server = await asyncio.start_unix_server(self._tell, self._paths[self._own])

    def stop(self) -> None:
        """Tell nobody any more."""
        if self._server is not None:
            self._server.close()

    async def _tell(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._registry is not None
        try:
            writer.write(generate_latest(self._registry))
            await writer.drain()
        except ConnectionError:
            logger.debug("A peer left before it had read the metrics.")
        finally:
            writer.close()

    async def collect(self) -> bytes:
        """Return the metrics of all processes as one.

        Raises:
            EngineError: A process does not answer: sums without it would go back and forth.
        """
        assert self._registry is not None
        own = generate_latest(self._registry)
        others = [path for i, path in enumerate(self._paths) if i != self._own]
        try:
            async with asyncio.timeout(_PEER_TIMEOUT_S):
                told = await asyncio.gather(*map(_ask, others))
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"Another API server process does not tell its metrics ({error!r}): ask again."
            ) from error
        return merge_metrics([own, *told])


async def _ask(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return await reader.read()
    finally:
        writer.close()


def merge_metrics(texts: Iterable[bytes]) -> bytes:
    """Return one exposition of several: counts are added, of gauges the largest counts.

    Only one process hears of the scheduler's gauges; in the others they are 0.
    """
    kinds: dict[str, str] = {}
    heads: dict[str, list[str]] = {}
    values: dict[str, dict[str, float]] = {}
    for text in texts:
        name = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                _, word, name, rest = line.split(" ", 3)
                if word == "TYPE":
                    kinds[name] = rest
                if line not in heads.setdefault(name, []):
                    heads[name].append(line)
                continue
            series, _, value = line.rpartition(" ")
            known = values.setdefault(name, {})
            known[series] = _combine(kinds[name], series, known.get(series), float(value))
    lines: list[str] = []
    for name, head in heads.items():
        lines += head
        lines += [f"{series} {value!r}" for series, value in values.get(name, {}).items()]
    return "\n".join([*lines, ""]).encode()


def _combine(kind: str, series: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    name = series.partition("{")[0]
    if name.endswith("_created"):
        return min(known, value)
    if kind in _SUMMED and name not in _SAME_EVERYWHERE:
        return known + value
    return max(known, value)
