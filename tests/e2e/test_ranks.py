"""``vllm serve -tp 2``: the answers of one process, and no process left over however it ends."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_lifecycle import LONG, StreamReader
from tests.v1.executor.rank_engines import run_engine
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer

PROMPT = [(7 * i) % 501 + 3 for i in range(150)]
_BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path, platform_environment: dict[str, str]) -> Iterator[ServerProcess]:
    """A server over two ranks, with drafts."""
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    flags = ("-tp", "2", "--max-model-len", "9000", "--speculative-config", drafts)
    log_path = tmp_path / "log.txt"
    with ServerProcess(log_path, *flags, environment=platform_environment) as server:
        yield server
        print(server.log)


def _wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def _find_children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_two_ranks_answer_as_one_process_and_end_together(
    server: ServerProcess, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    size = {"kv_cache_memory_bytes": 30 << 20, "max_model_len": 9000, "block_size": 32}
    (expected,), _ = run_engine([PROMPT], model="deepseek-v4", **size)
    text = Tokenizer.from_folder(Path(resolve_checkpoint("deepseek-v4").path)).decode(expected)
    for num_hits in (0, 128):
        answer = server.post("/v1/completions", _BODY).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_hits
    ranks = _find_children(server.engine_pid)
    assert len(ranks) == 2
    if platform == "cpu":
        reader = StreamReader(server, LONG)
        os.kill(ranks[1], signal.SIGKILL)
        *_, last, done = reader.end(120)
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == 500
        assert server.process.wait(120) == 1
        assert "rank 1 was ended by signal 9" in server.log
    else:
        # A stopped process notices nothing: the kernel must end it.
        os.kill(ranks[1], signal.SIGSTOP)
        server.process.kill()
    _wait_for(lambda: all(map(_is_gone, ranks)))
