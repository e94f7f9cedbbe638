"""Rows without a state come back from a disk: windows are rebuilt above them, answers are equal."""

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.v1.engine.test_cache_keeps_outputs import Session, random_tokens
from tests.v1.engine.test_offloading import check_free, stop, store_of, tier_of, tiers_of, wait_open
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.rows_file import RowsFile

pytestmark = pytest.mark.slow

GEMMA: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
V4: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 48 << 20}


def begin(root: Path | None, **arguments: Any) -> Session:
    tiers = None if root is None else tiers_of(root)
    args = EngineArgs(block_size=32, kv_transfer_config=tiers, **arguments)
    session = Session(EngineCore(args.create_vllm_config(), UniProcExecutor))
    if root is not None:
        wait_open(session.core.scheduler.connector)
    return session


def ask(session: Session, prompt: list[int], max_tokens: int = 8):
    request_id = session.add(prompt, max_tokens)
    session.run()
    check_free(session)
    return session.answers[request_id]


class Case:
    """A model, a prompt that its folder keeps, and what follows from their sizes."""

    def __init__(self, arguments: dict[str, Any], prompt: list[int], root: Path) -> None:
        self.arguments, self.prompt, self.root = arguments, prompt, root
        session = begin(root, **arguments)
        ask(session, prompt)
        tier = tier_of(session)
        self.group_tokens = tier.stores.layout.group_tokens
        self.rebuild_tokens = session.core.scheduler.kv_cache_manager.coordinator.rebuild_tokens
        stop(session)

    def cold(self, prompt: list[int]) -> list[int]:
        session = begin(None, **self.arguments)
        found = ask(session, prompt)
        stop(session)
        return found.tokens

    def resumes_at(self, num_shared: int) -> int:
        matched = num_shared // self.group_tokens * self.group_tokens
        return (matched - self.rebuild_tokens) // 32 * 32


@pytest.fixture(scope="module", params=["deepseek-v4", "gemma3"])
def case(request, tmp_path_factory) -> Case:
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "gemma3":
        write_checkpoint("gemma3", place / "checkpoint")
        prompt = [random.Random(3).randrange(5, VOCAB_SIZE) for _ in range(900)]
        return Case({"model": str(place / "checkpoint"), **GEMMA}, prompt, place / "cache")
    prompt = random_tokens(random.Random(3), 1900)
    return Case({"model": "deepseek-v4", **V4}, prompt, place / "cache")


@pytest.fixture
def root(case, tmp_path) -> Path:
    return shutil.copytree(case.root, tmp_path / "cache")


def drop_states(session: Session) -> None:
    """Forget every state, as a disk does that gave them up before rows."""
    store = store_of(session)
    keeper = session.core.scheduler.connector._tier.stores.keeper
    while not store.state.is_ready:
        session.step()
    for entry in store.content.list_objects():
        if entry.extent.key.kind is ObjectKind.STATE:
            store.report_corrupt(entry)
    keeper.make_room()
    assert store.content.num_objects()["rows"] > 0
    assert store.content.num_objects()["state"] == 0


def test_rows_without_a_state_are_brought_back(case, root):
    session = begin(root, **case.arguments)
    drop_states(session)
    found = ask(session, case.prompt)
    assert found.tokens == case.cold(case.prompt)
    assert found.stats.num_cached_tokens == case.resumes_at(len(case.prompt) - 1) > 0
    stop(session)


def test_another_continuation_of_stored_rows_resumes_on_them(case, root):
    """No state lies where it leaves the stored prompt, and none is needed."""
    num_shared = len(case.prompt) * 3 // 4
    prompt = case.prompt[:num_shared] + case.prompt[:100]
    session = begin(root, **case.arguments)
    found = ask(session, prompt)
    assert found.tokens == case.cold(prompt)
    assert found.stats.num_cached_tokens >= case.resumes_at(num_shared) > 0
    stop(session)


@pytest.mark.parametrize("at", [0, 1])
def test_rows_that_cannot_be_read_are_computed(case, root, at, monkeypatch):
    session = begin(root, **case.arguments)
    drop_states(session)
    reads = []
    read = RowsFile.read

    def fail(self, extent, bounce=None):
        reads.append(extent)
        if len(reads) > at:
            raise OSError(5, "Input/output error")
        return read(self, extent, bounce)

    monkeypatch.setattr(RowsFile, "read", fail)
    found = ask(session, case.prompt)
    assert found.tokens == case.cold(case.prompt)
    assert found.stats.num_cached_tokens == 0
    # Tried twice, then left alone; nothing of it can be hit.
    assert len(reads) >= 2
    stop(session)


def test_a_request_that_ends_while_its_rows_come_leaves_nothing(case, root, monkeypatch):
    session = begin(root, **case.arguments)
    drop_states(session)
    read, has_ended = RowsFile.read, threading.Event()

    def wait(self, extent, bounce=None):
        assert has_ended.wait(60)
        return read(self, extent, bounce)

    monkeypatch.setattr(RowsFile, "read", wait)
    request_id = session.add(case.prompt, 4)
    session.step()
    assert tier_of(session).own_loads.is_loading(f"rows of {request_id}")
    session.core.abort_requests([request_id])
    has_ended.set()
    while session.core.has_work() or tier_of(session).own_loads.is_loading(f"rows of {request_id}"):
        session.step()
    check_free(session)
    found = ask(session, case.prompt)
    assert found.tokens == case.cold(case.prompt)
    assert found.stats.num_cached_tokens == case.resumes_at(len(case.prompt) - 1)
    stop(session)
