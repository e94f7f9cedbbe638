"""Structural tags: free text with grammars between tags, as Lark for llguidance."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from vllm.exceptions import UserInputError

_ANY_TEXT = r"/(?s:.*)/"
ENDS_AT_REPEAT = "ends_at_repeat"
REPEATABLE = "repeatable"
"""Name of the captures behind which an answer may end: at one that it has already, it must."""


class TagGrammar:
    """Builds the grammar of one structural tag.

    Owns: the rules made so far, and the grammars that they refer to.

    Args:
        special_tokens: Ids of the vocabulary's special tokens by their text.
        make_schema: Turns a JSON schema into the one that is compiled.
        make_lark: Turns the text of a grammar into Lark.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        make_schema: Callable[[Any], dict[str, Any]],
        make_lark: Callable[[str], str],
    ) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._make_schema = make_schema
        self._make_lark = make_lark
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
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

    def build(self, tag: Mapping[str, Any]) -> str:
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
        return json.dumps({"grammars": grammars})

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
        parts: list[str] = []
        position = 0
        for match in self._special.finditer(text):
            if match.start() > position:
                parts.append(_quote(text[position : match.start()]))
            parts.append(f"<[{self._special_tokens[match[0]]}]>")
            position = match.end()
        if position < len(text):
            parts.append(_quote(text[position:]))
        return " ".join(parts) or '""'

    def _schema(self, schema: Any) -> str:
        return f"%json {json.dumps(self._make_schema(schema))}"

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
        parts: list[str] = []
        texts: list[Mapping[str, Any]] = []
        for element in elements:
            # Free text ends at the text that follows it: it must not swallow that.
            if texts and isinstance(element, Mapping) and element.get("type") == "const_string":
                texts.clear()
                parts[-1] = self._text_until(_text(element, "value"))
                continue
            texts = [element] if isinstance(element, Mapping) and _is_any_text(element) else []
            parts.append(self._format(element))
        return self._rule(" ".join(parts))

    def _any_of(self, options: Sequence[str]) -> str:
        return self._rule(" | ".join(options))

    def _tag(self, item: Mapping[str, Any]) -> str:
        return self._rule(f"{self._literal(_text(item, 'begin'))} {self._tag_rest(item)}")

    def _tag_rest(self, item: Mapping[str, Any]) -> str:
        """Return a tag behind its beginning."""
        content, end = _get(item, "content", Mapping), _text(item, "end")
        if _is_any_text(content) and end:
            return self._text_until(end)
        return f"{self._format(content)} {self._literal(end)}"

    def _text_until(self, end: str) -> str:
        """Return free text up to and including the first ``end``."""
        if self._special.match(end):
            # Free text holds no special token, so it ends there by itself.
            return f"{_ANY_TEXT} {self._literal(end)}"
        plain = self._special.split(end, maxsplit=1)[0]
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
        if self._special.match(trigger):
            return self._rule(f"{_ANY_TEXT} {self._tag(tag)}")
        if self._special.search(trigger):
            raise _error(
                f"has the trigger {trigger[:60]!r}: a trigger begins with a special token, or "
                "holds none"
            )
        opening = self._rule(f"/(?s:.)*/ {_quote(trigger)}", "[lazy]")
        rest = self._literal(begin[len(trigger) :]) if len(begin) > len(trigger) else ""
        return self._rule(f"{opening} {rest} {self._tag_rest(tag)}")

    def _tags_with_separator(self, item: Mapping[str, Any]) -> str:
        tags = [self._tag(_checked_tag(tag)) for tag in _get(item, "tags", list)]
        if not tags:
            raise _error("holds an empty list 'tags'")
        one = self._any_of(tags)
        if item.get(ENDS_AT_REPEAT):
            one = self._rule(one, f'[capture="{REPEATABLE}"]')
        more = "" if item.get("stop_after_first") else self._more(one, _text(item, "separator"))
        listed = f"{one} {more}"
        return listed if item.get("at_least_one") else f"({listed})?"

    def _more(self, one: str, separator: str) -> str:
        return f"({self._literal(separator)} {one})*" if separator else f"{one}*"

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
