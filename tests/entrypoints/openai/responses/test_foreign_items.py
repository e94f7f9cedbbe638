"""Conversations that began on other servers go on here."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from vllm.entrypoints.openai.responses.input_items import make_chat, read_input


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with room for tools."""
    return serve(served_model={"max_model_len": 2048})


USER = {"role": "user", "content": "go on"}


def chat_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return make_chat(read_input(list(items), lambda name: {"id": name}))[0]


def call_of(item: dict[str, Any]) -> tuple[str, Any, list[str]]:
    """The name and arguments that the model sees of a call, and what it gave."""
    first, *rest = chat_of(item)
    (call,) = first["tool_calls"]
    function = call["function"]
    results = [message["content"] for message in rest]
    assert all(message["tool_call_id"] == call["id"] for message in rest)
    return function["name"], json.loads(function["arguments"]), results


@pytest.mark.parametrize(
    ("item", "name", "arguments", "results"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
            *("patch", {"input": "*** Begin"}, []),
        ),
        (
            {"type": "local_shell_call", "id": "", "call_id": "c", "action": {"command": ["ls"]}},
            *("local_shell", {"command": ["ls"]}, []),
        ),
        (
            {"type": "local_shell_call", "id": "l1", "action": {"command": ["ls"]}},
            *("local_shell", {"command": ["ls"]}, []),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls", "pwd"]}},
            *("shell", {"commands": ["ls", "pwd"]}, []),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file"}},
            *("apply_patch", {"type": "delete_file"}, []),
        ),
        (
            {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
            *("computer", {"type": "screenshot"}, []),
        ),
        (
            {"type": "mcp_call", "id": "m", "name": "find", "arguments": '{"q": 1}', "output": "x"},
            *("find", {"q": 1}, ["x"]),
        ),
        (
            {"type": "mcp_call", "id": "m", "name": "find", "arguments": "{}", "error": "no"},
            *("find", {}, ["no"]),
        ),
        (
            {
                "type": "code_interpreter_call",
                "id": "ci",
                "code": "print(1)",
                "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "u"}],
            },
            *("code_interpreter", {"code": "print(1)"}, ['1\n{"type": "image", "url": "u"}']),
        ),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "f", {}, []),
    ],
)
def test_calls_of_other_servers_are_shown_as_calls(
    item: dict[str, Any], name: str, arguments: Any, results: list[str]
) -> None:
    assert call_of(item) == (name, arguments, results)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "done"}, "done"),
        (
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "a"}, {"type": "x"}],
            },
            'a\n{"type": "x"}',
        ),
        ({"type": "local_shell_call_output", "id": "c", "output": '{"exit": 0}'}, '{"exit": 0}'),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
            '{"stdout": "a"}',
        ),
        ({"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}, ""),
    ],
)
def test_what_they_gave_is_a_result(output: dict[str, Any], shown: str) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}
    *_, result = chat_of(call, output)
    assert result == {"role": "tool", "tool_call_id": "c", "content": shown}


LEFT_OUT = [
    {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
    {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}},
    {"type": "mcp_approval_request", "id": "mcpr_1", "name": "f", "arguments": "{}"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
    {"type": "tool_search_call", "id": "", "call_id": None, "arguments": {"query": "x"}},
]


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item["type"])
async def test_what_cannot_be_shown_is_left_out_and_named(
    served: Served, item: dict[str, Any]
) -> None:
    body = {"input": [USER, item, USER], "store": False, "max_output_tokens": 1}
    answer = await served.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == f"input[1].{item['type']}"
    assert chat_of(USER, item, USER) == [USER, USER]
    counted = await served.client.post("/v1/responses/input_tokens", json={"input": body["input"]})
    assert counted.headers["x-ignored-fields"] == f"input[1].{item['type']}"


FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mail", "tools": [{**FUNCTION, "name": "send"}]}


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
async def test_offered_tools_join_the_requests(served: Served, kind: str) -> None:
    offer = {"type": kind, "id": "", "role": "developer", "tools": [FUNCTION, SPACE]}
    body = {"input": [offer, USER], "tools": [FUNCTION, {**FUNCTION, "name": "own"}]}
    answer = await served.client.post("/v1/responses", json={**body, "store": False})
    assert answer.status_code == 200, answer.text
    prompt = served.context.tokenizer.decode(served.engine.jobs[-1][0])
    assert prompt.count('"name": "look"') == 1
    assert '"name": "own"' in prompt
    assert '"name": "mail__send"' in prompt
    forced = {**body, "tool_choice": {"type": "function", "name": "send", "namespace": "mail"}}
    answer = await served.client.post("/v1/responses", json={**forced, "store": False})
    assert answer.status_code == 200, answer.text


async def test_offered_tools_stay_offered(served: Served) -> None:
    offer = {"type": "additional_tools", "tools": [FUNCTION]}
    first = await served.client.post("/v1/responses", json={"input": [offer, USER]})
    assert first.status_code == 200, first.text
    again = {"input": "and?", "previous_response_id": first.json()["id"]}
    assert (await served.client.post("/v1/responses", json=again)).status_code == 200
    assert '"name": "look"' in served.context.tokenizer.decode(served.engine.jobs[-1][0])
    url = f"/v1/responses/{first.json()['id']}/input_items"
    listed = (await served.client.get(url)).json()["data"]
    assert [item["type"] for item in listed] == ["message", "additional_tools"]


async def test_custom_tools_are_refused_with_the_way_out(served: Served) -> None:
    custom = {"type": "custom", "name": "patch"}
    for body in (
        {"tools": [custom], "input": "hi"},
        {"input": [{"type": "additional_tools", "tools": [custom]}, USER]},
    ):
        answer = await served.client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "tools[0].type='custom' is not supported: give a 'function'" in message


@pytest.mark.parametrize(
    "item",
    [
        {**USER, "type": "message", "id": ""},
        {"type": "function_call", "id": "", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "id": "", "call_id": "c", "output": "x"},
        {"type": "reasoning", "id": "", "summary": [], "encrypted_content": None},
    ],
)
async def test_an_empty_id_is_none(served: Served, item: dict[str, Any]) -> None:
    body = {"input": [item, USER], "max_output_tokens": 1}
    assert (await served.client.post("/v1/responses", json=body)).status_code == 200


async def test_items_that_nobody_knows_are_refused_by_name(served: Served) -> None:
    answer = await served.client.post("/v1/responses", json={"input": [{"type": "hologram"}]})
    assert answer.status_code == 400
    assert "hologram" in answer.text
