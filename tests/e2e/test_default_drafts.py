"""A server that drafts unasked, as it does by default, answers as one that does not."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import NO_TLS, ServerProcess

_LINES = "\n".join(f"{name} = settings['{name}']" for name in ("host", "port", "user", "path"))
_QUESTIONS = (
    f"Write these lines once more.\n{_LINES}",
    "Count: one two three one two three one two three one two three",
    f"{_LINES}\n{_LINES}\nhost = settings",
)
_SETTINGS: dict[str, Any] = {
    "model": "deepseek-v4",
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("drafting") / "log.txt"
    environment = {"VLLM_ASCEND_REFERENCE": "0", "VLLM_UNASKED_DRAFTS": "1"}
    with ServerProcess(log, environment=environment) as server:
        yield server
        assert server.process.poll() is None, server.log
        server.wait_idle()


def _ask(server: ServerProcess, question: str, **settings: Any) -> dict[str, Any]:
    """Return a chat's answer, without what differs between any two."""
    messages = [{"role": "user", "content": question}]
    answer = server.post("/v1/chat/completions", {**_SETTINGS, "messages": messages, **settings})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": body["choices"], "usage": usage}


def _stream(server: ServerProcess, question: str, num_events: int | None = None) -> list[Any]:
    """Return the tokens of a stream; leave after so many events, if given."""
    messages = [{"role": "user", "content": question}]
    body = {**_SETTINGS, "messages": messages, "max_tokens": 40, "stream": True}
    url, tokens = server.url + "/v1/chat/completions", []
    with httpx.stream("POST", url, json=body, timeout=120, verify=NO_TLS) as response:
        for number, line in enumerate(response.iter_lines()):
            if number == num_events:
                return tokens
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += (choice["logprobs"] or {}).get("content") or []
    return tokens


@pytest.mark.parametrize("question", _QUESTIONS)
def test_answers_and_resends_are_those_of_a_server_that_does_not(
    drafting: ServerProcess, cpu_server: ServerProcess, question: str
) -> None:
    assert "Drafts: as many tokens as pay" in drafting.log
    assert "Drafts: as many tokens as pay" not in cpu_server.log
    expected = _ask(cpu_server, question, max_tokens=40)
    # Behind the first answer drafts come from it, too.
    for _ in range(3):
        assert _ask(drafting, question, max_tokens=40) == expected
    told = _stream(drafting, question)
    assert told == expected["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 1},
        {"max_tokens": 40, "stop": ["e"]},
        {"max_tokens": 30, "temperature": 0.8, "seed": 5, "n": 2},
        {"max_tokens": 30, "response_format": {"type": "json_object"}},
        {"max_tokens": 30, "frequency_penalty": 0.5, "logit_bias": {"40": 3}},
    ],
)
def test_every_setting_of_an_answer(
    drafting: ServerProcess, cpu_server: ServerProcess, settings: dict[str, Any]
) -> None:
    expected = _ask(cpu_server, _QUESTIONS[0], **settings)
    for _ in range(2):
        assert _ask(drafting, _QUESTIONS[0], **settings) == expected


def test_several_at_a_time_and_some_who_leave(
    drafting: ServerProcess, cpu_server: ServerProcess
) -> None:
    questions = [f"{question}\nNumber {number}." for question in _QUESTIONS for number in (1, 2)]
    expected = [_ask(cpu_server, question, max_tokens=30) for question in questions]
    with ThreadPoolExecutor(9) as threads:
        leaving = [threads.submit(_stream, drafting, question, 6) for question in _QUESTIONS]
        asked = [threads.submit(_ask, drafting, question, max_tokens=30) for question in questions]
        assert [one.result() for one in asked] == expected
        for one in leaving:
            one.result()
    assert drafting.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
