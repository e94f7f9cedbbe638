"""Tools and reasoning over a real server, whose model says what the script below says."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.scripted_checkpoint import write_scripted_v4
from tests.e2e.server_process import ServerProcess

_UNIT = 32
_D = "｜DSML｜"
_EOS = "<｜end▁of▁sentence｜>"
# Cut so that every piece stands once, and none looks like a tag: grammars take <...> for special.
SCRIPT = {
    "<think>": [
        "I must look ",
        "this up.",
        "</think>",
        "Let me",
        " see.",
        f"\n\n<{_D}tool_calls>\n<{_D}invoke",
        ' name="look">\n<',
        f'{_D}parameter name="city" string="true">',
        "Os",
        "lo\nü",
        f'</{_D}parameter>\n<{_D}parameter name="days" string="false">3',
        f"</{_D}parameter>\n</{_D}invoke>\n<",
        f'{_D}invoke name="now">\n</',
        f"{_D}invoke>\n</{_D}tool_calls",
        ">",
        _EOS,
    ]
}
SAID = "I must look this up."
LOOK = {"city": "Oslo\nü", "days": 3}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks the weather up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "What day it is."}},
]
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "tools": TOOLS}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted_v4(folder / "checkpoint", SCRIPT)
    flags = ("--served-model-name", "tiny", "--enable-auto-tool-choice", "--max-model-len", "4096")
    flags += ("--tool-call-parser", "deepseek_v4", "--reasoning-parser", "deepseek_v4")
    environment = {"VLLM_ASCEND_REFERENCE": "0"}
    model = str(folder / "checkpoint")
    with ServerProcess(folder / "log.txt", *flags, environment=environment, model=model) as server:
        yield server.url
        server.wait_idle()


@pytest.fixture
def scripted(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def _check_calls(calls: Any) -> None:
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("look", LOOK),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2


def _whole(client: openai.OpenAI, messages: list[Any], **options: Any) -> tuple[Any, Any]:
    completion = client.chat.completions.create(messages=messages, **OPTIONS, **options)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    return choice.message, completion.usage


def _streamed(client: openai.OpenAI, messages: list[Any], **options: Any) -> tuple[Any, Any]:
    """The same through the client's own helper, which checks and joins the deltas."""
    with client.chat.completions.stream(
        messages=messages, stream_options={"include_usage": True}, **OPTIONS, **options
    ) as stream:
        kinds = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    return choice.message, completion.usage


def test_ten_turns_of_an_agent_hit_all_that_was_said(scripted: openai.OpenAI) -> None:
    messages: list[Any] = list(ASK)
    num_known = 0
    for turn in range(10):
        # Whole and streamed in turns: what one says, the other must find in the cache.
        message, usage = (_whole, _streamed)[turn % 2](scripted, messages)
        assert message.content == "Let me see."
        assert message.reasoning == message.reasoning_content == SAID
        _check_calls(message.tool_calls)
        cached = usage.prompt_tokens_details.cached_tokens
        # The last token said was never computed with: nobody asked what follows it.
        assert turn == 0 or cached == (num_known - 1) // _UNIT * _UNIT
        num_known = usage.prompt_tokens + usage.completion_tokens
        sent_back = {
            "role": "assistant",
            "content": message.content,
            "reasoning_content": message.reasoning_content,
            "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})
                           for call in message.tool_calls],
        }  # fmt: skip
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} {turn}"}
            for call in reversed(message.tool_calls)
        ]
        messages += [sent_back, *results]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_can_be_forced(scripted: openai.OpenAI, choice: Any, thinking: bool) -> None:
    """Also while thinking: the model would say something first, and may not."""
    extra = {"chat_template_kwargs": {"thinking": thinking}}
    message, _ = _whole(scripted, ASK, tool_choice=choice, extra_body=extra, max_tokens=300)
    assert message.content is None
    assert getattr(message, "reasoning", None) == (SAID if thinking else None)
    names = [call.function.name for call in message.tool_calls]
    assert names == (["look", "now"] if choice == "required" else ["look"])
    assert json.loads(message.tool_calls[0].function.arguments) == LOOK


def test_a_function_the_model_would_not_call(scripted: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "now"}}
    message, _ = _whole(scripted, ASK, tool_choice=choice)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("now", "{}")
    ]


def test_calls_that_are_forbidden_are_not_shown(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(messages=ASK, tool_choice="none", **OPTIONS)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is None


def test_a_cut_off_call_is_not_told(scripted: openai.OpenAI) -> None:
    num_pieces = len(SCRIPT["<think>"])
    for max_tokens in range(1, num_pieces, 2):
        answer = scripted.chat.completions.create(messages=ASK, max_tokens=max_tokens, **OPTIONS)
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert (choice.message.content or "") in ("", "Let me", "Let me see.")
        assert _D not in choice.message.model_dump_json()
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] in ([], [LOOK], [LOOK, {}])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens


def test_a_cut_off_call_can_be_sent_back(scripted: openai.OpenAI) -> None:
    """Clients keep what a stream told of a call, and send that, no JSON, with the next turn."""
    parts: list[str] = []
    max_tokens = 0
    while '"' not in "".join(parts):
        max_tokens += 1
        stream = scripted.chat.completions.create(
            messages=ASK, max_tokens=max_tokens, stream=True, **OPTIONS
        )
        deltas = [c for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
        parts = [c.function.arguments or "" for c in deltas if c.function is not None]
    arguments = "".join(parts)
    with pytest.raises(ValueError, match=r"\w"):
        json.loads(arguments)
    function = {"name": "look", "arguments": arguments}
    call = {"id": deltas[0].id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": deltas[0].id, "content": "That was cut off."}
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    message, _ = _whole(scripted, [*ASK, said, result])
    _check_calls(message.tool_calls)


def test_several_answers_and_effort(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(
        messages=ASK, n=2, seed=1, reasoning_effort="high", **{**OPTIONS, "temperature": 1.0}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.tool_calls is not None
        _check_calls(choice.message.tool_calls)


class Look(pydantic.BaseModel):
    """Looks the weather up."""

    city: str
    days: int


def test_arguments_as_objects(scripted: openai.OpenAI) -> None:
    """The client's ``parse`` makes objects of the arguments, by the schema it sent."""
    tools = [openai.pydantic_function_tool(Look, name="look")]
    answer = scripted.chat.completions.parse(
        model="tiny", messages=ASK, tools=tools, tool_choice="required", temperature=0.0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Look(**LOOK)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_in_json_behind_the_reasoning(scripted: openai.OpenAI, thinking: bool) -> None:
    schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    answer = scripted.chat.completions.create(
        model="tiny",
        messages=ASK,
        temperature=0.0,
        response_format=form,
        extra_body={"chat_template_kwargs": {"thinking": thinking}},
    )
    message = answer.choices[0].message
    assert json.loads(message.content or "") == {"ok": True}
    assert getattr(message, "reasoning", None) == (SAID if thinking else None)


FORM: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "reply",
        "schema": {
            "type": "object",
            "properties": {"ok": {"const": True}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_calls_or_has_its_form(scripted: openai.OpenAI, thinking: bool) -> None:
    kwargs: dict[str, Any] = {"chat_template_kwargs": {"thinking": thinking}}
    for choice in ("auto", "required"):
        answer = scripted.chat.completions.create(
            messages=ASK, response_format=FORM, tool_choice=choice, extra_body=kwargs, **OPTIONS
        ).choices[0]
        calls = answer.message.tool_calls or []
        # Its script begins with a text: under the form it must call at once, or answer in JSON.
        if choice == "required" or calls:
            assert answer.finish_reason == "tool_calls"
            assert calls
        else:
            assert isinstance(json.loads(answer.message.content or ""), dict)
        assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_a_budget_ends_the_reasoning(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(
        messages=ASK, extra_body={"thinking_token_budget": 1}, **OPTIONS
    )
    message: Any = answer.choices[0].message
    assert message.reasoning == "I must look "
    assert message.content == "Let me see."
