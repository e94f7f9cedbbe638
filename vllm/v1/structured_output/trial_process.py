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
from vllm.v1.structured_output.trial_walk import WALK_CPU_S, may_run_on, walk


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
        verdict = _try(backend, params, order.vocab_size)
        write_message(sink, msgspec.msgpack.encode(verdict))


def _limit_memory() -> None:
    """Allow so much beyond what the vocabulary takes."""
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try(backend: Backend, params: StructuredOutputsParams, vocab_size: int) -> TrialVerdict:
    # The default action of this signal ends the process, whatever it is at.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        matcher = backend.check(params)
        if may_run_on(params):
            signal.setitimer(signal.ITIMER_PROF, WALK_CPU_S)
            walk(matcher, vocab_size)
    except UserInputError as error:
        return TrialVerdict(str(error), error.param or "structured_outputs")
    except MemoryError:
        return TrialVerdict(f"structured_outputs.{params.kind}: compiling takes too much memory.")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return TrialVerdict()
