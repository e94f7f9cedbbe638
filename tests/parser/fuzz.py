"""Broken answers of every family: well-formed ones, broken in the ways models break them.

``python -m tests.parser.fuzz --answers 100000 --seed 7`` reads so many and says what went wrong.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.parser.reading import D, told_calls
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.pieces import AnswerBuilder, ContentText, ParsedAnswer, Piece, ReasoningText
from vllm.parser.registry import ParserChoice
from vllm.tokenizers.chat_tools import parse_tools

Q = '<|"|>'
TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "run_shell",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "cmd": {"type": "string"},
                        "limit": {"type": ["integer", "null"]},
                        "opts": {"type": "object", "additionalProperties": {"type": "string"}},
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "deep": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                        "sure": {"type": "boolean"},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "find", "parameters": {}}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
NAMES = frozenset(tool.name for tool in TOOLS)
Arguments = dict[str, Any]


# ---- how families write -------------------------------------------------------------------------


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _xml(name: str, arguments: Arguments) -> str:
    fields = "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>"


def _glm(name: str, arguments: Arguments) -> str:
    pairs = arguments.items()
    fields = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in pairs
    )
    return f"<tool_call>{name}\n{fields}</tool_call>"


def _dsml(name: str, arguments: Arguments) -> str:
    fields = "".join(
        f'<{D}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{_text(v)}'
        f"</{D}parameter>\n"
        for k, v in arguments.items()
    )
    return f'\n\n<{D}tool_calls>\n<{D}invoke name="{name}">\n{fields}</{D}invoke>\n</{D}tool_calls>'


def _hermes(name: str, arguments: Arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_dumps(arguments)}}}\n</tool_call>'


def _kimi(name: str, arguments: Arguments) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{_dumps(arguments)}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def _deepseek(name: str, arguments: Arguments, kind: str = "") -> str:
    fenced = f"{name}\n```json\n{_dumps(arguments)}\n```"
    call = f"{kind}<｜tool▁sep｜>{fenced}" if kind else f"{name}<｜tool▁sep｜>{_dumps(arguments)}"
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _dumps(value)


def _gemma(name: str, arguments: Arguments) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"


def _python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _harmony(name: str, arguments: Arguments) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_dumps(arguments)}<|call|>"
    )


WRITERS: dict[str, Callable[[str, Arguments], str]] = {
    "deepseek_v4": _dsml,
    "qwen3": _hermes,
    "hermes": _hermes,
    "qwen3_coder": _xml,
    "glm": _glm,
    "kimi_k2": _kimi,
    "deepseek_v3": partial(_deepseek, kind="function"),
    "deepseek_v31": _deepseek,
    "mistral": lambda name, arguments: (
        f'[TOOL_CALLS][{{"name": "{name}", "arguments": {_dumps(arguments)}}}]'
    ),
    "mistral_v11": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_dumps(arguments)}",
    "gemma4": _gemma,
    "llama3_json": lambda name, arguments: (
        f'{{"name": "{name}", "parameters": {_dumps(arguments)}}}'
    ),
    "pythonic": lambda name, arguments: f"[{_python(name, arguments)}]",
    "openai": _harmony,
}
CHOICES = {
    "deepseek_v4": ParserChoice("deepseek_v4", "deepseek_v4"),
    "qwen3": ParserChoice("qwen3", "qwen3"),
    "hermes": ParserChoice("none", "hermes"),
    "qwen3_coder": ParserChoice("qwen3", "qwen3_coder"),
    "glm": ParserChoice("glm", "glm"),
    "kimi_k2": ParserChoice("kimi_k2", "kimi_k2"),
    "deepseek_v3": ParserChoice("deepseek_v4", "deepseek_v3"),
    "deepseek_v31": ParserChoice("deepseek_v4", "deepseek_v31"),
    "mistral": ParserChoice("mistral", "mistral"),
    "mistral_v11": ParserChoice("mistral", "mistral_v11"),
    "gemma4": ParserChoice("gemma4", "gemma4"),
    "llama3_json": ParserChoice("none", "llama3_json"),
    "pythonic": ParserChoice("none", "pythonic"),
    "openai": ParserChoice("openai_gptoss", "openai"),
}
THOUGHTS = {
    "mistral": ("[THINK]", "[/THINK]"),
    "mistral_v11": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "openai": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "hermes": ("", ""),
    "llama3_json": ("", ""),
    "pythonic": ("", ""),
}
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
    *(f"<{D}tool_calls>", f"</{D}tool_calls>", f"<{D}invoke", f"</{D}invoke>"),
    *(f"<{D}parameter", f"</{D}parameter>", ' string="true"', ' string="false"', ' name="'),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("[THINK]", "[/THINK]", "<|tool_call>", "<tool_call|>", Q, "<|channel>thought", "<channel|>"),
    *("<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|return|>"),
    *("<|constrain|>json", "<|constrain|>", "commentary to=functions.", "<|python_tag|>"),
    *("analysis", "final", "commentary", "<|python_start|>", "<|python_end|>"),
    *('"name":', '"arguments":', '"parameters":', "'name':", "'arguments':", "'parameters':"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "function<｜tool▁sep｜>", "```json"),
    *("call:", "functions.", "to="),
]
# A tag that is broken off, or has lost its first or last letters, says as little.
_MARK = re.compile("|".join(map(re.escape, sorted(MARKS, key=len, reverse=True))))
_TAG_LIKE = re.compile(rf"</?\|?{D[0]}?[\w{D[0]}▁ ]*\|?[>=]?|\[/?[A-Z_]+\]?|\w+[>|]+|\w+\]")
# The format's own words, and the beginning of one where the answer ends or a tag stands.
_HARMONY_WORD = re.compile(
    r"(?:assistant|analysis|commentary|final|json)"
    r"|\b(?:a(?:ss?|ssi|ssis|ssist|ssista|ssistan)|a(?:na?|nal|naly|nalys|nalysi)|f(?:i|in|ina)?"
    r"|c(?:o|om|omm|omme|ommen|omment|ommenta|ommentar)?|a|nt)(?=$|<)"
    r"|<\|?\w*\|?>?json\b"
)
_CONSTANT = re.compile(r"\b(?:None|True|False|null|true|false)\b", re.IGNORECASE)


# ---- answers ------------------------------------------------------------------------------------

_WORDS = [
    *(
        "ls -la",
        "naïve café",
        "漢字",
        "\U0001f98a",
        'say "hi"',
        "it's",
        "a, b",
        "{x}",
        "[y]",
        "a\nb",
    ),
    *("x: 1", "<b>bold</b>", "</parameter> inside", "</arg_value>", "</tool_call> x", "C:\\dir"),
    *("100%", "null", "7", "true", "f(x)=1", "http://a.b/c?d=e", "", " spaced "),
]


def _value(rng: random.Random, key: str) -> Any:
    match key:
        case "cmd":
            return " ".join(rng.choices(_WORDS, k=rng.randint(1, 3)))
        case "limit":
            return rng.choice([None, 0, -5, 42])
        case "opts":
            return {rng.choice(["mode", "a"]): rng.choice(_WORDS)}
        case "tags":
            return rng.choices(_WORDS, k=rng.randint(0, 3))
        case "deep":
            return rng.choice([{"k": [1, {"x": None}]}, "as text", {"n": 1.5}])
    return rng.choice([True, False])


def _call(rng: random.Random, write: Callable[[str, Arguments], str]) -> str:
    name = rng.choice(["run_shell", "run_shell", "find", "now"])
    keys = rng.sample(["cmd", "limit", "opts", "tags", "deep", "sure"], rng.randint(0, 4))
    return write(name, {} if name == "now" else {key: _value(rng, key) for key in keys})


def _answer(rng: random.Random, family: str) -> str:
    start, end = THOUGHTS.get(family, ("<think>", "</think>"))
    texts = ["Let me look. ", "Done.", "First,\nthen\n\n", "The answer is 42.", "é漢 "]
    calls = rng.randint(0, 3)
    parts = [f"{start}I think about it.{end}"] if start and rng.random() < 0.5 else []
    if family in ("llama3_json", "pythonic"):
        parts += [_call(rng, WRITERS[family])] if calls else [rng.choice(texts)]
        return "".join(parts)
    if family == "openai":
        parts += [f"<|channel|>final<|message|>{rng.choice(texts)}<|end|><|start|>assistant"]
        return "".join([*parts, _call(rng, WRITERS[family])] if calls else parts)
    parts += [rng.choice(texts)] if rng.random() < 0.6 else []
    parts += [_call(rng, WRITERS[family]) for _ in range(calls)]
    parts += [f"{start}Again.{end}"] if start and rng.random() < 0.2 else []
    parts += [rng.choice(texts)] if rng.random() < 0.2 else []
    return "".join(parts)


# ---- breaking them ------------------------------------------------------------------------------


def _at_mark(text: str, rng: random.Random, change: Callable[[str], str]) -> str:
    found = list(_MARK.finditer(text))
    if not found:
        return text
    mark = rng.choice(found)
    return text[: mark.start()] + change(mark[0]) + text[mark.end() :]


def _drop_tag(text: str, rng: random.Random) -> str:
    return _at_mark(text, rng, lambda mark: "")


def _double_tag(text: str, rng: random.Random) -> str:
    return _at_mark(text, rng, lambda mark: mark + mark)


def _foreign_tag(text: str, rng: random.Random) -> str:
    return _at_mark(text, rng, lambda mark: rng.choice(MARKS))


def _add_tag(text: str, rng: random.Random) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(MARKS) + text[at:]


def _cut(text: str, rng: random.Random) -> str:
    return text[: rng.randint(0, len(text))]


def _mix(text: str, rng: random.Random) -> str:
    other = _call(rng, rng.choice(list(WRITERS.values())))
    at = rng.choice([0, len(text), rng.randint(0, len(text))])
    return text[:at] + other + text[at:]


def _replace(old: str, new: str) -> Callable[[str, random.Random], str]:
    return lambda text, rng: text.replace(old, new, rng.choice([1, -1]))


def _drop_letters(text: str, rng: random.Random) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + text[at + rng.randint(1, 4) :]


def _odd_letters(text: str, rng: random.Random) -> str:
    """What some take for white space, and letters that mean something to a format."""
    at = rng.randint(0, len(text))
    letters = "\u00a0\x0b\u2028\x85\x1c\\'\"`{}[]()<>|=:,;"
    return text[:at] + rng.choice(letters) * rng.randint(1, 3) + text[at:]


def _other_body(text: str, rng: random.Random) -> str:
    """Another spelling of a call between the family's own marks."""
    body = rng.choice([_dumps({"name": "find", "arguments": {"cmd": "ls"}}),
                       "find(cmd='ls', n=3)", "find{cmd:\"ls\"}", "find\n{\"cmd\": \"ls\"}",
                       "<function=find>\n{\"cmd\": \"ls\"}\n</function>",
                       "{'name': 'find', 'arguments': {'a': True, 'b': None}}"])  # fmt: skip
    before = rng.choice(["<tool_call>\n", f"<{D}tool_calls>\n", "<|tool_call>", "[TOOL_CALLS]",
                         "<|tool_calls_section_begin|><|tool_call_begin|>"])  # fmt: skip
    behind = rng.choice(["\n</tool_call>", f"</{D}tool_calls>", "<tool_call|>", "",
                         "<|tool_call_end|><|tool_calls_section_end|>"])  # fmt: skip
    return text + before + body + behind


BREAKS: Sequence[Callable[[str, random.Random], str]] = [
    *(_drop_tag, _double_tag, _foreign_tag, _add_tag, _cut, _mix, _drop_letters, _other_body),
    *(_odd_letters, _odd_letters),
    *(_replace('"', "'"), _replace("{", "("), _replace("}", ")"), _replace("true", "True")),
    *(_replace("null", "None"), _replace(": ", "="), _replace(Q, '"'), _replace("}", "")),
    *(_replace(",", ",,"), _replace("\n", ""), _replace("run_shell", "run_shel")),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One broken answer, and how it is read."""

    family: str
    text: str
    reason: str
    in_reasoning: bool


def make_case(rng: random.Random) -> Case:
    """Return a broken answer."""
    family = rng.choice(list(WRITERS))
    text = _answer(rng, family)
    for _ in range(rng.randint(0, 3)):
        text = rng.choice(BREAKS)(text, rng)
    has_thoughts = bool(THOUGHTS.get(family, ("<think>",))[0]) and family != "openai"
    in_reasoning = has_thoughts and rng.random() < 0.2
    return Case(family, text, rng.choice(["stop", "stop", "length"]), in_reasoning)


# ---- what must hold -----------------------------------------------------------------------------


def _read(case: Case, parts: Sequence[str]) -> tuple[ParsedAnswer, list[Piece]]:
    ids = iter(range(10_000))
    options = ParseOptions(
        in_reasoning=case.in_reasoning,
        tools=TOOLS,
        tool_use=ToolUse.PARSE,
        new_call_id=lambda: f"call_{next(ids)}",
    )
    parser = CHOICES[case.family].make_parser(options)
    pieces = [piece for part in parts for piece in parser.feed(part, [])]
    pieces += parser.finish(case.reason)
    builder = AnswerBuilder()
    builder.add(pieces)
    return builder.answer, pieces


def find_fault(case: Case, rng: random.Random) -> str | None:
    """Return what is wrong with how an answer is read; None: nothing."""
    answer, pieces = _read(case, [case.text])
    cut = rng.randint(0, len(case.text))
    calls = told_calls(pieces)
    for parts in (list(case.text), [case.text[:cut], case.text[cut:]]):
        streamed, letters = _read(case, parts)
        if streamed != answer or told_calls(letters) != calls:
            return "another answer where it is streamed"
    if any(name not in NAMES for name, _, _ in calls):
        return "a name that no tool has"
    ids = [call.id for call in answer.tool_calls]
    if len(set(ids)) < len(ids):
        return "two calls with one id"
    for _, arguments, is_whole in calls:
        if is_whole and not isinstance(json.loads(arguments), dict):
            return "a whole call without an object"
        if is_whole and not all(_stands_in(leaf, case.text) for leaf in _leaves(arguments)):
            return "a whole call with a value that the text does not contain"
    told = _told(pieces) + "".join(f"\0{name}\0{arguments}" for name, arguments, _ in calls)
    # Texts that are told apart may join to a constant: only what is said goes without them.
    said = _CONSTANT.sub("", _unescaped(_unescaped(_said(case.text, case.family == "openai"))))
    lost = _letters(said) - _letters(told)
    if lost and case.reason == "stop":
        return f"something said is lost: {dict(lost)}"
    if not told.strip() and _letters(said):
        return "something said is told as nothing"
    return None


def _told(pieces: list[Piece]) -> str:
    """Reasoning and content; what another piece parts makes no word."""
    return "\0".join(
        "".join(piece.text for piece in run if isinstance(piece, ReasoningText | ContentText))
        for _, run in itertools.groupby(pieces, type)
    )


def _unescaped(text: str) -> str:
    """A text whose escapes are letters, as far as they matter here."""
    text = re.sub(
        r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text
    ).encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # fmt: skip
    return re.sub(r"\\[nrtbf]", " ", text)


def _letters(text: str) -> Counter[str]:
    text = _unescaped(_unescaped(text))
    return Counter(char for char in text.lower() if char.isalnum())


def _said(text: str, is_harmony: bool) -> str:
    """A text without what is markup, whole or broken, and without constants.

    Those are spelt in several ways, and one behind a bracket is the beginning of no tag.
    """
    text = _CONSTANT.sub(" ", text)
    if is_harmony:
        text = _HARMONY_WORD.sub(" ", text)
    text = re.sub(r"\b(?:name|string)\s*(?:=|$)", " ", text)
    # The numbers of Kimi's calls are ids, which are told as such.
    text = re.sub(r"(?<=\w)\s*:\d+(?=\s*[<{(\[])", " ", text)
    return _TAG_LIKE.sub(" ", _MARK.sub(" ", text))


def _leaves(arguments: str) -> list[str]:
    leaves: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                leaves.append(str(key))
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, str):
            leaves.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            leaves.append(str(abs(int(value) if value == int(value) else value)).lstrip("0"))

    walk(json.loads(arguments))
    return leaves


def _stands_in(leaf: str, text: str) -> bool:
    wanted = [re.sub(r"\W", "", variant) for variant in (leaf, _unescaped(leaf))]
    once = _unescaped(text)
    places = [re.sub(r"\W", "", variant) for variant in (text, once, _unescaped(once))]
    return any(want in place for want in wanted for place in places)


def find_faults(num_answers: int, seed: int) -> list[tuple[Case, str]]:
    """Return the answers that are read wrongly, of so many."""
    rng = random.Random(seed)
    faults: list[tuple[Case, str]] = []
    for _ in range(num_answers):
        case = make_case(rng)
        try:
            fault = find_fault(case, rng)
        except Exception as error:  # an answer that cannot be read at all is the worst of faults
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            faults.append((case, fault))
    return faults


def main() -> int:
    """Read so many answers; return 1 if one was read wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    faults = find_faults(arguments.answers, arguments.seed)
    for case, fault in faults[:20]:
        print(f"{fault}\n  {case!r}")
    print(f"{len(faults)} of {arguments.answers} answers were read wrongly")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
