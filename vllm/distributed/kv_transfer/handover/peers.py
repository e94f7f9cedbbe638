"""Comparing this engine with the holders it was told of, when it starts."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from vllm.distributed.kv_transfer.handover.frames import FrameError, Kind
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.tcp import exchange_hello
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_TIMEOUT_S = 2.0


class PeerCheck:
    """Greets holders.

    A holder that is not up yet is no fault: engines start in any order, and it is compared with
    when the first prefix comes from it.

    Args:
        me: This engine.
        peers: (host, port) of holders.
    """

    def __init__(self, me: Hello, peers: Sequence[tuple[str, int]]) -> None:
        self._me = me
        self._peers = peers

    def run(self) -> None:
        """Greet every holder.

        Raises:
            ConfigError: One that is up does not match; the message names both sides' values.
        """
        for host, port in self._peers:
            try:
                with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
                    kind, reason = exchange_hello(connection, self._me, _TIMEOUT_S)
            except (OSError, FrameError) as error:
                logger.warning(
                    "KV transfer peer %s:%d cannot be compared with yet (%s): it will be when the "
                    "first prefix comes from it.",
                    host,
                    port,
                    error,
                )
                continue
            if kind is Kind.REFUSE:
                raise ConfigError(f"kv-transfer-config peer {host}:{port}: {reason}.")
            logger.info("KV transfer peer %s:%d matches.", host, port)
