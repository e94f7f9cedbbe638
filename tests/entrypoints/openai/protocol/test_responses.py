"""Response bodies."""

import json

import msgspec

from vllm.entrypoints.openai.protocol.responses import ChatChunkChoice, ChatDelta, CompletionChoice


def test_unset_fields_are_left_out() -> None:
    choice = json.loads(msgspec.json.encode(CompletionChoice(0, "x")))
    assert choice == {
        "index": 0,
        "text": "x",
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
    delta = json.loads(msgspec.json.encode(ChatChunkChoice(0, ChatDelta(content="x"))))
    assert delta["delta"] == {"content": "x"}
