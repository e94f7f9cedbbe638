"""``/v1/chat/completions`` over a fake engine."""

import json
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from tests.entrypoints.openai.test_serving_completion import events_of

CHAT = "/v1/chat/completions"
CHAT_ONLY = {"thinking": False}
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_an_answer(served: Served) -> None:
    served.engine.num_cached_tokens = 2
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4}
    body["chat_template_kwargs"] = CHAT_ONLY
    answer = (await served.client.post(CHAT, json=body)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "One two,"
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-2.5] * 4
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"One two,"
    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 2,
        "cache_write_tokens": 0,
    }


async def test_the_answer_may_fill_the_context(served: Served) -> None:
    await served.client.post(CHAT, json={"messages": USER})
    await served.client.post(CHAT, json={"messages": USER, "max_tokens": 5})
    (prompt, params, *_), (_, limited, *_) = served.engine.jobs
    assert params.max_tokens == 64 - len(prompt)
    assert limited.max_tokens == 5


async def test_a_stream_begins_with_the_role_of_each_answer(served: Served) -> None:
    body = {"messages": USER, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    body["chat_template_kwargs"] = CHAT_ONLY
    events = events_of(await served.client.post(CHAT, json=body))
    *chunks, last = events
    by_index: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    for choices in by_index.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"]["content"] for choice in choices) == "One two, three."
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(served.engine.answer)


async def test_a_chunks_log_probabilities_spell_its_text(served: Served) -> None:
    """Clients read the text from them; the token that ends the answer is none of it."""
    eos_id = served.context.tokenizer.eos_token_id
    assert eos_id is not None
    said = list(served.engine.answer)
    for tokens_per_step in (1, 2, 3, len(said) + 1):
        served.engine.answer, served.engine.tokens_per_step = [*said, eos_id], tokens_per_step
        body = {"messages": USER, "stream": True, "logprobs": True, "return_token_ids": True}
        body["chat_template_kwargs"] = CHAT_ONLY
        _, *chunks = events_of(await served.client.post(CHAT, json=body))
        choices = [chunk["choices"][0] for chunk in chunks]
        for choice in choices:
            entries = choice["logprobs"]["content"]
            spelled = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
            text = choice["delta"].get("content")
            assert spelled == text or (not text and len(entries) == 1)
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert len(entries) == len(said) + 1
        assert entries[-1]["token"] == served.context.tokenizer.eos_token
        assert [i for choice in choices for i in choice.get("token_ids", ())] == [*said, eos_id]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
            "stop"
        ]
        assert choices[-1]["finish_reason"] == "stop"


async def test_thinking_follows_the_request_then_the_server(serve: Any) -> None:
    served = serve(default_chat_template_kwargs={"thinking": False})
    kwargs: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"thinking": True}}]
    for extra in kwargs:
        await served.client.post(CHAT, json={"messages": USER, **extra})
    ends = [served.context.tokenizer.decode(job[0][-1:]) for job in served.engine.jobs]
    assert ends == ["</think>", "<think>"]


SAID = "so</think>Wait.\n\n<｜DSML｜tool_calls>\n" + "".join(
    f"""<｜DSML｜invoke name="find">
<｜DSML｜parameter name="text" string="true">{text}</｜DSML｜parameter>
</｜DSML｜invoke>
"""
    for text in ("a", "b")
)
END = "</｜DSML｜tool_calls>"
TOOLS = [{"type": "function", "function": {"name": "find"}}]


def say(served: Served, text: str) -> None:
    served.engine.answer = served.context.tokenizer.encode(text, add_special_tokens=False)


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"messages": USER, "max_tokens": 500, **fields}
    response = await served.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


async def stream(served: Served, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": USER, "max_tokens": 500, "stream": True, **fields}
    events = events_of(await served.client.post(CHAT, json=body))
    return [dict(event["choices"][0]) for event in events]


def join_calls(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The calls of a stream: names, and arguments joined; every call begins with its id."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for choice in choices:
        for call in choice["delta"].get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                assert call["index"] == len(calls)
                assert (call["type"], function["arguments"]) == ("function", "")
                ids.add(call["id"])
                calls.append((function["name"], ""))
            else:
                assert call["index"] == len(calls) - 1
                assert "name" not in function
                calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
    assert len(ids) == len(calls)
    return calls


@pytest.fixture
def roomy(serve: Any) -> Served:
    return serve(served_model={"max_model_len": 4096})  # type: ignore[no-any-return]


async def test_reasoning_content_and_calls_are_told_apart(roomy: Served) -> None:
    say(roomy, SAID + END)
    choice = await ask(roomy, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning"] == message["reasoning_content"] == "so"
    assert message["content"] == "Wait."
    calls = message["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "find", "arguments": '{"text": "a"}'},
        {"name": "find", "arguments": '{"text": "b"}'},
    ]
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2


async def test_a_stream_joins_to_the_whole_answer(roomy: Served) -> None:
    say(roomy, SAID + END)
    choices = await stream(roomy, tools=TOOLS)
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "so"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
    assert join_calls(choices) == [("find", '{"text": "a"}'), ("find", '{"text": "b"}')]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "tool_calls"
    # Chunks go out while text is held back, too: clients measure time by them.
    assert deltas.count({}) > len(roomy.engine.answer) // 2


async def test_a_call_that_breaks_off_is_no_call(roomy: Served) -> None:
    """A stream has told its beginning, which is no JSON; an answer in one piece leaves it out."""
    say(roomy, SAID + END)
    cut = len(roomy.context.tokenizer.encode(SAID, add_special_tokens=False)) - 6
    choices = await stream(roomy, tools=TOOLS, max_tokens=cut)
    assert join_calls(choices) == [("find", '{"text": "a"}'), ("find", '{"text": "b"')]
    assert choices[-1]["finish_reason"] == "length"
    choice = await ask(roomy, tools=TOOLS, max_tokens=cut)
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "Wait."


async def test_parallel_calls_can_be_refused(roomy: Served) -> None:
    say(roomy, SAID + END)
    choice = await ask(roomy, tools=TOOLS, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {}])
async def test_calls_that_nobody_asked_for_are_swallowed(
    roomy: Served, fields: dict[str, Any]
) -> None:
    say(roomy, SAID + END)
    choice = await ask(roomy, **fields)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "Wait."
    prompt = roomy.context.tokenizer.decode(roomy.engine.jobs[0][0])
    assert "find" not in prompt  # the model is not even told


async def test_reasoning_can_be_left_out(roomy: Served) -> None:
    say(roomy, "so</think>Yes.")
    choice = await ask(roomy, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    choices = await stream(roomy, include_reasoning=False)
    assert not any("reasoning" in choice["delta"] for choice in choices)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."


async def test_reasoning_that_never_ends_is_no_content(roomy: Served) -> None:
    say(roomy, "so and")
    message = (await ask(roomy))["message"]
    assert (message["reasoning"], message["content"]) == ("so and", "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [*USER, {"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages"),
    ],
)
async def test_wrong_tools(served: Served, fields: dict[str, Any], param: str) -> None:
    response = await served.client.post(CHAT, json={"messages": USER, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_without_a_known_format_tools_are_refused(serve: Any) -> None:
    served = serve(tool_call_parser="none")
    response = await served.client.post(CHAT, json={"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]


async def test_without_a_reasoning_parser_reasoning_is_content(serve: Any) -> None:
    served = serve(reasoning_parser="none", served_model={"max_model_len": 4096})
    say(served, "so</think>Yes.")
    assert (await ask(served))["message"]["content"] == "so</think>Yes."


async def test_continue_final_message(served: Served) -> None:
    messages = [*USER, {"role": "assistant", "content": "So be"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"thinking": False},
    }
    response = await served.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert served.context.tokenizer.decode(served.engine.jobs[0][0]).endswith("So be")


async def test_prompt_logprobs_and_token_ids(served: Served) -> None:
    body = {"messages": USER, "prompt_logprobs": 0, "return_token_ids": True}
    answer = (await served.client.post(CHAT, json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_token_ids"] == served.engine.jobs[0][0]
    assert answer["choices"][0]["token_ids"] == served.engine.answer


@pytest.mark.parametrize("name", ["tools", "functions", "audio", "logit_bias", "chat_template"])
async def test_null_asks_for_nothing(served: Served, name: str) -> None:
    response = await served.client.post(CHAT, json={"messages": USER, name: None})
    assert response.status_code == 200, response.text


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def grammar_of(served: Served) -> Any:
    """What the engine was told that the answer must follow."""
    return served.engine.jobs[-1][1].structured_outputs


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORM},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'start: "x"'}},
    ],
)
async def test_tools_and_a_form_are_one_grammar(roomy: Served, form: dict[str, Any]) -> None:
    say(roomy, SAID + END)
    choice = await ask(roomy, tools=TOOLS, **form)
    assert choice["finish_reason"] == "tool_calls"
    tag = json.loads(grammar_of(roomy).structural_tag)["format"]
    kinds = [part["type"] for part in tag["elements"]]
    assert kinds[0] == "sequence"  # the block of calls
    assert len(kinds) == 2
    # Without tools, or where they are forbidden, the form is all there is.
    for others in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        await ask(roomy, **form, **others)
        assert grammar_of(roomy).structural_tag is None
    # A call that must be made is one, whatever form answers have.
    for choice_ in ("required", {"type": "function", "function": {"name": "find"}}):
        await ask(roomy, tools=TOOLS, tool_choice=choice_, **form)
        tag = json.loads(grammar_of(roomy).structural_tag)["format"]
        assert tag["type"] == "sequence"


async def test_options_of_the_form_stay(roomy: Served) -> None:
    form = {"json": {"type": "object"}, "disable_any_whitespace": True}
    await ask(roomy, tools=TOOLS, structured_outputs=form)
    assert grammar_of(roomy).disable_any_whitespace
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    await ask(roomy, tools=TOOLS, response_format=tag)
    assert json.loads(grammar_of(roomy).structural_tag) == tag


async def test_tokens_of_reasoning_are_counted(roomy: Served) -> None:
    say(roomy, "so</think>Wait." + END)
    counted = len(roomy.context.tokenizer.encode("so</think>", add_special_tokens=False))
    body: dict[str, Any] = {"messages": USER, "n": 2}
    whole = (await roomy.client.post(CHAT, json=body)).json()["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": 2 * counted}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events_of(await roomy.client.post(CHAT, json=body))
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * counted}
    hits = last["usage"]["prompt_cache_hit_tokens"], last["usage"]["prompt_cache_miss_tokens"]
    assert sum(hits) == last["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("thinking", "opened", "budget"),
    [
        ({"type": "disabled"}, "</think>", None),
        ({"type": "enabled"}, "<think>", None),
        ({"type": "enabled", "budget_tokens": 9}, "<think>", 9),
    ],
)
async def test_thinking_as_deepseek_spells_it(
    roomy: Served, thinking: dict[str, Any], opened: str, budget: int | None
) -> None:
    say(roomy, "Yes.")
    await ask(roomy, thinking=thinking)
    token_ids, params, *_ = roomy.engine.jobs[-1]
    assert roomy.context.tokenizer.decode(token_ids[-1:]) == opened
    assert params.thinking_token_budget == budget


@pytest.mark.parametrize(
    "thinking", [{}, {"type": "maybe"}, {"type": "enabled", "budget_tokens": 0}]
)
async def test_thinking_that_is_none(served: Served, thinking: dict[str, Any]) -> None:
    answer = await served.client.post(CHAT, json={"messages": USER, "thinking": thinking})
    assert answer.json()["error"]["param"] == "thinking"


async def test_a_prefix_is_continued(roomy: Served) -> None:
    say(roomy, " and more.")
    begun = {"role": "assistant", "content": "One", "prefix": True}
    body = {"messages": [*USER, begun], "thinking": {"type": "disabled"}}
    answer = (await roomy.client.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == " and more."
    prompt = roomy.context.tokenizer.decode(roomy.engine.jobs[-1][0])
    assert prompt.endswith("</think>One")


async def test_a_prefix_that_cannot_be_continued(served: Served) -> None:
    body = {"messages": [*USER, {"role": "user", "content": "One", "prefix": True}]}
    error = (await served.client.post(CHAT, json=body)).json()["error"]
    assert error["param"] == f"messages[{len(USER)}].prefix"
    assert error["message"].startswith(f"{error['param']} needs a last message of role 'assistant'")


async def test_a_malformed_call_is_told_counted_and_logged(
    roomy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [{"type": "function", "function": {"name": "find"}}]
    block = "\n\n<｜DSML｜tool_calls>\n"
    for said, reason in ((f"{block}look there", "no call"), (f"{block}<｜DSML｜invoke", None)):
        say(roomy, said)
        with caplog.at_level("WARNING"):
            choice = await ask(roomy, tools=tools, chat_template_kwargs=CHAT_ONLY)
        assert choice["finish_reason"] == "stop"
        assert (choice["message"]["content"] or "") == (said if reason else "")
        assert (reason in caplog.text) if reason else ("cannot be read" not in caplog.text)
        caplog.clear()
    metrics = (await roomy.client.get("/metrics")).text
    assert 'vllm:malformed_tool_calls_total{parser="deepseek_v4"} 1.0' in metrics
