"""``--config file.yaml``: flags from a file, under those of the command line."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from vllm.utils.flag_text import filled_text

CONFIG_FLAG = "--config"
# The file's model yields to the positional one, which argparse cannot tell by order.
CONFIG_MODEL_FLAG = "--config-model"


def expand_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with the file's flags in front, so that later ones win.

    Keys are flags without their dashes (``max-model-len`` or ``max_model_len``), values are what
    the flag takes: a number or text, true or false for a switch, a list, a mapping for a JSON flag;
    null is as if the key were not there. Where a flag takes text, it is as written: YAML would make
    83 of a key 0123, and true of a name on. A file that cannot be used ends the program.
    """
    paths = _find_paths(arguments)
    if not paths:
        return list(arguments)
    if len(paths) > 1:
        parser.error(f"{CONFIG_FLAG} is given {len(paths)} times: give it once")
    expanded: list[str] = []
    values, texts = _load(parser, paths[0])
    for key, value in values.items():
        expanded += _as_arguments(parser, paths[0], str(key), value, texts.get(key))
    # The file's name stands between: a flag of several values must not swallow what follows.
    return [*expanded, f"{CONFIG_FLAG}={paths[0]}", *_drop_config(arguments)]


def _find_paths(arguments: Sequence[str]) -> list[str]:
    paths = [a.partition("=")[2] for a in arguments if a.startswith(f"{CONFIG_FLAG}=")]
    positions = [i for i, a in enumerate(arguments[:-1]) if a == CONFIG_FLAG]
    return paths + [arguments[i + 1] for i in positions]


def _drop_config(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == CONFIG_FLAG:
            next(rest, None)
        elif not argument.startswith(f"{CONFIG_FLAG}="):
            kept.append(argument)
    return kept


def _load(parser: argparse.ArgumentParser, path: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the file's flags as YAML reads their values, and with every value as written.

    Those that are merged from elsewhere (``<<``) are only among the first.
    """
    import yaml  # noqa: PLC0415  # only who gives a file pays for the import

    try:
        with open(path, encoding="utf-8") as file:
            written = file.read()
        content = yaml.safe_load(written)
        texts = yaml.load(written, yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"{CONFIG_FLAG} {path}: cannot be read as YAML: {error}")
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        parser.error(f"{CONFIG_FLAG} {path}: must hold flags as 'key: value' lines")
    return content, texts


def _as_arguments(
    parser: argparse.ArgumentParser, path: str, key: str, value: Any, text: Any
) -> list[str]:
    flag = "--" + key.strip().replace("_", "-")
    if flag == "--model":
        flag = CONFIG_MODEL_FLAG
    action = parser._option_string_actions.get(flag)
    if action is None or flag == CONFIG_FLAG:
        parser.error(f"{CONFIG_FLAG} {path}: {key!r} is no flag of {parser.prog}: see --help")
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        negative = f"--no-{flag[2:]}"
        if value:
            return [flag]
        return [negative] if negative in action.option_strings else []
    is_text = action.type in (None, filled_text)
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, text if is_text and isinstance(text, list) else value)]
    if is_text and isinstance(text, str):
        return [f"{flag}={text}"]
    is_json = isinstance(value, dict | list | bool)
    return [f"{flag}={json.dumps(value) if is_json else value}"]
