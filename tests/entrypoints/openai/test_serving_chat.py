"""``/v1/chat/completions`` over a fake engine."""

from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from tests.entrypoints.openai.test_serving_completion import events_of

CHAT = "/v1/chat/completions"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_an_answer(served: Served) -> None:
    served.engine.num_cached_tokens = 2
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4}
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
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_the_answer_may_fill_the_context(served: Served) -> None:
    await served.client.post(CHAT, json={"messages": USER})
    await served.client.post(CHAT, json={"messages": USER, "max_tokens": 5})
    (prompt, params, *_), (_, limited, *_) = served.engine.jobs
    assert params.max_tokens == 64 - len(prompt)
    assert limited.max_tokens == 5


async def test_a_stream_begins_with_the_role_of_each_answer(served: Served) -> None:
    body = {"messages": USER, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
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


async def test_thinking_follows_the_request_then_the_server(serve: Any) -> None:
    served = serve(default_chat_template_kwargs={"thinking": False})
    kwargs: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"thinking": True}}]
    for extra in kwargs:
        await served.client.post(CHAT, json={"messages": USER, **extra})
    ends = [served.context.tokenizer.decode(job[0][-1:]) for job in served.engine.jobs]
    assert ends == ["</think>", "<think>"]


async def test_reasoning_cannot_be_left_out_yet(served: Served) -> None:
    body: dict[str, Any] = {"messages": USER, "include_reasoning": False}
    response = await served.client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "include_reasoning"
    body["reasoning_effort"] = "none"
    assert (await served.client.post(CHAT, json=body)).status_code == 200


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
