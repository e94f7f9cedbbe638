"""Structured output as OpenAI's client asks for it, against a real server."""

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.server_process import ServerProcess

MODEL = "deepseek-v4"
# How pieces are joined and grammars compiled is the same on all platforms; masks are not.
ONCE = pytest.mark.parametrize("platform", ["cpu"], indirect=True)
USER: Any = [{"role": "user", "content": "The lamp of Ada is red. Describe the lamp."}]
# The model's reasoning has no end of its own that a test could wait for.
QUIET: dict[str, Any] = {"reasoning_effort": "none", "max_tokens": 300, "seed": 3}


class Lamp(BaseModel):
    """Short in every field, so that any model comes to an end."""

    model_config = ConfigDict(extra="forbid")
    owner: str = Field(max_length=8)
    colour: Literal["red", "green", "blue"]
    watts: int = Field(ge=0, le=99)


def test_parse_with_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Lamp, temperature=1.0, **QUIET
    )
    lamp = answer.choices[0].message.parsed
    assert isinstance(lamp, Lamp)


@ONCE
def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "lamp", "strict": True, "schema": Lamp.model_json_schema()},
    }
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "response_format": schema, **QUIET}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(stream=True, **asked)
        if chunk.choices
    ]
    assert "".join(pieces) == whole
    Lamp.model_validate_json(whole or "")


def test_the_grammar_waits_for_the_end_of_the_reasoning(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="<｜User｜>Yes or no?<｜Assistant｜><think>",
        max_tokens=60,
        extra_body={
            "thinking_token_budget": 12,
            "structured_outputs": {"choice": ["yes", "no"]},
            "skip_special_tokens": False,
            "return_token_ids": True,
        },
    )
    (choice,) = answer.choices
    _, end, rest = choice.text.partition("</think>")
    assert end
    assert rest.removesuffix("<｜end▁of▁sentence｜>") in ("yes", "no")
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": [1]}}}},
            r"\[\s*1\s*\]",
        ),
        ({"allowed_token_ids": [45], "max_tokens": 4}, r"(.)\1\1\1"),
    ],
)
def test_other_fields(server: ServerProcess, fields: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "Say: ", "max_tokens": 60, **fields}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text), text


def test_an_echoed_prompt_can_be_cut_and_is_reported(server: ServerProcess) -> None:
    body = {"prompt": [20, 21, 22, 23, 24, 25], "echo": True, "logprobs": 1, "max_tokens": 2}
    body |= {"truncate_prompt_tokens": 4, "return_token_ids": True}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    (choice,) = response["choices"]
    assert choice["prompt_token_ids"] == [22, 23, 24, 25]
    assert response["usage"]["prompt_tokens"] == 4
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 4 + 2


@ONCE
def test_a_hostile_schema_holds_nobody_up(server: ServerProcess) -> None:
    hostile = {"allOf": [{"multipleOf": n} for n in (997, 991, 983)]}
    body = {"prompt": "x", "stream": True, "structured_outputs": {"json": hostile}}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
        assert json.loads(response.text)["error"]["param"] == "structured_outputs"
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
