"""``/v1/completions`` over a fake engine."""

import json
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.conftest import Served
from vllm.exceptions import QueueFullError


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream; checks its frame."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_one_prompt(served: Served) -> None:
    body = {"prompt": "Hello", "model": "alias", "max_tokens": 64}
    response = await served.client.post("/v1/completions", json=body)
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "alias")
    assert answer["system_fingerprint"] == "fp-1"
    choice = answer["choices"][0]
    assert choice["text"] == "One two, three."
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    num_answer = len(served.engine.answer)
    num_prompt = len(served.engine.jobs[0][0])
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": 0},
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": num_prompt,
    }


async def test_prompts_times_n_are_numbered_and_counted_once(served: Served) -> None:
    served.engine.num_cached_tokens = 3
    body = {"prompt": [[5, 6, 7, 8], [9, 10, 11, 12, 13]], "n": 2, "max_tokens": 2}
    answer = (await served.client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_default_max_tokens_is_16_or_the_room_left(served: Served) -> None:
    await served.client.post("/v1/completions", json={"prompt": [7] * 10})
    await served.client.post("/v1/completions", json={"prompt": [7] * 60})
    await served.client.post("/v1/completions", json={"prompt": [7] * 60, "max_tokens": 30})
    assert [job[1].max_tokens for job in served.engine.jobs] == [16, 4, 4]


async def test_fields_reach_the_engine(served: Served) -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10**30,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "bc"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "min_tokens": 2,
        "cache_salt": "me",
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    _, params, _, _, salt = served.engine.jobs[0]
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.9, 0.1)
    assert params.top_k == 0  # beyond the vocabulary is the same as off
    assert (params.seed, params.stop, params.stop_token_ids) == (7, ["a", "bc"], [4])
    assert (params.ignore_eos, params.min_tokens, params.skip_special_tokens) == (True, 2, False)
    assert salt == "me"


async def test_cache_boundaries_reach_the_engine_with_every_prompt(served: Served) -> None:
    body = {"prompt": [[1] * 9, [2] * 9], "cache_boundaries": [3, 8]}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert served.engine.boundaries == [[3, 8], [3, 8]]
    await served.client.post("/v1/completions", json={"prompt": [1] * 9})
    assert served.engine.boundaries[2] == []


async def test_null_means_default(served: Served) -> None:
    names = "model n temperature top_p stop seed logprobs stream stream_options echo max_tokens"
    body = {"prompt": "x", **dict.fromkeys(names.split())}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert served.engine.jobs[0][1].temperature == 1.0


async def test_checkpoint_defaults_yield_to_the_request(serve: Any) -> None:
    served = serve(served_model={"default_sampling": {"temperature": 0.3, "top_p": 0.8}})
    await served.client.post("/v1/completions", json={"prompt": "x", "top_p": 1.0})
    params = served.engine.jobs[0][1]
    assert (params.temperature, params.top_p) == (0.3, 1.0)


async def test_echo_with_logprobs(served: Served) -> None:
    body = {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 3}
    answer = (await served.client.post("/v1/completions", json=body)).json()
    choice = answer["choices"][0]
    assert choice["text"].startswith("HelloOne")
    logprobs = choice["logprobs"]
    num_tokens = len(served.engine.jobs[0][0]) + 3
    assert {len(values) for values in logprobs.values()} == {num_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][-1] == -2.5
    assert len(logprobs["top_logprobs"][-1]) == 3  # two most likely and the sampled one
    offsets = logprobs["text_offset"]
    lengths = [len(token) for token in logprobs["tokens"]]
    assert offsets == [sum(lengths[:i]) for i in range(num_tokens)]


MOUNTAIN = "über die Berge 🏔é漢 und so"


async def test_echo_of_ids_is_the_text_of_all_tokens(served: Served) -> None:
    """Wherever the prompt ends, within a character too."""
    tokenizer = served.context.tokenizer
    ids = tokenizer.encode(MOUNTAIN)
    for cut in range(1, len(ids)):
        served.engine.answer = ids[cut:]
        body = {"prompt": ids[:cut], "echo": True, "logprobs": 0, "max_tokens": len(ids)}
        answer = await served.client.post("/v1/completions", json=body)
        choice = answer.json()["choices"][0]
        text = choice["text"]
        assert text == tokenizer.decode(ids), cut
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert tokens[0] == tokenizer.decode(ids[:1])
        assert offsets[0] == 0
        for token, offset in zip(tokens, offsets, strict=True):
            if not token.startswith("bytes:"):
                assert text[offset:].startswith(token)


async def test_stream(served: Served) -> None:
    body = {
        "prompt": "Hello",
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = events_of(await served.client.post("/v1/completions", json=body))
    *chunks, last = events
    assert len(chunks) == len(served.engine.answer)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "One two, three."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(chunks)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert last["system_fingerprint"] == "fp-1"
    assert len({event["id"] for event in events}) == 1


async def test_stream_of_many_answers_with_running_usage(served: Served) -> None:
    body = {
        "prompt": ["a", "b"],
        "n": 2,
        "max_tokens": 3,
        "stream": True,
        "echo": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    events = events_of(await served.client.post("/v1/completions", json=body))
    texts: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert sorted(texts) == [0, 1, 2, 3]
    assert [texts[i][0] for i in range(4)] == ["a", "a", "b", "b"]
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_forced_usage(serve: Any) -> None:
    served = serve(enable_force_include_usage=True)
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    events = events_of(await served.client.post("/v1/completions", json=body))
    assert all("usage" in event for event in events)
    assert events[-1]["choices"] == []


async def test_token_ids_on_request(served: Served) -> None:
    body = {
        "prompt": [9, 10],
        "max_tokens": 2,
        "return_token_ids": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    choice = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [9, 10]
    assert choice["token_ids"] == served.engine.answer[:2]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in served.engine.answer[:2]]


async def test_prompt_logprobs(served: Served) -> None:
    body = {"prompt": [9, 10], "max_tokens": 1, "prompt_logprobs": 1}
    choice = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["10"]["logprob"] == -2.5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_status_streaming_or_not(served: Served, stream: bool) -> None:
    served.engine.refuse = QueueFullError("The queue is full.", retry_after_s=3)
    body = {"prompt": "x", "stream": stream}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == 503


async def test_death_before_the_first_token_is_500(served: Served) -> None:
    served.engine.fail_at = 0
    response = await served.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"


async def test_death_in_mid_stream_is_an_event(served: Served) -> None:
    served.engine.fail_at = 2
    body = {"prompt": "x", "stream": True}
    *chunks, last = events_of(await served.client.post("/v1/completions", json=body))
    assert len(chunks) == 2
    assert last["error"]["code"] == 500


async def test_request_id_becomes_part_of_the_id(serve: Any) -> None:
    served = serve(enable_request_id_headers=True)
    headers = {"X-Request-Id": "bench-1"}
    response = await served.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.json()["id"] == "cmpl-bench-1"
    assert response.headers["x-request-id"] == "bench-1"
    again = await served.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert again.json()["id"] == "cmpl-bench-1"
    ids = [job[2] for job in served.engine.jobs]
    assert len(set(ids)) == 2  # the engine's ids differ
    unnamed = await served.client.post("/v1/completions", json={"prompt": "x"})
    assert unnamed.json()["id"] == "cmpl-" + unnamed.headers["x-request-id"]
    named = await served.client.post("/v1/completions", json={"prompt": "x", "request_id": "r"})
    assert named.json()["id"] == "cmpl-r"


async def test_unknown_fields_are_listed(served: Served) -> None:
    body = {"prompt": "x", "foo": 1, "bär\r\n": 2, "user": "u", "repetition_penalty": 1.0}
    response = await served.client.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "foo, b\\xe4r??, user"


async def test_requests_are_logged_when_asked(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm")
    served = serve(enable_log_requests=True, max_log_len=4)
    await served.client.post("/v1/completions", json={"prompt": "Hello there"})
    assert "prompt: 'Hell'" in caplog.text


async def test_a_prompt_alone_is_scored(served: Served) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = (await served.client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == served.context.tokenizer.decode([5, 6, 7, 8])
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)
    # Without the prompt there would be nothing to tell.
    refused = await served.client.post("/v1/completions", json={**body, "echo": False})
    assert refused.json()["error"]["param"] == "max_tokens"
