"""Decoding in processes of their own, so that no picture holds up a server's event loop.

    reader's thread --file, rules, sizes--> process --pixels, or what is wrong--> reader's thread

Much of what a picture goes through holds Python's lock: 40 million pixels with transparent parts
kept all threads of a process waiting for more than a second. And libraries that decode are written
in C and read what strangers send: where one ends its process, or goes on for ever, the picture is
refused and another process begins.

A process starts with the first picture, and ends with the pipe to its server. What it answers is
read as numbers and bytes, never as objects.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from vllm.exceptions import EngineError, UserInputError
from vllm.multimodal.decode import decode_image, resize
from vllm.multimodal.families import ImageSize
from vllm.utils.large_blocks import return_large_blocks

if TYPE_CHECKING:
    from vllm.multimodal.decode import DecodeRules
    from vllm.multimodal.families import SizeRule

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.multimodal.decode_process import main; main()"
)
# Lengths of what is asked: the rules, the file.
_ASKED = struct.Struct("<IQ")
# Of an answer: whether it is a picture, its width, height, rows and columns, the bytes that follow.
_ANSWER = struct.Struct("<BIIIIQ")
_MAX_ERROR_BYTES = 4096
_COLOURS = 3
# What a process says first: what fails before that is not a picture's doing.
_READY = b"R"
# A picture of the largest size takes a few seconds on a busy machine.
_TIMEOUT_S = 60
# What a library leaks goes with its process.
_MAX_PICTURES = 2_000


class DecodeProcesses:
    """A number of processes, each of which decodes one picture at a time.

    Owns: the processes.

    Args:
        count: How many there may be; each starts when it is needed.
        timeout_s: Seconds after which a picture is given up.
    """

    def __init__(self, count: int, timeout_s: float = _TIMEOUT_S) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all = [_Process(timeout_s) for _ in range(count)]
        for process in self._all:
            self._idle.put(process)
        self._finalizer = weakref.finalize(self, _end_all, self._all)

    def decode(self, data: bytes, rules: DecodeRules, sizes: SizeRule) -> tuple[bytes, ImageSize]:
        """Return a file's picture, resized: RGB row by row, and its size. Waits for a process.

        Raises:
            UserInputError: See ``decode_image``; or nothing decodes it.
            EngineError: No process starts.
        """
        process = self._idle.get()
        try:
            return process.decode(data, rules, sizes)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes; those of a program that ends are ended too."""
        self._finalizer()


class _Process:
    """Owns: one process, begun anew whenever it has ended."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._num_decoded = 0

    def decode(self, data: bytes, rules: DecodeRules, sizes: SizeRule) -> tuple[bytes, ImageSize]:
        """See ``DecodeProcesses.decode``."""
        child = self._find_child()
        self._num_decoded += 1
        assert child.stdin is not None
        assert child.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            head = pickle.dumps((rules, sizes))
            child.stdin.write(_ASKED.pack(len(head), len(data)) + head)
            child.stdin.write(data)
            child.stdin.flush()
            is_picture, *numbers, count = _ANSWER.unpack(_read(child.stdout, _ANSWER.size))
            most = _COLOURS * numbers[0] * numbers[1] if is_picture else _MAX_ERROR_BYTES
            if count > most:
                raise EOFError
            answer = _read(child.stdout, count)
        except BaseException as error:
            # An answer that was not read would be taken for the next picture's.
            self.end()
            if not isinstance(error, OSError | EOFError):
                raise
            why = (
                f"takes longer than {self._timeout_s:g} s"
                if is_late.is_set()
                else "ends its reader"
            )
            raise UserInputError(f"cannot be decoded: it {why}", "messages") from error
        finally:
            timer.cancel()
        if not is_picture:
            raise UserInputError(answer[:_MAX_ERROR_BYTES].decode(errors="replace"), "messages")
        return answer, ImageSize(*numbers)

    def _find_child(self) -> subprocess.Popen[bytes]:
        """Return a process that reads pictures.

        Raises:
            EngineError: None starts.
        """
        has_ended = self._child is not None and self._child.poll() is not None
        if has_ended or self._num_decoded >= _MAX_PICTURES:
            self.end()
        if self._child is None:
            child = self._child = _start()
            self._num_decoded = 0
            assert child.stdout is not None
            if child.stdout.read(len(_READY)) != _READY:
                self.end()
                raise EngineError(
                    "No process that decodes pictures can be started: the server's log says why."
                )
        return self._child

    def end(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close(pipe)


def _end_all(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.end()


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        # What was not written yet has nobody to go to.
        return


def _start() -> subprocess.Popen[bytes]:
    # One thread: what it does is not numpy's arithmetic.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _read(pipe: IO[bytes], count: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError: There are fewer.
    """
    data = pipe.read(count)
    if len(data) != count:
        raise EOFError
    return data


def main() -> None:
    """Decode what comes in until nothing does; of the process alone."""
    # Its server ends it, whoever else is told to stop: pictures are read until then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return_large_blocks()
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever a library prints is no answer.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    answers.write(_READY)
    answers.flush()
    while True:
        try:
            num_head, num_data = _ASKED.unpack(_read(asked, _ASKED.size))
            rules, sizes = pickle.loads(_read(asked, num_head))
            data = _read(asked, num_data)
        except EOFError:
            return
        try:
            pixels = decode_image(data, rules)
            size = sizes.fit(pixels.shape[1], pixels.shape[0])
            found = resize(pixels, size, sizes.resample).tobytes()
            numbers = (size.width, size.height, size.rows, size.columns)
            answers.write(_ANSWER.pack(1, *numbers, len(found)))
            answers.write(found)
        except UserInputError as error:
            text = str(error).encode()[:_MAX_ERROR_BYTES]
            answers.write(_ANSWER.pack(0, 0, 0, 0, 0, len(text)) + text)
        answers.flush()
