"""OpenAI's client against a real server: everything a program may rely on."""

import itertools
from typing import Any

import openai
import pytest

from tests.e2e.server_process import ServerProcess

MODEL = "deepseek-v4"
MESSAGES: Any = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is a block table?"},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert client.models.retrieve(MODEL) == card
    extra = card.model_extra or {}
    assert (extra["root"], extra["max_model_len"]) == (MODEL, 16384)
    assert "embedded" in extra["note"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 20, **GREEDY}
    whole = client.completions.create(**body)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **body)
    )
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == "length"
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 20


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 16, **GREEDY}
    body["reasoning_effort"] = "none"
    whole = client.chat.completions.create(**body)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks: Any = list(client.chat.completions.create(stream=True, **body))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == message.content
    assert chunks[-1].choices == []
    assert all(chunk.usage is not None for chunk in chunks)
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_content_parts_equal_plain_text(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi there"}]}]
    plain: Any = [{"role": "user", "content": "Hi there"}]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, **GREEDY)
        for messages in (parts, plain)
    ]
    assert answers[0].choices == answers[1].choices


def _boundary_stop(tokens: list[str], text: str) -> tuple[str, int]:
    """A string across two tokens whose first occurrence is there, and its place."""
    offset = 0
    for first, second in itertools.pairwise(tokens):
        offset += len(first)
        stop = first[-1:] + second[:1]
        if len(stop) == 2 and stop.isascii() and text.find(stop) == offset - 1 and offset > 4:
            return stop, offset - 1
    raise AssertionError(f"no two tokens fit: {tokens}")


# Special tokens have a name among the log probabilities, and no place in the text.
_ODD = ("bytes:", "<｜", "<think>", "</think>")


def _greedy_tokens(client: openai.OpenAI) -> tuple[str, list[str], str]:
    """A prompt, its greedy answer's tokens up to a partial or special one, and their text."""
    for prompt in ("Hello", "def f(", "The cache", "import", "a table of", "Once", "x = 1"):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, logprobs=0, **GREEDY
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        whole = list(itertools.takewhile(lambda t: not t.startswith(_ODD), logprobs.tokens))
        if len(whole) > 5:
            assert answer.choices[0].text.startswith("".join(whole))
            return prompt, whole, "".join(whole)
    raise AssertionError("every answer begins with partial characters or special tokens")


def test_stop_across_a_token_boundary(client: openai.OpenAI) -> None:
    prompt, tokens, text = _greedy_tokens(client)
    stop, place = _boundary_stop(tokens, text)
    body: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "stop": stop, **GREEDY}
    (choice,) = client.completions.create(**body).choices
    assert (choice.text, choice.finish_reason) == (text[:place], "stop")
    assert (choice.model_extra or {})["stop_reason"] == stop
    streamed = ""
    for chunk in client.completions.create(stream=True, **body):
        streamed += chunk.choices[0].text
        assert text[:place].startswith(streamed)  # nothing of the stop string ever shows
    assert streamed == text[:place]
    body["extra_body"] = {"ignore_eos": True, "include_stop_str_in_output": True}
    (choice,) = client.completions.create(**{**body, "stop": ["@@never@@", stop]}).choices
    assert choice.text == text[: place + len(stop)]


def test_n_and_seed(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 12, "n": 3, "temperature": 1.0}
    first = client.completions.create(seed=11, **body)
    again = client.completions.create(seed=11, **body)
    other = client.completions.create(seed=12, **body)
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3
    assert first.usage is not None
    assert again.usage is not None
    assert first.usage.prompt_tokens == len(_tokens_of(client, "Once")) + 1  # bos; once for all n
    assert first.usage.completion_tokens == again.usage.completion_tokens


def _tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    answer: Any = client.post(
        str(client.base_url).removesuffix("v1/") + "tokenize",
        body={"prompt": text, "add_special_tokens": False},
        cast_to=object,
    )
    return list(answer["tokens"])


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["Hello", "The cache", "Once"]
    body: Any = {"model": MODEL, "max_tokens": 6, **GREEDY}
    together = client.completions.create(prompt=prompts, **body)
    alone = [client.completions.create(prompt=prompt, **body) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    ids = [_tokens_of(client, prompt) for prompt in prompts]
    by_ids = client.completions.create(prompt=ids, **body)
    assert len(by_ids.choices) == 3


def test_logprobs_in_both_dialects(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=4, logprobs=3, echo=True, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens + 4
    assert logprobs.token_logprobs[0] is None
    for top, own in zip(logprobs.top_logprobs[-4:], logprobs.token_logprobs[-4:], strict=True):
        assert max(top.values()) == pytest.approx(own)  # greedy takes the most likely
    chat = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="none",  # all that is said is content
        **GREEDY,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.bytes
    spelled = b"".join(bytes(entry.bytes or []) for entry in content)
    assert spelled.decode(errors="replace") == chat.choices[0].message.content


def test_scores_do_not_depend_on_what_is_generated(client: openai.OpenAI) -> None:
    """lm-eval scores with one token and leaves the last entry out: also one that ends an answer."""
    told = "The access code of Mira is 4827."
    ask = f"<｜User｜>{told} What is the access code of Mira?<｜Assistant｜></think>{told}"
    scores = []
    for num_tokens in (0, 1):
        answer = client.completions.create(
            model=MODEL, prompt=ask, max_tokens=num_tokens, logprobs=1, echo=True, temperature=0
        )
        (choice,) = answer.choices
        assert choice.text == ask
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        scores.append(choice.logprobs.token_logprobs)
    assert choice.finish_reason == "stop"
    assert len(scores[1]) == len(scores[0]) + 1
    assert scores[1][1:-1] == pytest.approx(scores[0][1:])


def test_a_resend_is_read_from_the_cache(client: openai.OpenAI, server: ServerProcess) -> None:
    prompt = " ".join(f"resend{i}" for i in range(120))
    body: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **GREEDY}
    hits_before = server.metric("vllm:prefix_cache_hits_total")
    first, second = (client.completions.create(**body) for _ in range(2))
    assert first.usage is not None
    assert second.usage is not None
    details = [answer.usage.prompt_tokens_details for answer in (first, second) if answer.usage]
    assert details[0] is not None
    assert details[1] is not None
    assert details[0].cached_tokens == 0
    num_prompt = second.usage.prompt_tokens
    assert details[1].cached_tokens == (num_prompt - 1) // 32 * 32
    assert first.choices == second.choices
    server.wait_idle()
    hits = server.metric("vllm:prefix_cache_hits_total") - hits_before
    assert hits == details[1].cached_tokens


def test_cached_tokens_add_up_over_prompts(client: openai.OpenAI) -> None:
    long = " ".join(f"batch{i}" for i in range(80))
    client.completions.create(model=MODEL, prompt=long, max_tokens=1, **GREEDY)
    counts = []
    for prompts in ([long, "zz"], ["zz", long]):
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=1, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        counts.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == counts[1]
    assert counts[0] is not None
    assert counts[0] > 0


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    prompt = " ".join(f"salted{i}" for i in range(80))
    cached = []
    for salt in ("a", "b", "a"):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_tokenization_round_trip(server: ServerProcess) -> None:
    text = "def main():  # Grüße, 世界 🙂\n    return 1"
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 16384
    back = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}
    chat = server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True}).json()
    assert chat["token_strs"][0] == "<｜begin▁of▁sentence｜>"
    assert len(chat["token_strs"]) == chat["count"]


def test_thinking_can_be_switched_off(server: ServerProcess) -> None:
    ends = {}
    for thinking in (True, False):
        body = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": thinking}}
        tokens = server.post("/tokenize", {**body, "return_token_strs": True}).json()
        ends[thinking] = tokens["token_strs"][-1]
    assert ends == {True: "<think>", False: "</think>"}


def test_request_id(client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "my-own-id"}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers=headers
    )
    assert answer.id == "chatcmpl-my-own-id"


def test_unknown_fields_are_named(server: ServerProcess) -> None:
    response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "colour": "red"})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "colour"


def test_operations_routes(server: ServerProcess) -> None:
    for path in ("/health", "/ready", "/ping", "/docs"):
        assert server.get(path).status_code == 200
    assert "independent" in server.get("/version").json()["description"]
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/ready"} <= set(paths)


def test_metrics_have_the_names_dashboards_read(server: ServerProcess) -> None:
    server.post("/v1/completions", {"prompt": "count me", "max_tokens": 4, "ignore_eos": True})
    server.wait_idle()
    text = server.get("/metrics").text
    for name in (
        "vllm:num_requests_running{",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "vllm:prompt_tokens_total{",
        "vllm:generation_tokens_total{",
        "vllm:num_preemptions_total{",
        "vllm:time_to_first_token_seconds_bucket{",
        "vllm:inter_token_latency_seconds_bucket{",
        "vllm:e2e_request_latency_seconds_bucket{",
        "vllm:request_queue_time_seconds_sum{",
        "vllm:request_prefill_time_seconds_sum{",
        "vllm:request_decode_time_seconds_sum{",
        "vllm:request_inference_time_seconds_sum{",
        "vllm:request_prompt_tokens_bucket{",
        "vllm:request_generation_tokens_bucket{",
        "vllm:request_params_n_bucket{",
        "vllm:request_params_max_tokens_bucket{",
        "vllm:iteration_tokens_total_bucket{",
        "vllm:cache_config_info{",
        "http_requests_total{",
        "process_resident_memory_bytes",
    ):
        assert name in text, name
    assert 'block_size="32"' in text
    assert 'model_name="deepseek-v4"' in text
    assert server.metric("vllm:request_success_total", finished_reason="length") >= 1
    assert server.metric("vllm:time_to_first_token_seconds_count") >= 1
