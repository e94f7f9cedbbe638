"""What differs first: against a comparison of all tokens, and of the rendered texts."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import Served
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.diagnosis.comparison import Comparison, NewRequest, compare
from vllm.entrypoints.openai.diagnosis.fingerprint import make_fingerprint, owner_digest
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, PreparedChat, prepare_chat
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_tools import ToolChoice, parse_tools

# Tools first, then the system text; what an answer is opened with does not stay in front of it.
TOOLS_FIRST = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>{% endif %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ '\nsystem: ' }}{% else %}{{ '<｜User｜>' if "
    "message.role == 'user' else '<｜Assistant｜>' }}{% endif %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% if reasoning_effort == 'high' %}think hard"
    "{% endif %}<think>{% endif %}"
)
OWNER = owner_digest(None, None)


@dataclass(frozen=True)
class Words:
    """A request, each part made of words that no other part has.

    Attributes:
        parts: The text of each part, by its name, where it has one.
        num_messages: Texts "0", "1", ... of users and assistants in turn.
    """

    parts: dict[str, str]
    num_messages: int
    effort: str | None = None
    model: str = "tiny"
    form: dict[str, Any] | None = None

    def task(self) -> ChatTask:
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": self.parts[str(i)]}
            for i in range(self.num_messages)
        ]
        if "system" in self.parts:
            messages.insert(0, {"role": "system", "content": self.parts["system"]})
        function = {"name": "look", "description": self.parts.get("tools")}
        tools = [{"type": "function", "function": function}] if "tools" in self.parts else []
        options = ChatOptions(reasoning_effort=self.effort)
        choice = ToolChoice("auto" if tools else "none")
        return ChatTask(messages, options, parse_tools(tools), choice)


def some_words(rng: random.Random, tag: str) -> str:
    return " ".join(f"{tag}{rng.randrange(1000)}" for _ in range(rng.randrange(3, 12)))


def edit_words(rng: random.Random, tag: str, text: str) -> str:
    words = text.split()
    at = rng.randrange(len(words))
    kind = rng.randrange(3)
    if kind == 0:
        words[at] = f"{tag}{rng.randrange(1000, 2000)}"
    elif kind == 1:
        words.insert(at, f"{tag}{rng.randrange(1000, 2000)}")
    else:
        words[at] += rng.choice("abc")
    return " ".join(words)


def some_request(rng: random.Random) -> Words:
    num_messages = 2 * rng.randrange(1, 4) - 1
    names = [str(i) for i in range(num_messages)]
    names += [name for name in ("system", "tools") if rng.random() < 0.7]
    parts = {name: some_words(rng, "m" + name if name.isdigit() else name) for name in names}
    return Words(parts, num_messages, rng.choice([None, "high", "max", "low"]))


def edited(rng: random.Random, old: Words) -> tuple[Words, set[str]]:
    """Another request, and the names of the parts that differ."""
    parts, changed = dict(old.parts), set[str]()
    for _ in range(rng.choice([1, 1, 2, 3])):
        names = [*map(str, range(old.num_messages)), "system", "tools", "reasoning_effort", "form"]
        name = rng.choice([*names, "model"]) if rng.random() < 0.9 else "model"
        changed.add(name)
    # Sorted, as a set of texts has another order in each process.
    for name in sorted(changed & {"system", "tools", *map(str, range(old.num_messages))}):
        tag = "m" + name if name.isdigit() else name
        if name in parts and (name.isdigit() or rng.random() < 0.7):
            parts[name] = edit_words(rng, tag, parts[name])
        elif name in parts:
            del parts[name]
        else:
            parts[name] = some_words(rng, tag)
    new = replace(old, parts=parts)
    if "reasoning_effort" in changed:
        others = [e for e in (None, "high", "max", "low") if e != old.effort]
        new = replace(new, effort=rng.choice(others))
    if "model" in changed:
        new = replace(new, model="alias")
    if "form" in changed:
        new = replace(new, form={"type": "json_object"})
    if rng.random() < 0.4:
        for i in range(new.num_messages, new.num_messages + 2):
            parts[str(i)] = some_words(rng, f"m{i}")
        new = replace(new, num_messages=new.num_messages + 2)
    return new, changed


def regions(text: str, words: Words) -> Iterator[tuple[str, int]]:
    """The parts of a text with where each ends, in their order; an effort's words come first."""
    found = {name: text.find(part) for name, part in words.parts.items()}
    end = 0
    ends = {name: at + len(words.parts[name]) for name, at in found.items()}
    first = min(found.values())
    if "effort" in text[:first]:
        yield "reasoning_effort", text.index("\n\n") + 2
    for name in sorted(found, key=lambda name: found[name]):
        end = ends[name]
        if name == "tools":  # what stands behind the words is the section's
            end = text.find("</tools>", end) + 8 if "</tools>" in text else text.index("}", end) + 1
        yield name, end


def part_at(place: int, text: str, words: Words) -> str:
    return next((name for name, end in regions(text, words) if place < end), "reasoning_effort")


def first_of(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def prepared(words: Words, context: ServingContext) -> PreparedChat:
    return await prepare_chat(words.task(), context)


async def compared(old: Words, new: Words, context: ServingContext) -> Comparison:
    before, chat = await prepared(old, context), await prepared(new, context)
    request = ChatCompletionRequest(messages=[])
    earlier = make_fingerprint(
        before, request.model_copy(update={"response_format": old.form}), old.model, OWNER
    )
    own = make_fingerprint(
        chat, request.model_copy(update={"response_format": new.form}), new.model, OWNER
    )
    return compare(earlier, NewRequest(own, chat, context.chat_encoder))


@pytest.fixture(params=["deepseek_v4", "tools_first"])
def context(
    request: pytest.FixtureRequest, serve: Callable[..., Served], tokenizer: Tokenizer
) -> ServingContext:
    """A server with a chat format."""
    served = serve(served_model={"max_model_len": 4096})
    if request.param == "deepseek_v4":
        return served.context
    encoder = make_chat_encoder({"model_type": "llama"}, tokenizer, TOOLS_FIRST)
    return replace(served.context, chat_encoder=encoder)


async def test_the_first_difference_is_that_of_a_comparison_of_everything(
    context: ServingContext,
) -> None:
    rng = random.Random(46)
    num_several = 0
    for _ in range(250):
        old = some_request(rng)
        new, changed = edited(rng, old)
        one, other = await prepared(old, context), await prepared(new, context)
        found = await compared(old, new, context)
        offset = first_of(one.prompt.token_ids, other.prompt.token_ids)
        assert found.num_shared == offset
        first = found.difference
        if "model" in changed:
            assert first is not None
            assert (first.component, first.token_offset) == ("model", 0)
            continue
        if offset == min(len(one.prompt.token_ids), len(other.prompt.token_ids)):
            assert first is None or first.component in ("reasoning_effort", "text_format")
            continue
        texts = [str(chat.prompt.text) for chat in (one, other)]
        place = first_of(*texts)
        near = [part_at(place, text, words) for text, words in zip(texts, (old, new), strict=True)]
        there = [name for name in near if name in changed]
        if not there:  # the texts part where an answer is opened, or one is appended
            assert first is None or first.component in ("reasoning_effort", "text_format"), near
            continue
        num_several += len(changed) > 1
        assert first is not None, (old, new, changed)
        # Of a text that only one of them has, and what stands there in the other: it comes first.
        order = ["tools", "system"] if "<tools>" in "".join(texts) else ["system", "tools"]
        order += map(str, range(new.num_messages))
        name = min(there, key=lambda part: order.index(part) if part in order else -1)
        told = first.component if first.message_index is None else str(first.message_index)
        assert (told, first.token_offset) == (name, offset), (old, new, changed, near)
    assert num_several > 50
