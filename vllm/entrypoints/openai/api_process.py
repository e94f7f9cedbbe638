"""One of several processes that answer HTTP for the same engine cores.

main thread    the web server, as when there is one
orders thread  reads what the keeper of the cores says; its end means that the keeper is gone
"""

import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from vllm.config import VllmConfig
from vllm.entrypoints.openai.metrics_exchange import MetricsExchange
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import VllmError
from vllm.logger import init_logger, setup_logging
from vllm.utils.collector import lasting_imports
from vllm.v1.engine.attached_core import AttachedCore
from vllm.v1.engine.channel import Endpoints
from vllm.v1.engine.launch import attach_engine_cores

logger = init_logger(__name__)

_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 16
_EXIT_STATUS_ORPHANED = 3


@dataclass(frozen=True, slots=True)
class ApiOrder:
    """Everything a server process needs to start; pickled into its stdin.

    Attributes:
        config: Of the engine, the hashes' seed included.
        listener: File descriptor of the listening socket, which all processes share.
        endpoints: Of this process, by data parallel rank.
        client: Number of this process, from 1.
        num_clients: How many there are.
        folder: Private, for the processes' own sockets.
        batch_lock: File descriptor that holds ``--batch-dir``; None: there are no batches.
    """

    config: VllmConfig
    args: ServerArgs
    listener: int
    endpoints: tuple[Endpoints, ...]
    client: int
    num_clients: int
    folder: str
    batch_lock: int | None = None

    def encode(self) -> bytes:
        """Return what :func:`main` reads."""
        data = pickle.dumps(self)
        return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class CoreFate(msgspec.Struct, frozen=True):
    """What the keeper says of a core, one JSON object a line.

    Attributes:
        rank: Which; None: all of them.
        reason: Why it died.
    """

    rank: int | None
    reason: str


def main() -> None:
    """Serve until the keeper says stop, or is gone."""
    # Raw reads: a buffered one in a thread would hold a lock that interpreter shutdown wants.
    length = int.from_bytes(_read_exactly(_LENGTH_BYTES), "big")
    order: ApiOrder = pickle.loads(_read_exactly(length))
    observability = order.config.observability_config
    setup_logging(
        f"(ApiServer_{order.client}) ",
        log_format=observability.log_format,
        config_file=observability.logging_config,
    )
    cores = [AttachedCore(endpoints, order.client) for endpoints in order.endpoints]
    threading.Thread(target=_take_orders, args=(cores,), name="orders", daemon=True).start()
    sys.exit(_serve(order, cores))


def _serve(order: ApiOrder, cores: Sequence[AttachedCore]) -> int:
    # Late: cores connect while this is imported.
    with lasting_imports():
        from vllm.entrypoints.batch.folder_lock import BatchSeat  # noqa: PLC0415
        from vllm.entrypoints.openai.http_server import HttpServer  # noqa: PLC0415
        from vllm.entrypoints.openai.peer_servers import PeerServers  # noqa: PLC0415

    exchange = MetricsExchange(order.folder, order.client, order.num_clients)
    peers = PeerServers(order.folder, order.client, order.num_clients)
    handle = attach_engine_cores(order.config, cores)
    with socket.socket(fileno=order.listener) as listener:
        try:
            return HttpServer(
                order.config,
                order.args,
                handle,
                listener,
                exchange=exchange,
                peers=peers,
                batch_seat=BatchSeat(works=order.client == 1, has_lock=True),
            ).run()
        except VllmError as error:
            # The keeper meets the same and tells it.
            logger.debug("This server process cannot start: %s", error)
            return 1
        finally:
            handle.shutdown()


def _take_orders(cores: Sequence[AttachedCore]) -> None:
    for line in _read_lines():
        fate = msgspec.json.decode(line, type=CoreFate)
        concerned = cores if fate.rank is None else [cores[fate.rank]]
        for core in concerned:
            core.note_lost(fate.reason, is_final=fate.rank is None)
    os._exit(_EXIT_STATUS_ORPHANED)


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            sys.exit(_EXIT_STATUS_ORPHANED)
        data += chunk
    return data


def _read_lines() -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(0, _CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
