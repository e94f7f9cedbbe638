"""Mistral's chats where the checkpoint has no template; the texts are mistral-common's."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.tokenizers.family_tokenizers import byte_level
from vllm.parser.registry import choose_parsers
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_encoder import find_templates
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.mistral_template import find_mistral_template

TOKENS = {
    3: [
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    7: ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"],
    11: ["[ARGS]", "[CALL_ID]"],
    13: ["[THINK]", "[/THINK]"],
}
TOOLS = parse_tools([{"type": "function", "function": {"name": "look"}}])
_SHOWN = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look", "description": "", '
    '"parameters": {}}}][/AVAILABLE_TOOLS]'
)


def _call(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLED = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Look"},
    {"role": "user", "content": "there"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call("abcdefghi", '{"a":1}'), _call("abcdefghj", "{}")],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
    {"role": "tool", "tool_call_id": "abcdefghj", "content": 'é "x"'},
]
WANTED = {
    3: f"<s>[INST]Hi[/INST]Hello</s>{_SHOWN}[INST]Be good.\n\nLook\n\nthere[/INST]"
    '[TOOL_CALLS][{"name": "look", "arguments": {"a":1}, "id": "abcdefghi"}, '
    '{"name": "look", "arguments": {}, "id": "abcdefghj"}]</s>'
    '[TOOL_RESULTS]{"content": 7, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": "é \\"x\\"", "call_id": "abcdefghj"}[/TOOL_RESULTS]',
    7: "<s>[SYSTEM_PROMPT]Be good.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>"
    f"{_SHOWN}[INST]Look\n\nthere[/INST]"
    '[TOOL_CALLS][{"name": "look", "arguments": {"a":1}, "id": "abcdefghi"}, '
    '{"name": "look", "arguments": {}, "id": "abcdefghj"}]</s>'
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]7[/TOOL_RESULTS]"
    '[TOOL_RESULTS]abcdefghj[TOOL_CONTENT]é "x"[/TOOL_RESULTS]',
    11: "<s>[SYSTEM_PROMPT]Be good.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>"
    f"{_SHOWN}[INST]Look\n\nthere[/INST]"
    '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"a":1}[TOOL_CALLS]look[CALL_ID]abcdefghj[ARGS]{}</s>'
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]7[/TOOL_RESULTS]"
    '[TOOL_RESULTS]abcdefghj[TOOL_CONTENT]é "x"[/TOOL_RESULTS]',
    13: f"<s>[SYSTEM_PROMPT]Be good.[/SYSTEM_PROMPT]{_SHOWN}[INST]Hi[/INST]Hello</s>"
    "[INST]Look\n\nthere[/INST]"
    '[TOOL_CALLS]look[ARGS]{"a":1}[TOOL_CALLS]look[ARGS]{}</s>'
    '[TOOL_RESULTS]7[/TOOL_RESULTS][TOOL_RESULTS]é "x"[/TOOL_RESULTS]',
}


def _tokenizer(folder: Path, version: int) -> Tokenizer:
    """A vocabulary with the tokens of a version, and no template."""
    backend = byte_level().backend
    tokens = [token for brought, new in TOKENS.items() if brought <= version for token in new]
    backend.add_special_tokens([AddedToken(token) for token in ["<s>", "</s>", *tokens]])
    (folder / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("version", list(WANTED))
def test_texts_are_those_of_mistral_common(tmp_path: Path, version: int) -> None:
    tokenizer = _tokenizer(tmp_path, version)
    encoder = make_chat_encoder({"model_type": "mistral"}, tokenizer)
    prompt = encoder.encode_chat(CALLED, ChatOptions(tools=TOOLS))
    assert tokenizer.decode(prompt.token_ids) == WANTED[version]
    assert prompt.token_ids[0] == tokenizer.token_to_id("<s>")
    assert "[INST]" not in tokenizer.decode(prompt.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("version", "tools", "reasoning"),
    [
        (3, "mistral", "none"),
        (7, "mistral", "none"),
        (11, "mistral_v11", "none"),
        (13, "mistral_v11", "mistral"),
    ],
)
def test_answers_are_read_in_the_same_format(
    tmp_path: Path, version: int, tools: str, reasoning: str
) -> None:
    templates = find_templates({}, _tokenizer(tmp_path, version))
    assert templates is not None
    choice = choose_parsers("mistral", templates.for_tools)
    assert (choice.tools, choice.reasoning) == (tools, reasoning)


def test_reasoning_and_a_continued_answer(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, 13)
    encoder = make_chat_encoder({}, tokenizer)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "So."},
    ]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    said = tokenizer.decode(encoder.encode_chat(messages, options).token_ids)
    assert said == "<s>[INST]Hi[/INST][THINK]So.[/THINK]Hello"


def test_other_vocabularies_and_templates_of_ones_own_win(tmp_path: Path) -> None:
    assert find_mistral_template(byte_level()) is None
    templates = find_templates({}, _tokenizer(tmp_path, 3), "{{ messages[0].content }}")
    assert templates is not None
    assert templates.default == "{{ messages[0].content }}"
