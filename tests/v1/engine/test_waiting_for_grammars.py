"""A request waits in the queue for its grammar; nobody waits with it."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from tests.v1.engine.test_cache_keeps_outputs import make_core
from vllm.exceptions import UserInputError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.structured_output import manager as manager_module
from vllm.v1.structured_output.compiler import GrammarCompiler

pytestmark = pytest.mark.slow


class HeldCompiler(GrammarCompiler):
    """Compiles nothing until it is let go."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.gate = threading.Event()

    def _compile(self, params: StructuredOutputsParams) -> Any:
        self.gate.wait(60)
        return self.backend.compile(params)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    monkeypatch.setattr(manager_module, "GrammarCompiler", HeldCompiler)
    return make_core(32, num_blocks=800, budget=256)


def add(core: EngineCore, request_id: str, **asked: Any) -> None:
    grammar = StructuredOutputsParams(**asked) if asked else None
    params = SamplingParams(max_tokens=4, structured_outputs=grammar, temperature=0.0)
    message = EngineCoreRequest(request_id, [20, 21, 22], params, time.time())
    core.add_request(core.make_request(message))


def finish(core: EngineCore, *request_ids: str) -> None:
    deadline = time.monotonic() + 100
    while any(request_id in core.scheduler.requests for request_id in request_ids):
        assert time.monotonic() < deadline
        core.step()


def compiler_of(core: EngineCore) -> HeldCompiler:
    found = core._grammars._compiler
    assert isinstance(found, HeldCompiler)
    return found


def test_others_pass_and_an_abort_needs_no_grammar(core: EngineCore) -> None:
    add(core, "waits", regex="[a-z]+")
    add(core, "left", regex="[0-9]+")
    add(core, "plain")
    finish(core, "plain")
    assert set(core.scheduler.requests) == {"waits", "left"}
    assert core.scheduler.get_request_counts() == (0, 2)
    core.abort_requests(["left"])
    assert set(core.scheduler.requests) == {"waits"}
    compiler_of(core).gate.set()
    finish(core, "waits")
    assert core.take_refusals() == []
    core.shutdown()


def test_bad_and_late_grammars_end_their_requests_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(core, "bad", regex="(")
    compiler_of(core).gate.set()
    finish(core, "bad")
    monkeypatch.setattr(manager_module, "DEADLINE_S", 0.0)
    never: Future[Any] = Future()
    monkeypatch.setattr(core._grammars._compiler, "submit", lambda params: never)
    add(core, "late", regex="a")
    add(core, "plain")
    finish(core, "late", "plain")
    refused = core.take_refusals()
    assert [request_id for request_id, _ in refused] == ["bad", "late"]
    assert all(isinstance(error, UserInputError) for _, error in refused)
    assert core.take_refusals() == []
    core.shutdown()
