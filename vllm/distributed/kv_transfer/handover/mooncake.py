"""Rows by the Mooncake transfer engine (PyPI ``mooncake-transfer-engine``): TCP or RDMA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm.distributed.kv_transfer.handover.connector import TcpConnector
from vllm.distributed.kv_transfer.handover.direct import DataPlane
from vllm.distributed.kv_transfer.handover.frames import Buffer, FrameError
from vllm.distributed.kv_transfer.handover.host_memory import HostMemory
from vllm.distributed.kv_transfer.handover.serving import RowMemory
from vllm.distributed.kv_transfer.handover.settings import HandoverSettings
from vllm.exceptions import ConfigError

NAME = "mooncake"
_PACKAGE = "mooncake-transfer-engine (mooncake-transfer-engine-non-cuda where there is no CUDA)"


def check_package() -> None:
    """Refuse to start without the package.

    Raises:
        ConfigError: It is not installed, or cannot be loaded here.
    """
    _load_engine_class()


def _load_engine_class() -> Any:
    if find_spec("mooncake") is None:
        raise ConfigError(f"MooncakeConnector needs {_PACKAGE}: install it, or use TcpConnector.")
    try:
        return import_module("mooncake.engine").TransferEngine
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"MooncakeConnector: the Mooncake transfer engine cannot be loaded ({error}): it needs "
            "the libraries libibverbs1, librdmacm1, libnl-3-200, libnl-route-3-200 and libnuma1."
        ) from error


class MooncakeEngine:
    """Both sides of one worker: writes its pool to others, has a buffer for what others write.

    Args:
        settings: Address, protocol, device and the buffer's size.
        memory: The pool whose rows are written.

    Raises:
        ConfigError: The package is missing, or refuses the address or the memory.

    Owns: the transfer engine, the buffer.
    """

    def __init__(self, settings: HandoverSettings, memory: HostMemory) -> None:
        self._engine = _load_engine_class()()
        mooncake = settings.mooncake
        failed = self._engine.initialize(
            settings.host, "P2PHANDSHAKE", mooncake.protocol, mooncake.device_name
        )
        if failed:
            raise ConfigError(
                f"The Mooncake transfer engine does not start on {settings.host} with protocol "
                f"{mooncake.protocol!r} (code {failed})."
            )
        self._session = f"{settings.host}:{self._engine.get_rpc_port()}"
        self._buffer = ctypes.create_string_buffer(mooncake.buffer_bytes)
        self._register(ctypes.addressof(self._buffer), mooncake.buffer_bytes)
        for pool in memory.pools:
            self._register(_address_of(pool), pool.nbytes)

    def _register(self, address: int, num_bytes: int) -> None:
        if failed := self._engine.register_memory(address, num_bytes):
            raise ConfigError(
                f"The Mooncake transfer engine cannot register {num_bytes} bytes (code {failed}): "
                "raise the limit of locked memory (ulimit -l), or use protocol tcp."
            )

    @property
    def session(self) -> str:
        """What other engines call this one's memory."""
        return self._session

    @property
    def address(self) -> int:
        """Where the buffer begins."""
        return ctypes.addressof(self._buffer)

    @property
    def capacity(self) -> int:
        """Bytes of the buffer."""
        return ctypes.sizeof(self._buffer)

    def read(self, offset: int, length: int) -> bytes:
        """Return a copy of what is in the buffer now."""
        return ctypes.string_at(self.address + offset, length)

    def write(self, session: str, address: int, pieces: Sequence[Buffer]) -> None:
        """Write rows of the pool into another engine's buffer.

        Raises:
            FrameError: The transfer failed.
        """
        sources, targets, lengths = [], [], []
        for piece in pieces:
            view = memoryview(piece)
            sources.append(_address_of(view))
            targets.append(address)
            lengths.append(view.nbytes)
            address += view.nbytes
        failed = self._engine.batch_transfer_sync_write(session, sources, targets, lengths)
        if failed:
            raise FrameError(f"Mooncake cannot write to {session} (code {failed})")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class MooncakeConnector(TcpConnector):
    """Hands prefixes over by TCP frames, their rows by the Mooncake transfer engine."""

    @classmethod
    def check_before_load(cls, vllm_config: Any) -> None:
        """Check the package, the settings, and that the port is free.

        Raises:
            ConfigError: One is wrong or missing.
        """
        check_package()
        super().check_before_load(vllm_config)

    def _make_data_plane(self, memory: RowMemory) -> DataPlane | None:
        if not isinstance(memory, HostMemory):
            raise ConfigError(
                "MooncakeConnector reads pools in host memory only: use TcpConnector."
            )
        engine = MooncakeEngine(self._settings, memory)
        return DataPlane(NAME, engine, engine)
