"""Prefill apart from decode between engines of two ranks each: the tokens of one process."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.v1.engine.test_cache_keeps_outputs import Session
from tests.v1.engine.test_handover import Pair, check_answers, config_of
from tests.v1.executor.rank_engines import LentRanks
from vllm.distributed.kv_transfer.handover.sockets import close, listen
from vllm.exceptions import ConfigError
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.process_ranks import ProcessRanks
from vllm.v1.executor.ranked_executor import RankedExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.slow

_MTP = {"method": "mtp", "num_speculative_tokens": 2}
_SIZES = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 1024, "block_size": 32}
_NUM_RANKS = 2


@pytest.fixture(scope="module")
def groups() -> Iterator[list[ProcessRanks]]:
    """Two times two ranks that every test here uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_ASCEND_REFERENCE", "0")
        processes = [ProcessRanks(_NUM_RANKS, 120.0) for _ in range(2)]
    yield processes
    for ranks in processes:
        ranks.close()


def make_core(ranks: LentRanks | None, transfer: Any, **arguments: Any) -> EngineCore:
    """An engine of one process, or over ranks."""
    if ranks is not None:
        arguments["tensor_parallel_size"] = _NUM_RANKS
    config = EngineArgs(**(_SIZES | arguments)).create_vllm_config()
    config.kv_transfer_config = transfer
    make: Any = UniProcExecutor
    if ranks is not None:
        make = partial(RankedExecutor, start_ranks=lambda _: ranks)
    return EngineCore(config, make)


class RankedPair(Pair):
    """A pair over two ranks each.

    Args:
        groups: The ranks' processes.
        folder: Where they meet.
        settings: Of both engines.
    """

    num_ports = _NUM_RANKS

    def __init__(self, groups: list[ProcessRanks], folder: Path, **settings: Any) -> None:
        self._lent = iter(LentRanks(g, folder / f"meeting{i}") for i, g in enumerate(groups))
        super().__init__(**settings)

    def make(self, transfer: Any, **settings: Any) -> EngineCore:
        return make_core(next(self._lent), transfer, **settings)


@pytest.fixture
def check(
    groups: list[ProcessRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RankedPair]]:
    """Have prompts answered by a pair, compared with one process."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("VLLM_NATIVE", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    with contextlib.ExitStack() as stack:

        def run(vocab_size: int, **settings: Any) -> RankedPair:
            pair = RankedPair(groups, tmp_path, extra={"stuck_timeout_s": 0.2}, **settings)
            stack.callback(pair.shutdown)
            settings.pop("speculative_config", None)
            alone = Session(make_core(None, None, enable_prefix_caching=False, **settings))
            stack.callback(alone.core.shutdown)
            rng = random.Random(21)
            draw = partial(rng.choices, range(10, vocab_size))
            first = draw(k=200)
            for prompt, cached, external in (
                (first, 192, 192),
                (first, 192, 0),
                ([*first, *draw(k=100)], 288, 96),
                (draw(k=20), 0, 0),
            ):
                stats = pair.answer(prompt).stats
                assert stats is not None
                assert (stats.num_cached_tokens, stats.num_external_tokens) == (cached, external)
            check_answers(alone, pair.d, list(pair.d.prompts))
            pair.check_free()
            # The first rank's part comes, the second's does not: all of it is computed.
            with Relay(pair.port) as relay:
                prompt = draw(k=150)
                params = {**pair.prefill(prompt), "remote_port": relay.port}
                request_id = pair.d.add(prompt, 6, transfer=params)
                answer = pair.d.answers[request_id]
                pair.until(lambda: answer.finish_reason is not None)
                assert relay.num_connections >= 1
            assert answer.stats is not None
            assert answer.stats.num_external_tokens == 0
            check_answers(alone, pair.d, [request_id])
            # The second rank of the holder was not told.
            pair.p.core.withdraw_prefixes([params["remote_request_id"]])
            pair.run()
            pair.check_free()
            return pair

        yield run


class Relay:
    """Passes connections on to a port; nobody listens on the port after its own."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = listen("127.0.0.1", 0)
        self.port = int(self._listener.getsockname()[1])
        self.num_connections = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "Relay":
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        # The listener first, so that no connection is added.
        for end in (self._listener, *self._ends):
            close(end)
        for thread in self._threads:
            thread.join(120)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            server = socket.create_connection(("127.0.0.1", self._target))
            self._ends += (client, server)
            for ends in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=_pump, args=ends, daemon=True))
                self._threads[-1].start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def test_deepseek_v4_with_drafts(check: Callable[..., RankedPair]) -> None:
    check(2000, model="deepseek-v4", speculative_config=_MTP)


def test_split_key_heads(check: Callable[..., RankedPair], tmp_path: Path) -> None:
    write_checkpoint("gemma3", tmp_path / "checkpoint")
    model = str(tmp_path / "checkpoint")
    pair = check(VOCAB_SIZE, model=model)
    # An engine of one worker cannot read them, and says so when it starts.
    taking = config_of("kv_consumer", pair.port, peers=[f"127.0.0.1:{pair.port}"])
    with pytest.raises(ConfigError, match=r"tensor parallel is '2' at engine .* and '1' at engine"):
        make_core(None, taking, model=model)
