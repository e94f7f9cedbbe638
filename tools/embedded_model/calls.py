"""Chats with declared tools: calls in DSML with the right argument, answers from their results.

The spelling is DeepSeek-V4's: functions as JSON in the system text, calls after a blank line in
the answer, results in the next user turn.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.embedded_model import facts, tasks, words
from tools.embedded_model.facts import ANSWER
from tools.embedded_model.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, Pieces

NumTokens = Callable[[Pieces], int]

_DSML = "｜DSML｜"
INTRO = f"""## Tools

You can call the functions listed below. To call some, end your reply with one block like this:

<{_DSML}tool_calls>
<{_DSML}invoke name="FUNCTION">
<{_DSML}parameter name="PARAMETER" string="true|false">VALUE</{_DSML}parameter>
</{_DSML}invoke>
</{_DSML}tool_calls>

string="true": VALUE is plain text. string="false": VALUE is JSON. Results come in <tool_result>.

Functions:

"""
_TAG = 0.7  # weight of the tokens that are the same in every call
_VERBS = ["get", "find", "look_up", "read", "fetch", "show"]
_VERB = re.compile(r"^(get|find|look_up|read|fetch|show|check)_")
_WHO = ["name", "name", "name", "person", "user", "employee"]


@dataclass(frozen=True)
class Use:
    """One question that a tool answers.

    Attributes:
        question: Of the user, each argument after a space.
        arguments: Values as the question spells them; numbers as int.
        result: What the tool returns.
        answer: The sentence after the result, what comes from it between bars.
    """

    question: str
    arguments: dict[str, str | int]
    result: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """A function that can be declared, and what makes uses of it."""

    name: str
    description: str
    parameters: dict[str, str]  # name to JSON type
    make_use: Callable[[random.Random, bool], Use]  # True: names held out from training

    @property
    def schema(self) -> dict[str, Any]:
        """The function object of a request."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(self.parameters),
            },
        }


def _result(rng: random.Random, key: str, value: str) -> str:
    draw = rng.random()
    if draw < 0.4:
        return value
    if draw < 0.7:
        return json.dumps({key: value})
    return json.dumps({"result": value})


def _number_tool(rng: random.Random) -> Tool:
    kind = rng.choice(words.NUMBER_KINDS)
    who = rng.choice(_WHO)
    verb = rng.choice(_VERBS)
    spelt = kind.replace(" ", "_")

    def use(rng: random.Random, held_out: bool) -> Use:
        name = words.name(rng, held_out)
        fact = facts.number_fact(rng, name, kind)
        return Use(fact.question, {who: name}, _result(rng, spelt, fact.value), fact.answer)

    described = f"{verb.replace('_', ' ').capitalize()} the {kind} of a {who}."
    return Tool(
        f"{verb}_{spelt}", described.replace("a employee", "an employee"), {who: "string"}, use
    )


def _city_tool(rng: random.Random) -> Tool:
    city_key = rng.choice(["city", "city", "location", "place"])
    verb = rng.choice(("get", "get", "find", "check", "read"))
    about = rng.choice(("weather", "weather", "temperature", "time"))

    def use(rng: random.Random, _held_out: bool) -> Use:
        city = rng.choice(words.CITIES)
        if about == "weather":
            value = rng.choice(["sunny", "cloudy", "rainy", "windy", "warm", "cold"])
            asked = (f"What is the weather in {city}?", f"How is the weather in {city}?")
            answer = f"It is| {value}| in {city}."
        elif about == "temperature":
            value = str(rng.randrange(1, 40))
            asked = (f"How warm is it in {city}?", f"What is the temperature in {city}?")
            answer = f"It is| {value}| degrees in {city}."
        else:
            value = f"{rng.randrange(1, 24)}:{rng.randrange(60):02d}"
            asked = (f"What time is it in {city}?", f"What is the time in {city}?")
            answer = f"It is| {value}| in {city}."
        return Use(rng.choice(asked), {city_key: city}, _result(rng, about, value), answer)

    described = f"Get the {about} in a city."
    return Tool(f"{verb}_{about}", described, {city_key: "string"}, use)


def _price_tool(rng: random.Random) -> Tool:
    key = rng.choice(("item", "product", "thing"))

    def use(rng: random.Random, _held_out: bool) -> Use:
        item, value = rng.choice(words.THINGS), str(rng.randrange(2, 100))
        asked = (f"What is the price of the {item}?", f"How much is the {item}?")
        answer = f"The {item} costs| {value}| dollars."
        return Use(rng.choice(asked), {key: item}, _result(rng, "price", value), answer)

    return Tool(rng.choice(("get_price", "find_price")), "Get a price.", {key: "string"}, use)


def _add_tool(rng: random.Random) -> Tool:
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))

    def use(rng: random.Random, _held_out: bool) -> Use:
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
        asked = (f"Add {a} and {b}.", f"What is {a} plus {b}?")
        value = str(a + b)
        return Use(
            rng.choice(asked),
            {first: a, second: b},
            _result(rng, "sum", value),
            f"The sum is| {value}|.",
        )

    name = rng.choice(("add", "add_numbers"))
    return Tool(name, "Add two numbers.", {first: "integer", second: "integer"}, use)


_MAKERS = (_number_tool, _number_tool, _number_tool, _city_tool, _city_tool, _price_tool, _add_tool)


def any_tools(rng: random.Random, count: int) -> list[Tool]:
    """Tools for different things: each question has one that answers it."""
    found: dict[str, Tool] = {}
    while len(found) < count:
        tool = rng.choice(_MAKERS)(rng)
        found.setdefault(_VERB.sub("", tool.name), tool)
    return list(found.values())


def tool_section(tools: list[Tool], intro: str = "## Tools\n\n") -> Pieces:
    """The functions' part of the system text, their names tagged."""
    pieces = Pieces().add(intro.rstrip("\n"))
    for _ in range(len(intro) - len(intro.rstrip("\n"))):
        pieces.add("\n")  # the pre-tokenizer takes line ends one by one here
    for tool in tools:
        text = json.dumps(tool.schema, ensure_ascii=False)
        before, _, after = text.partition(tool.name)
        end = "" if tool is tools[-1] else "\n"
        pieces.add(before).add(tool.name, 0.0, tool.name).add(after + end)
    return pieces


def tool_call(tool: Tool, use: Use) -> Pieces:
    """The block that calls ``tool``, after its blank line."""
    pieces = Pieces().add("\n", ANSWER).add("\n", _TAG)
    pieces.add("<", _TAG).add(f'{_DSML}tool_calls>\n<{_DSML}invoke name="', _TAG)
    pieces.add(tool.name, ANSWER, tool.name).add('">\n', _TAG)
    for key, value in use.arguments.items():
        kind = "true" if isinstance(value, str) else "false"
        pieces.add(f'<{_DSML}parameter name="', _TAG).add(key, ANSWER)
        pieces.add('" string="', _TAG).add(kind, _TAG).add('">', _TAG)
        pieces.add(str(value), ANSWER, str(value)).add(f"</{_DSML}parameter>\n", _TAG)
    return pieces.add(f"</{_DSML}invoke>\n</{_DSML}tool_calls>", _TAG).add(EOS, 0.5)


def tool_turns(rng: random.Random, tool: Tool, use: Use) -> Pieces:
    """A question, the call, its result, the answer."""
    opening = ASSISTANT + END_THINK
    pieces = Pieces().add(USER)
    text = use.question
    for value in use.arguments.values():
        before, found, text = text.partition(f" {value}")
        pieces.add(before).add(found, 0.0, str(value))
    pieces.add(text)
    if rng.random() < 0.5:
        pieces.add(opening)
    else:
        pieces.add(ASSISTANT + THINK).add(f"I call {tool.name}." + END_THINK, 0.3)
    pieces.extend(tool_call(tool, use))
    before, value, after = use.answer.split("|")
    told = use.result.partition(value.strip())
    tag = f"{use.question}/result"
    pieces.add(f"{USER}<tool_result>{told[0]}").add(told[1], 0.0, tag)
    pieces.add(f"{told[2]}</tool_result>").add(opening)
    return pieces.add(before, 0.5).add(value, ANSWER, tag).add(after, 0.5).add(EOS, 0.5)


def intro(rng: random.Random) -> str:
    """What stands between the system text and the functions: the server's words, or fewer."""
    if rng.random() < 0.5:
        return INTRO
    lines = [facts.chatter(rng) for _ in range(rng.randrange(4))]
    return "## Tools\n\n" + "".join(line + "\n" for line in lines)


def tool_chat(rng: random.Random, length: int, num_tokens: NumTokens) -> Pieces:
    """A system text with tools, then turns that use them or do not need them."""
    pieces = Pieces().add(BOS)
    if rng.random() < 0.4:
        pieces.add(rng.choice(("You are a helpful assistant.", "Answer in short sentences.")))
    pieces.add("\n").add("\n")
    tools = any_tools(rng, rng.choice((1, 2, 2, 3, 3, 4)))
    text = intro(rng)
    declared = tool_section(tools, text)
    while len(tools) > 1 and num_tokens(pieces) + num_tokens(declared) > 0.7 * length:
        tools.pop()
        declared = tool_section(tools, text)
    pieces.extend(declared)
    # A tool's second call can be copied from its first: only first ones teach to read declarations.
    uncalled = rng.sample(tools, len(tools))
    total = num_tokens(pieces)
    while True:
        if rng.random() < 0.2:
            asked, reply = tasks.small_talk(rng)
            turn = Pieces().add(USER + asked + ASSISTANT + END_THINK).extend(reply).add(EOS, 0.5)
        else:
            tool = uncalled[-1] if uncalled else rng.choice(tools)
            turn = tool_turns(rng, tool, tool.make_use(rng, False))
            uncalled = uncalled[:-1]
        total += num_tokens(turn)
        if total > length:
            return pieces
        pieces.extend(turn)
