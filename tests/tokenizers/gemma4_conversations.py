"""Random conversations for Gemma 4's format: tools of odd schemas, calls, results, thoughts."""

import json
import random
from typing import Any

_WORDS = ("Oslo", "a b", "", "é\n\u4e2d", ' "x" ', "{k:v}", "<b>", "it's", "\t5", "1.0")
_KEYS = ("b", "A", "a", "Zeta", "key name", "n", "\u00e4", "type", "required")
_KINDS = ("string", "number", "integer", "boolean", "array", "object", "STRING")
MARKS = (
    *("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
"""The special tokens of the format."""


def draw_value(rng: random.Random, depth: int = 2) -> Any:
    """Return a JSON value."""
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [draw_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        keys = rng.sample(_KEYS, rng.randrange(4))
        return {key: draw_value(rng, depth - 1) for key in keys}
    return (rng.choice(_WORDS), rng.randrange(-99, 10**6), 1.5, None, rng.random() < 0.5)[kind]


def draw_schema(rng: random.Random, depth: int = 2) -> Any:
    """Return the schema of one field."""
    if rng.random() < 0.05:
        return True
    kind = rng.choice(_KINDS if depth else _KINDS[:4])
    schema: dict[str, Any] = {"type": rng.choice([kind, kind, kind, [kind, "null"]])}
    if rng.random() < 0.1:
        del schema["type"]
    if rng.random() < 0.6:
        schema["description"] = rng.choice(_WORDS)
    if rng.random() < 0.3:
        schema["nullable"] = rng.random() < 0.7
    if rng.random() < 0.3:
        schema["enum"] = [rng.choice(_WORDS) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.2:
        schema["title"] = "T"
    if kind == "array" and rng.random() < 0.8:
        schema["items"] = draw_schema(rng, depth - 1)
    if kind == "object" and rng.random() < 0.7:
        schema["properties"] = draw_properties(rng, depth - 1)
        if rng.random() < 0.5:
            schema["required"] = rng.sample(_KEYS, rng.randrange(3))
    return schema


def draw_properties(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return fields by name."""
    return {key: draw_schema(rng, depth) for key in rng.sample(_KEYS, rng.randrange(4))}


def draw_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Return one to three tools, some of them with hardly a schema."""
    tools = []
    for name in rng.sample(("look", "now", "find_all"), rng.randrange(1, 4)):
        function: dict[str, Any] = {"name": name}
        if rng.random() < 0.8:
            function["description"] = rng.choice(_WORDS)
        if rng.random() < 0.8:
            function["parameters"] = {"type": "object", "properties": draw_properties(rng, 2)}
            if rng.random() < 0.6:
                function["parameters"]["required"] = rng.sample(_KEYS, rng.randrange(3))
            if rng.random() < 0.1:
                del function["parameters"]["type"]
        if rng.random() < 0.15:
            function["response"] = {"type": "object", "description": rng.choice(_WORDS)}
        tools.append({"type": "function", "function": function})
    return tools


def _draw_content(rng: random.Random) -> Any:
    texts = [f"{rng.choice(_WORDS)} said {rng.randrange(100)} " for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.8:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def draw_messages(rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that a client may send; arguments of calls are objects."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": _draw_content(rng)})
    for turn in range(rng.randrange(1, 4)):
        if rng.random() < 0.9 or not messages:
            messages.append({"role": "user", "content": _draw_content(rng)})
        if rng.random() < 0.05:
            messages.append({"role": "system", "content": "Again: be brief."})
        for step in range(rng.randrange(3)):
            answer: dict[str, Any] = {"role": "assistant", "content": ""}
            if rng.random() < 0.7:
                answer["content"] = rng.choice(
                    (" Well. ", "No", "<|channel>thought\nold\n<channel|>Yes", "a<channel|>b")
                )
            if rng.random() < 0.4:
                answer["reasoning"] = rng.choice(("I see.", "two\nlines ", "so"))
            if rng.random() < 0.6:
                ids = [f"c{turn}{step}{k}" for k in range(rng.randrange(1, 3))]
                answer["tool_calls"] = [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {
                            "name": rng.choice(("look", "now")),
                            "arguments": {
                                key: draw_value(rng) for key in rng.sample(_KEYS, rng.randrange(4))
                            },
                        },
                    }
                    for call_id in ids
                ]
                messages.append(answer)
                for call_id in ids[: rng.choice((2, 2, 2, 1, 0))]:
                    result: dict[str, Any] = {"role": "tool", "content": _draw_content(rng)}
                    if rng.random() < 0.9:
                        result["tool_call_id"] = call_id
                    if rng.random() < 0.3:
                        result["name"] = "found"
                    messages.append(result)
                continue
            messages.append(answer)
    return messages


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as clients send them: arguments of calls are texts."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent
