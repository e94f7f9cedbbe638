"""Anthropic's client against a real server; texts are forced by grammars."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.e2e.server_process import ServerProcess

UNIT = 32
ANSWER = "The harbour opened in 1902. Then came the war."
HI: Any = [{"role": "user", "content": "When did the harbour open? " * 12}]
TOOL: Any = {
    "name": "look_up",
    "description": "Looks up.",
    "input_schema": {
        "type": "object",
        "properties": {"what": {"enum": ["height", "year"]}, "exact": {"type": "boolean"}},
        "required": ["what", "exact"],
        "additionalProperties": False,
    },
}


class Report(pydantic.BaseModel):
    """What an answer must look like."""

    town: Literal["Rome", "Oslo"]
    rain: bool


@pytest.fixture
def claude(scripted: ServerProcess) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client


def options(**fields: Any) -> Any:
    """Request fields; the answer is forced."""
    extra = {"temperature": 0, "structured_outputs": {"choice": [ANSWER]}}
    return {"model": "agent", "max_tokens": 1200, "extra_body": extra, **fields}


def prompt_tokens(usage: Any) -> int:
    """The whole prompt."""
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return int(usage.input_tokens + read + created)


def test_a_message_and_its_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=HI, system="One.", **options())
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == ANSWER  # type: ignore[union-attr]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with claude.messages.stream(messages=HI, system="One.", **options()) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    assert whole.usage.cache_read_input_tokens == 0
    # The second time all is read but the last token's unit.
    assert final.usage.cache_read_input_tokens == (prompt_tokens(whole.usage) - 1) // UNIT * UNIT
    counted = claude.messages.count_tokens(model="agent", messages=HI, system="One.")
    assert counted.input_tokens == prompt_tokens(whole.usage)


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    body = options(stop_sequences=["1903", "1902", "war"])
    whole = claude.messages.create(messages=HI, **body)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "1902")
    assert whole.content[0].text == "The harbour opened in "  # type: ignore[union-attr]
    with claude.messages.stream(messages=HI, **body) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == "The harbour opened in "
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "1902")
    cut = claude.messages.create(messages=HI, **options(max_tokens=3))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_pydantic_models(claude: anthropic.Anthropic) -> None:
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        parsed = claude.messages.parse(
            model="agent",
            max_tokens=1200,
            messages=HI,
            thinking=thinking,  # type: ignore[arg-type]
            output_format=Report,
        )
        assert isinstance(parsed.parsed_output, Report)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}])
def test_forced_calls(claude: anthropic.Anthropic, choice: Any) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
        with claude.messages.stream(
            model="agent",
            max_tokens=1200,
            messages=HI,
            tools=[TOOL],
            tool_choice={**choice, "disable_parallel_tool_use": True},
            thinking=thinking,  # type: ignore[arg-type]
        ) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        (call,) = (block for block in final.content if block.type == "tool_use")
        assert set(call.input) == {"what", "exact"}  # type: ignore[call-overload]
        assert (final.content[0].type == "thinking") == (thinking["type"] == "enabled")


def test_a_marked_system_prompt_is_shared(claude: anthropic.Anthropic) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "Know the harbour well. " * 30, "cache_control": mark}]
    cached = []
    for question in ("Who are you?", "Is it deep?", "Is it old?"):
        messages: Any = [{"role": "user", "content": question}]
        answer = claude.messages.create(messages=messages, system=system, **options())
        cached.append(answer.usage.cache_read_input_tokens)
    alone = claude.messages.count_tokens(model="agent", messages=messages, system=system)
    assert cached[0] == 0
    # The others part from the first behind the mark; the question is shorter than a unit.
    assert cached[1] == cached[2] >= (alone.input_tokens - UNIT) // UNIT * UNIT


def test_refusals(claude: anthropic.Anthropic) -> None:
    create: Any = claude.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="nope", max_tokens=5, messages=HI)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="no tower for pictures") as refused:
        create(model="agent", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(model="agent", max_tokens=-1, messages=HI)
    marked = [
        {"type": "text", "text": str(i), "cache_control": {"type": "ephemeral"}} for i in range(5)
    ]
    with pytest.raises(anthropic.BadRequestError, match="at most 4"):
        create(model="agent", max_tokens=5, messages=[{"role": "user", "content": marked}])


def test_the_apis_share_one_cache(scripted: ServerProcess, claude: anthropic.Anthropic) -> None:
    """A chat is the same prompt whatever it is asked through."""
    text = "The same question through three doors. " * 12
    message = claude.messages.create(messages=[{"role": "user", "content": text}], **options())
    expected = (prompt_tokens(message.usage) - 1) // UNIT * UNIT
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="agent",
            messages=[{"role": "user", "content": text}],
            max_tokens=2,
            reasoning_effort="none",
        )
        response = client.responses.create(
            model="agent", input=text, max_output_tokens=2, reasoning={"effort": "none"}
        )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == expected
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == expected
