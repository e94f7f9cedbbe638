"""``--json-flag.key.key value``: one entry of a flag that takes a JSON object."""

import argparse
import json
from collections.abc import Sequence
from typing import Any


def fold_dotted_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Turn ``--f.a 1 --f.b.c x`` into ``--f={"a": 1, "b": {"c": "x"}}``, at the first one's place.

    A value is JSON where it can be, else text; ``--f.a+ x`` adds to a list. Anything else, and all
    that follows ``--``, stays as it is. A flag given both ways ends the program.
    """
    folded: dict[str, dict[str, Any]] = {}
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            kept += [argument, *rest]
            break
        name, equals, value = argument.partition("=")
        flag, dot, keys = name.partition(".")
        if not dot or not flag.startswith("-") or flag not in parser._option_string_actions:
            kept.append(argument)
            continue
        if not equals:
            value = next(rest, "")
        if flag not in folded:
            folded[flag] = {}
            kept.append(f"{flag}.")
        _set(parser, folded[flag], name, keys.split("."), _read(value))
    for flag in folded:
        if any(argument == flag or argument.startswith(f"{flag}=") for argument in kept):
            parser.error(f"{flag} is given as JSON and as {flag}.key: choose one")
    return [
        f"{argument[:-1]}={json.dumps(folded[argument[:-1]])}"
        if argument[:-1] in folded and argument.endswith(".")
        else argument
        for argument in kept
    ]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(
    parser: argparse.ArgumentParser, into: dict[str, Any], name: str, keys: list[str], value: Any
) -> None:
    if not all(key.rstrip("+") for key in keys):
        parser.error(f"{name} names no key: write --flag.key value")
    for key in keys[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            parser.error(f"{name}: {key!r} has a value already and cannot hold keys")
    last = keys[-1]
    if last.endswith("+"):
        items = into.setdefault(last[:-1], [])
        if not isinstance(items, list):
            parser.error(f"{name}: {last[:-1]!r} has a value that is no list")
        items.append(value)
    else:
        into[last] = value
