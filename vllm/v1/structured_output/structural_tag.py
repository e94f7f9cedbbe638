"""Structural tags: free text with grammars between tags, as Lark for llguidance."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from vllm.exceptions import UserInputError
from vllm.v1.structured_output.json_rules import has_free_keys
from vllm.v1.structured_output.repeats import REPEATABLE, RepeatRule
from vllm.v1.structured_output.special_texts import SpecialTexts

_ANY_TEXT = r"/(?s:.*)/"
# Calls of one answer that may differ: nobody asks for more at once, and small models count up.
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class TagText:
    """A structural tag as a grammar.

    Attributes:
        text: The library's.
        repeats: How tags are written that must not come twice, by the numbers of their captures.
        json_heads: What stands before JSON whose objects may have keys of the model's choosing.
    """

    text: str
    repeats: tuple[RepeatRule, ...] = ()
    json_heads: tuple[str, ...] = ()


class TagGrammar:
    """Builds the grammar of one structural tag.

    Owns: the rules made so far, the grammars that they refer to, what is known of tags and JSON.

    Args:
        specials: The vocabulary's special tokens.
        make_schema: Turns a JSON schema into the one that is compiled.
        make_lark: Turns the text of a grammar into Lark.
    """

    def __init__(
        self,
        specials: SpecialTexts,
        make_schema: Callable[[Any], dict[str, Any]],
        make_lark: Callable[[str], str],
    ) -> None:
        self._specials = specials
        self._make_schema = make_schema
        self._make_lark = make_lark
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._repeats: list[RepeatRule] = []
        self._json_heads: dict[str, None] = {}
        self._makers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda item: self._literal(_text(item, "value")),
            "json_schema": lambda item: self._schema(_get(item, "json_schema")),
            "regex": lambda item: f"/{regex_to_lark(_text(item, 'pattern'))}/",
            "grammar": lambda item: self._grammar(_text(item, "grammar")),
            "any_text": lambda item: _ANY_TEXT,
            "sequence": self._sequence,
            "or": lambda item: self._any_of(self._elements(item)),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def build(self, tag: Mapping[str, Any]) -> TagText:
        """Return llguidance's grammar of a structural tag.

        Raises:
            UserInputError: It is none.
        """
        if "format" in tag:
            start = self._format(tag["format"])
        elif "structures" in tag:
            tags = [_as_tag(item) for item in _get(tag, "structures", list)]
            start = self._triggered_tags({**tag, "tags": tags})
        else:
            raise _error("has neither 'format' nor 'structures'")
        lark = "\n".join([f"start: {start}", *self._rules])
        grammars = [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]
        text = json.dumps({"grammars": grammars})
        return TagText(text, tuple(self._repeats), tuple(self._json_heads))

    def _format(self, item: Any) -> str:
        """Return the expression of any format."""
        if not isinstance(item, Mapping):
            raise _error(f"holds {str(item)[:60]!r} where a format, an object, must stand")
        kind = item.get("type")
        maker = self._makers.get(kind) if isinstance(kind, str) else None
        if maker is None:
            raise _error(f"holds a format of type {kind!r}: use one of {', '.join(self._makers)}")
        return maker(item)

    # ---- expressions -------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        """Return a text, its special tokens as tokens; an empty one matches nothing at all."""
        parts = [
            _quote(part) if isinstance(part, str) else f"<[{part}]>"
            for part in self._specials.split(text)
        ]
        return " ".join(parts) or '""'

    def _schema(self, schema: Any, head: str = "") -> str:
        """Return JSON that follows a schema, behind a text."""
        made = self._make_schema(schema)
        if head and has_free_keys(made):
            self._json_heads[head] = None
        return f"%json {json.dumps(made)}"

    def _grammar(self, text: str) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": self._make_lark(text)})
        return f"@{name}"

    def _elements(self, item: Mapping[str, Any], field: str = "elements") -> list[str]:
        elements = _get(item, field, list)
        if not elements:
            raise _error(f"holds an empty list {field!r}")
        return [self._format(element) for element in elements]

    def _sequence(self, item: Mapping[str, Any]) -> str:
        elements = _get(item, "elements", list)
        if not elements:
            raise _error("holds an empty list 'elements'")
        around = ["", *map(_literal_of, elements), ""]
        parts: list[str] = []
        texts: list[Mapping[str, Any]] = []
        for i, element in enumerate(elements):
            # Free text ends at the text that follows it: it must not swallow that.
            if texts and isinstance(element, Mapping) and element.get("type") == "const_string":
                texts.clear()
                parts[-1] = self._text_until(_text(element, "value"))
                continue
            texts = [element] if isinstance(element, Mapping) and _is_any_text(element) else []
            parts.append(self._element(element, around[i], around[i + 2]))
        return self._rule(" ".join(parts))

    def _element(self, element: Any, before: str, behind: str = "") -> str:
        """Return the expression of a format between two texts, where there are such."""
        kind = element.get("type") if isinstance(element, Mapping) else None
        if kind == "json_schema":
            return self._schema(_get(element, "json_schema"), before)
        if kind == "tags_with_separator":
            return self._tags_with_separator(element, behind)
        return self._format(element)

    def _any_of(self, options: Sequence[str]) -> str:
        return self._rule(" | ".join(options))

    def _tag(self, item: Mapping[str, Any]) -> str:
        return self._rule(f"{self._literal(_text(item, 'begin'))} {self._tag_rest(item)}")

    def _tag_rest(self, item: Mapping[str, Any]) -> str:
        """Return a tag behind its beginning."""
        content, end = _get(item, "content", Mapping), _text(item, "end")
        if _is_any_text(content) and end:
            return self._text_until(end)
        return f"{self._element(content, _text(item, 'begin'), end)} {self._literal(end)}"

    def _text_until(self, end: str) -> str:
        """Return free text up to and including the first ``end``."""
        if self._specials.begins(end):
            # Free text holds no special token, so it ends there by itself.
            return f"{_ANY_TEXT} {self._literal(end)}"
        plain = next(self._specials.split(end), "")
        assert isinstance(plain, str)
        if plain == end:
            return self._rule(_ANY_TEXT, f"[suffix={_quote(end)}]")
        return f"/(?s:.*){regex_to_lark(re.escape(plain))}/ {self._literal(end[len(plain) :])}"

    def _triggered_tags(self, item: Mapping[str, Any]) -> str:
        triggers = _texts(item, "triggers")
        tags = [_checked_tag(tag) for tag in _get(item, "tags", list)]
        if not triggers or not tags:
            raise _error("needs at least one trigger and one tag")
        triggered = self._any_of([self._triggered_tag(tag, triggers) for tag in tags])
        # Whoever insists on a tag gets it at once: free text might never come to it.
        first = self._any_of([self._tag(tag) for tag in tags])
        if item.get("stop_after_first"):
            return first if item.get("at_least_one") else f"({triggered} | {_ANY_TEXT})"
        rest = f"{triggered}* {_ANY_TEXT}"
        return f"{first} {rest}" if item.get("at_least_one") else rest

    def _triggered_tag(self, tag: Mapping[str, Any], triggers: Sequence[str]) -> str:
        begin = _text(tag, "begin")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise _error(f"has a tag that begins with no trigger: {begin[:60]!r}")
        if self._specials.begins(trigger):
            return self._rule(f"{_ANY_TEXT} {self._tag(tag)}")
        if self._specials.stands_in(trigger):
            raise _error(
                f"has the trigger {trigger[:60]!r}: a trigger begins with a special token, or "
                "holds none"
            )
        opening = self._rule(f"/(?s:.)*/ {_quote(trigger)}", "[lazy]")
        rest = self._literal(begin[len(trigger) :]) if len(begin) > len(trigger) else ""
        return self._rule(f"{opening} {rest} {self._tag_rest(tag)}")

    def _tags_with_separator(self, item: Mapping[str, Any], closing: str = "") -> str:
        tags = [self._tag(_checked_tag(tag)) for tag in _get(item, "tags", list)]
        if not tags:
            raise _error("holds an empty list 'tags'")
        one, times = self._any_of(tags), "*"
        separator = "" if item.get("stop_after_first") else _text(item, "separator")
        if item.get("ends_at_repeat"):
            number = _text({"number_behind": "", **item}, "number_behind")
            one = self._rule(one, f'[capture="{REPEATABLE}{len(self._repeats)}"]')
            self._repeats.append(RepeatRule(separator, closing, number))
            times = f"{{0,{MAX_CALLS - 1}}}"
        more = f"({self._literal(separator)} {one})" if separator else one
        listed = one if item.get("stop_after_first") else f"{one} {more}{times}"
        return listed if item.get("at_least_one") else f"({listed})?"

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def _error(what: str) -> UserInputError:
    return UserInputError(f"structured_outputs.structural_tag {what}.", "structured_outputs")


def _get(item: Mapping[str, Any], field: str, kind: Any = object) -> Any:
    if field not in item:
        raise _error(f"lacks {field!r} in a format of type {item.get('type')!r}")
    if not isinstance(item[field], kind):
        raise _error(f"holds {field}={str(item[field])[:60]!r}, which is of the wrong type")
    return item[field]


def _text(item: Mapping[str, Any], field: str) -> str:
    text: str = _get(item, field, str)
    return text


def _literal_of(item: Any) -> str:
    """Return a format's text, if it is one."""
    value = item.get("value") if isinstance(item, Mapping) else None
    return value if isinstance(value, str) and item.get("type") == "const_string" else ""


def _texts(item: Mapping[str, Any], field: str) -> list[str]:
    texts = _get(item, field, list)
    if not all(isinstance(text, str) and text for text in texts):
        raise _error(f"holds {field} that are not all texts of at least one character")
    return list(texts)


def _is_any_text(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "any_text"


def _checked_tag(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise _error(f"holds {str(item)[:60]!r} where a tag, an object, must stand")
    return item


def _as_tag(structure: Any) -> dict[str, Any]:
    """Return a structure of the older form as a tag."""
    item = _checked_tag(structure)
    schema = {"type": "json_schema", "json_schema": item.get("schema") or {}}
    return {"begin": _text(item, "begin"), "content": schema, "end": _text(item, "end")}


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
