"""Compiles a grammar in a process that may die of it, before the engine does.

The library's own limits do not bound all that it does: a schema of a hundred bytes can make it take
all memory. So each new grammar is tried in a child first, whose processor time and memory the
system limits. What the child survives, the engine's own threads compile again.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams

CPU_S = 3.0
MEMORY_BYTES = 1 << 30
# For a machine that is busy with other things; the child's processor time ends it before.
_WALL_S = 60.0
_LENGTH_BYTES = 8
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.v1.structured_output.trial_process import main; main()"
)


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """What a child needs: the tokenizer's folder, the vocabulary's size, the end tokens."""

    tokenizer_path: str
    vocab_size: int
    end_ids: list[int]


class TrialVerdict(msgspec.Struct, frozen=True):
    """What the child says; ``error`` is empty for a grammar that compiles, ``param`` its field."""

    error: str = ""
    param: str = "structured_outputs"


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Write one message with its length before it."""
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Read one message; None: the other side is gone."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = stream.read(size)
    return data if len(data) == size else None


class TrialProcess:
    """One child, started when it is needed; one thread at a time may use it.

    Owns: the process.

    Args:
        order: Its vocabulary.
    """

    def __init__(self, order: TrialOrder) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, params: StructuredOutputsParams) -> None:
        """Try a grammar.

        Raises:
            UserInputError: It is no grammar, or the child died of it.
        """
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._process = self._start()
        reply = self._ask(self._process, msgspec.msgpack.encode(params))
        if reply is None:
            self.stop()
            raise UserInputError(
                f"structured_outputs.{params.kind}: compiling takes more than {CPU_S:g} s or "
                f"{MEMORY_BYTES >> 20} MiB, make it smaller or simpler. A lexeme takes all it can: "
                'nothing comes to the second part of /a+/ "a".',
                "structured_outputs",
            )
        verdict = msgspec.msgpack.decode(reply, type=TrialVerdict)
        if verdict.error:
            raise UserInputError(verdict.error, verdict.param)

    def kill(self) -> None:
        """End the child from another thread; a check under way fails."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                # What a child that is gone has not taken is written once more, in vain.
                with suppress(BrokenPipeError):
                    stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What a dying allocator says is for nobody.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._ask(process, msgspec.msgpack.encode(self._order))
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], data: bytes) -> bytes | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, data)
            readable, _, _ = select.select([process.stdout], [], [], _WALL_S)
            return read_message(process.stdout) if readable else None
        except (BrokenPipeError, ValueError):
            return None
