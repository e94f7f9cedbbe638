"""Command-line flags of a dataclass's options, and back."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_origin

from vllm.config.options import NamedOption, find_option, options_of, plain_type
from vllm.utils.argparse_utils import human_int, json_object
from vllm.utils.flag_text import filled_text


def add_option_flags(
    parser: argparse.ArgumentParser, owner: type, about: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add the flags of ``owner``'s options, in groups, each in the order of its fields.

    Args:
        parser: Groups that it has are gone on with.
        owner: A dataclass.
        about: What ``--help`` says below the headings of groups.
    """
    groups = {str(group.title): group for group in parser._action_groups}
    for option in options_of(owner):
        name = option.about.group
        if name not in groups:
            groups[name] = parser.add_argument_group(name, about.get(name))
        _add_flag(groups[name], option)


def _add_flag(group: argparse._ArgumentGroup, option: NamedOption) -> None:
    about = option.about
    given: dict[str, Any] = {"default": option.default, "help": about.text or None}
    if is_switch(option):
        given["action"] = argparse.BooleanOptionalAction
    else:
        given["type"] = about.parse or _find_parser(option)
        given["metavar"] = about.metavar
        if about.choices:
            given["choices"] = about.choices
        if about.many or about.count:
            given["nargs"] = about.count or "+"
    group.add_argument(option.flag, *about.also, **given)


def is_switch(option: NamedOption) -> bool:
    """Whether an option's flag takes no value, and has a ``--no-`` form."""
    return plain_type(option.type) is bool


def _find_parser(option: NamedOption) -> Any:
    """Return what reads a flag's text into a field of the option's type."""
    plain = plain_type(option.type)
    if plain is int:
        return human_int
    if plain in (float, Path):
        return plain
    if get_origin(plain) in (dict, Mapping):
        return json_object
    # Where no text is what the default says, it may be said.
    return filled_text if plain is str and option.default != "" else None


def take_options(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``owner`` among parsed flags; dataclasses in it are built."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        option = find_option(field)
        if option is not None:
            value = getattr(args, option.dest)
            found[field.name] = tuple(value) if isinstance(option.default, tuple) else value
        elif dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            found[field.name] = field.type(**take_options(field.type, args))
    return found
