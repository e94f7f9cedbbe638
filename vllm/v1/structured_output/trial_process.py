"""The child of ``trial``: compiles what it is told to, within limits that the system keeps."""

import resource
import signal
import sys
from pathlib import Path

import msgspec
import psutil

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.backend import Backend
from vllm.v1.structured_output.trial import (
    CPU_S,
    MEMORY_BYTES,
    TrialOrder,
    TrialVerdict,
    read_message,
    write_message,
)


def main() -> None:
    """Serve until the parent is gone."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(source)
    if first is None:
        return
    order = msgspec.msgpack.decode(first, type=TrialOrder)
    tokenizer = Tokenizer.from_folder(Path(order.tokenizer_path))
    backend = Backend(tokenizer, order.vocab_size, frozenset(order.end_ids))
    _limit_memory()
    write_message(sink, msgspec.msgpack.encode(TrialVerdict()))
    while (data := read_message(source)) is not None:
        params = msgspec.msgpack.decode(data, type=StructuredOutputsParams)
        write_message(sink, msgspec.msgpack.encode(_try(backend, params)))


def _limit_memory() -> None:
    """Allow so much beyond what the vocabulary takes."""
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try(backend: Backend, params: StructuredOutputsParams) -> TrialVerdict:
    # The default action of this signal ends the process, whatever it is at.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        backend.check(params)
    except UserInputError as error:
        return TrialVerdict(str(error), error.param or "structured_outputs")
    except MemoryError:
        return TrialVerdict(f"structured_outputs.{params.kind}: compiling takes too much memory.")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return TrialVerdict()
