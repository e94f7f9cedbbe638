"""Two engine cores behind two server processes: one server for all of it."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

_TEXT = "The garden is quiet today and it rained. " * 30
_DEADLINE_S = 90.0


# Each core is one engine on whatever platform; what lies between cores knows none.
pytestmark = pytest.mark.parametrize("platform", ["cpu"], indirect=True)


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, platform_environment: dict[str, str]
) -> Iterator[ServerProcess]:
    """A server of two cores that may die, and two processes that answer HTTP."""
    flags = ("--data-parallel-size", "2", "--api-server-count", "2")
    flags += ("--data-parallel-fault-tolerance", "--data-parallel-restarts", "1")
    # However slow the machine is, what is asked for comes.
    flags += ("--warm-pull-bytes", "64M", "--warm-pull-seconds", "600")
    # Beside a tier, which a core that is killed loses with its process.
    flags += ("--kv-offloading-size", "0.05")
    environment = {**platform_environment, "VLLM_SERVER_DEV_MODE": "1"}
    folder = tmp_path_factory.mktemp("pair")
    flags += ("--batch-dir", str(folder / "batches"))
    log_path = folder / "log.txt"
    with ServerProcess(log_path, *flags, environment=environment) as server:
        wait_until(lambda: server.log.count("Application startup complete") == 2)
        yield server
        # All drain, and then the cores stop.
        server.process.terminate()
        assert server.process.wait(_DEADLINE_S) == 0, server.log


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what must come."""
    deadline = time.monotonic() + _DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def complete(server: ServerProcess, prompt: str, rank: int | None = None, **body: Any) -> Any:
    """Return a greedy completion's text and how much of its prompt was cached."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **body}
    answer = server.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
    return made["choices"][0]["text"], cached


def counts(server: ServerProcess, name: str) -> list[float]:
    """Return a counter of each core."""
    return [server.metric(f"vllm:{name}", engine=str(rank)) for rank in (0, 1)]


def test_every_core_answers_as_a_single_one_does(
    pair: ServerProcess, server: ServerProcess
) -> None:
    prompts = [f"{i}. {_TEXT}" for i in range(2)]
    expected = [complete(server, prompt)[0] for prompt in prompts]
    for rank in (0, 1, None):
        assert [complete(pair, prompt, rank)[0] for prompt in prompts] == expected


def test_conversations_are_shared_out_and_their_next_turns_hit(pair: ServerProcess) -> None:
    assert pair.post("/reset_prefix_cache", {}).json() == {"success": True}
    before = counts(pair, "prefix_cache_queries_total")
    said = [f"Talk {i}. {_TEXT}" for i in range(3)]
    for prompt in said:
        assert complete(pair, prompt)[1] == 0
    fresh = [b - a for a, b in zip(before, counts(pair, "prefix_cache_queries_total"), strict=True)]
    assert min(fresh) > 0
    # Whichever process is asked, it knows what both cores hold.
    for prompt in said:
        assert complete(pair, prompt + " And then?")[1] >= 256


def test_metrics_are_those_of_all_processes(pair: ServerProcess) -> None:
    before = sum(counts(pair, "generation_tokens_total"))
    for i in range(6):
        complete(pair, f"Count {i}.", max_tokens=5, ignore_eos=True)
    # Whoever answers tells the same.
    for _ in range(3):
        assert sum(counts(pair, "generation_tokens_total")) == before + 30
    assert counts(pair, "engine_core_up") == [1.0, 1.0]


def test_a_stored_response_is_found_by_both_processes(pair: ServerProcess) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "temperature": 0}
    made = [pair.post("/v1/responses", body).json() for _ in range(3)]
    # Each question is a connection of its own, which either process may take.
    for response in made * 2:
        assert pair.get(f"/v1/responses/{response['id']}").json() == response
    for response in made:
        answer = pair.post("/v1/responses", {**body, "previous_response_id": response["id"]})
        assert answer.json()["previous_response_id"] == response["id"], answer.text
        path = f"/v1/responses/{response['id']}"
        assert httpx.delete(pair.url + path, timeout=_DEADLINE_S).json()["deleted"]
        assert {pair.get(path).status_code for _ in range(2)} == {404}


def test_batches_are_one_processs_and_both_answer(pair: ServerProcess) -> None:
    """Each request is a connection of its own, which either process may take."""
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "deepseek-v4", "prompt": f"Line {i}.", "max_tokens": 3},
        }
        for i in range(4)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def upload() -> str:
        answer = httpx.post(
            pair.url + "/v1/files",
            files={"file": ("in.jsonl", content)},
            data={"purpose": "batch"},
            timeout=_DEADLINE_S,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    files = [upload() for _ in range(4)]
    for _ in range(3):
        listed = pair.get("/v1/files").json()["data"]
        assert sorted(one["id"] for one in listed) == sorted(files)
        assert pair.get(f"/v1/files/{files[0]}/content").content == content
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    made = [pair.post("/v1/batches", {**body, "input_file_id": one}).json() for one in files]
    for batch in made:
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda path=path: pair.get(path).json()["status"] == "completed")  # type: ignore[misc]
        done = pair.get(path).json()
        rows = pair.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
        assert {json.loads(row)["custom_id"] for row in rows} == {f"line-{i}" for i in range(4)}
        assert httpx.delete(pair.url + path, timeout=_DEADLINE_S).json()["deleted"]
        assert {pair.get(path).status_code for _ in range(3)} == {404}
    # Both know what is wrong, too.
    wrong = [pair.post("/v1/batches", {**body, "endpoint": "/v1/x"}) for _ in range(3)]
    assert {answer.status_code for answer in wrong} == {400}


def test_what_a_request_hit_is_told_by_both_processes(pair: ServerProcess) -> None:
    ids = []
    for said in ("Explain. ", "Explain. ", "Tell. "):
        body = {"system": said + _TEXT, "messages": [{"role": "user", "content": "Go."}]}
        body |= {"max_tokens": 2, "diagnostics": {"previous_message_id": None}}
        ids.append(pair.post("/v1/messages", body).json()["id"])
    for _ in range(4):
        same, other = (
            pair.get(f"/v1/cache/explain/{name}?earlier={ids[0]}").json() for name in ids[1:]
        )
        assert (same["request_id"], same["comparison"]["differs"]) == (ids[1], [])
        assert other["comparison"]["differs"] == ["system"]
        unknown = pair.get("/v1/cache/explain/nobody")
        assert unknown.status_code == 404, unknown.text


def test_a_diagnosis_knows_requests_of_either_process_and_core(pair: ServerProcess) -> None:
    def respond(said: str, rank: int, **fields: Any) -> Any:
        body = {"input": said, "max_output_tokens": 2, "temperature": 0, **fields}
        answer = pair.post("/v1/responses", body, headers={"X-data-parallel-rank": str(rank)})
        assert answer.status_code == 200, answer.text
        return answer.json()

    for i in range(4):
        rank, other = i % 2, 1 - i % 2
        text = f"Diagnosis {i}. {_TEXT}"
        first = respond(text, rank, prompt_cache_key="one")
        options = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
        told = respond(text, rank, **options)["prompt_cache_diagnostics"]
        assert told["type"] == "cache_hit"
        edited = respond("Oh! " + text, rank, **options)["prompt_cache_diagnostics"]
        assert (edited["type"], edited["reason"]) == ("cache_miss", "input_changed")
        # The other core has nothing of it: with another key that is the reason.
        moved = respond(text, other, prompt_cache_key="two", **options)
        assert moved["prompt_cache_diagnostics"]["reason"] == "prompt_cache_key_changed"


def test_no_core_keeps_what_shall_leave_nothing(pair: ServerProcess) -> None:
    for rank in (0, 1):
        text = f"Secret {rank}. {_TEXT}"
        for _ in range(2):
            assert complete(pair, text, rank, skip_cache_insert=True)[1] == 0
        assert complete(pair, text)[1] == 0


def test_a_session_ends_on_all_cores(pair: ServerProcess) -> None:
    for rank in (0, 1):
        complete(pair, f"Session {rank}. {_TEXT}", rank, session_id="two-cores")
    told = pair.post("/v1/cache/sessions/two-cores/end", {}).json()
    assert told["ended"]
    assert told["num_checkpoints"] >= 2
    assert pair.post("/v1/cache/sessions/nobody/end", {}).json()["num_checkpoints"] == 0


@pytest.mark.parametrize(("rank", "told"), [("2", "0 to 1"), ("x", "whole number")])
def test_a_rank_that_there_is_not_is_refused(pair: ServerProcess, rank: str, told: str) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    answer = pair.post("/v1/completions", body, headers={"X-data-parallel-rank": rank})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_kept_prefixes_are_listed_and_forgotten_wherever_they_are(pair: ServerProcess) -> None:
    kept = [pair.post("/v1/cache/prefixes", {"prompt": f"{i}. {_TEXT}"}).json() for i in range(2)]
    listed = {entry["id"] for entry in pair.get("/v1/cache/prefixes").json()["data"]}
    assert {entry["id"] for entry in kept} <= listed
    for entry in kept:
        assert httpx.delete(f"{pair.url}/v1/cache/prefixes/{entry['id']}").json()["deleted"]
    assert not pair.get("/v1/cache/prefixes").json()["data"]


def stream(server: ServerProcess, rank: int, began: threading.Event, lines: list[str]) -> None:
    body = {"prompt": f"{rank} and", "max_tokens": 150, "stream": True, "ignore_eos": True}
    headers = {"X-data-parallel-rank": str(rank)}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=_DEADLINE_S) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            began.set()


def test_a_killed_core_takes_its_own_requests_along_and_comes_back(pair: ServerProcess) -> None:
    long = "What a neighbour uses most. " + _TEXT
    text, _ = complete(pair, long, rank=0)
    (victim,) = set(re.findall(r"data parallel rank 1: process (\d+)", pair.log))
    streams: list[tuple[threading.Thread, threading.Event, list[str]]] = []
    for rank in (0, 1):
        began, lines = threading.Event(), list[str]()
        thread = threading.Thread(target=stream, args=(pair, rank, began, lines))
        thread.start()
        streams.append((thread, began, lines))
    for _, began, _ in streams:
        assert began.wait(_DEADLINE_S)
    os.kill(int(victim), signal.SIGKILL)
    streams[1][0].join(_DEADLINE_S)
    errors = [json.loads(line[6:]) for line in streams[1][2] if '"error"' in line]
    assert [error["error"]["code"] for error in errors] == [503], streams[1][2][-3:]
    assert "rank 1 died" in errors[0]["error"]["message"]
    assert pair.get("/health").status_code == 200
    assert complete(pair, "meanwhile")[0]
    streams[0][0].join(_DEADLINE_S)
    assert "data: [DONE]" in streams[0][2]
    assert pair.metric("vllm:engine_core_deaths_total", engine="1") == 1.0
    wait_until(lambda: counts(pair, "engine_core_up") == [1.0, 1.0])
    assert complete(pair, "back again", rank=1)[0]
    # It has what the other one used most, and says the same with it.
    wait_until(lambda: "Pulled " in pair.log)
    again, cached = complete(pair, long, rank=1)
    assert again == text
    assert cached > 0
    wait_until(lambda: pair.metric("vllm:warm_pull_tokens_total", engine="1") > cached)
