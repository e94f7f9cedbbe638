"""OpenAI's client of ``/v1/responses`` against a real server; texts are forced by grammars."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.server_process import ServerProcess

UNIT = 32
ANSWERS = ["The lighthouse is 31 metres tall.", "The harbour opened in 1902."]
TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Looks up.",
    "parameters": {
        "type": "object",
        "properties": {"what": {"enum": ["height", "year"]}, "exact": {"type": "boolean"}},
        "required": ["what", "exact"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Report(pydantic.BaseModel):
    """What an answer must look like."""

    town: Literal["Rome", "Oslo"]
    rain: bool


@pytest.fixture
def agent(scripted: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    url = scripted.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def forced(*choices: str) -> dict[str, Any]:
    """Request fields that leave the model no other answers."""
    return {"structured_outputs": {"choice": list(choices)}}


QUIET: Any = {"model": "agent", "temperature": 0, "reasoning": {"effort": "none"}}


def test_a_conversation_is_stored_read_and_deleted(agent: openai.OpenAI) -> None:
    responses = agent.responses
    first = responses.create(
        **QUIET, input="How tall? " * 20, metadata={"a": "b"}, extra_body=forced(ANSWERS[0])
    )
    assert (first.status, first.output_text) == ("completed", ANSWERS[0])
    second = responses.create(
        **QUIET, input="When?", previous_response_id=first.id, extra_body=forced(ANSWERS[1])
    )
    assert second.output_text == ANSWERS[1]
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    # At least the whole first prompt: a forced answer may be spelled in unusual tokens.
    assert first.usage.input_tokens // UNIT * UNIT <= cached <= first.usage.total_tokens
    assert responses.retrieve(first.id) == first
    listed = list(responses.input_items.list(second.id))
    assert [item.type for item in listed] == ["message"]
    counted = responses.input_tokens.count(
        model="agent",
        input="When?",
        previous_response_id=first.id,
        reasoning={"effort": "none"},
    )
    assert counted.input_tokens == second.usage.input_tokens
    responses.delete(first.id)
    for call in (responses.retrieve, responses.delete, responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError):
        responses.create(**QUIET, input="x", previous_response_id=second.id)


def test_pydantic_models(agent: openai.OpenAI) -> None:
    parsed = agent.responses.parse(**QUIET, input="Report.", text_format=Report)
    assert isinstance(parsed.output_parsed, Report)
    with agent.responses.stream(**QUIET, input="Report.", text_format=Report) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text
    assert final.output_parsed == parsed.output_parsed
    thinking = agent.responses.parse(model="agent", input="Report.", text_format=Report)
    assert thinking.output[0].type == "reasoning"
    assert isinstance(thinking.output_parsed, Report)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_forced_calls(agent: openai.OpenAI, choice: Any) -> None:
    for reasoning in ({"effort": "none"}, {"effort": "low"}):
        with agent.responses.stream(
            model="agent",
            input="Go.",
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            reasoning=reasoning,  # type: ignore[arg-type]
            temperature=0,
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["look_up"]
        arguments = json.loads(calls[0].arguments)
        assert arguments["what"] in ("height", "year")
        assert isinstance(arguments["exact"], bool)
        assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_cut_response(agent: openai.OpenAI) -> None:
    body: Any = {**QUIET, "input": "x", "max_output_tokens": 2, "extra_body": forced(ANSWERS[0])}
    cut = agent.responses.create(**body)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert cut.usage.output_tokens == 2
    events = list(agent.responses.create(stream=True, **body))
    assert events[-1].type == "response.incomplete"


def test_background(agent: openai.OpenAI) -> None:
    long: Any = {**QUIET, "input": "x", "background": True, "extra_body": {"ignore_eos": True}}
    running = agent.responses.create(max_output_tokens=4000, **long)
    assert running.status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="not complete"):
        agent.responses.create(**QUIET, input="x", previous_response_id=running.id)
    assert agent.responses.cancel(running.id).status == "cancelled"
    assert agent.responses.retrieve(running.id).status == "cancelled"
    stream = agent.responses.create(stream=True, max_output_tokens=30, **long)
    told = list(stream)
    created: Any = told[0]
    again = list(agent.responses.retrieve(created.response.id, stream=True, starting_after=3))
    assert again == told[4:]
    done = agent.responses.retrieve(created.response.id)
    assert done.status == "incomplete"
    assert done.usage is not None
    assert done.usage.output_tokens == 30


def test_refusals(agent: openai.OpenAI) -> None:
    create: Any = agent.responses.create
    with pytest.raises(openai.BadRequestError, match="custom"):
        create(**QUIET, input="x", tools=[{"type": "custom", "name": "patch"}])
    for url, why in (("data:,", "not base64"), ("data:image/png;base64,AA==", "no tower")):
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        with pytest.raises(openai.BadRequestError, match=why):
            create(**QUIET, input=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.NotFoundError, match="nope"):
        create(model="nope", input="x")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens") as raised:
        create(**QUIET, input="x", max_output_tokens=10**6)
    assert raised.value.param == "max_output_tokens"
