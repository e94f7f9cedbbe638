"""argparse with the habits of vLLM's command line.

``--max_model_len`` is ``--max-model-len``; numbers may be written 1k or 2M; ``--json-flag.key v``
sets one key of a JSON flag; ``--config`` reads flags from a YAML file; ``--help=NAME`` explains one
flag or group. An unknown flag is refused with the nearest name; a flag that vLLM has and we do not
is refused by name, or accepted with one warning where ignoring it is harmless.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.utils.argparse_help import FlagNote, print_help_about
from vllm.utils.config_file import CONFIG_FLAG, expand_config
from vllm.utils.dotted_flags import fold_dotted_flags

_HUMAN_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)")
# Small letters are decimal, capitals binary.
_FACTORS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def human_int(text: str) -> int:
    """Parse a whole number: 4096, 4k (4,000), 4K (4,096), 1.5M.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    match = _HUMAN_NUMBER.fullmatch(text.strip().replace(",", ""))
    value = float(match[1]) * _FACTORS[match[2]] if match else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number: write 4096, 4k (4,000) or 4K (4,096)"
        )
    # Floats are exact up to 2**53; a number without a suffix needs none.
    return (
        int(match[1]) if match and match[1].lstrip("+-").isdigit() and not match[2] else int(value)
    )


def human_int_or_auto(text: str) -> int:
    """Parse a whole number, or "auto" as -1."""
    return -1 if text.strip().lower() == "auto" else human_int(text)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object such as '{{\"k\": 1}}'")
    return value


def json_string_list(text: str) -> list[str]:
    """Parse a JSON list of strings, or one bare string.

    Raises:
        argparse.ArgumentTypeError: It starts like a list and is none.
    """
    if not text.lstrip().startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON list of strings")
    return list(value)


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A flag known from vLLM that is not supported yet.

    Attributes:
        names: Its spellings, the long one first.
        harmless: Values that change nothing and are therefore accepted; compared as text.
        is_switch: Whether it takes no value; its ``--no-`` form is then harmless.
        advice: What to do instead.
    """

    names: tuple[str, ...]
    harmless: tuple[str, ...] = ()
    is_switch: bool = False
    advice: str = "leave it out"


class _RefuseAction(argparse.Action):
    """Refuses a flag unless its value is harmless."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: RefusedFlag) -> None:
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs=0 if flag.is_switch else "?",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Refuse, or do nothing."""
        if str(values).lower() in self._flag.harmless or (option_string or "").startswith("--no-"):
            return
        harmless = [value for value in self._flag.harmless if value]
        accepted = f" (only the value {' or '.join(harmless)} is)" if harmless else ""
        given = f" {values}" if isinstance(values, str) else ""
        parser.error(
            f"{self._flag.names[0]}{given} is known but not supported yet{accepted}: "
            f"{self._flag.advice}"
        )


@dataclass(frozen=True, slots=True)
class IgnoredFlag:
    """A flag known from vLLM that may be given and has no effect.

    Attributes:
        names: Its spellings, the long one first.
        why: Why that is harmless.
        is_switch: Whether it takes no value; its ``--no-`` form is known too.
    """

    names: tuple[str, ...]
    why: str
    is_switch: bool = False


class _IgnoreAction(argparse.Action):
    """Notes in ``namespace.ignored_flags`` that a flag was given."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: IgnoredFlag) -> None:
        super().__init__(
            option_strings,
            "ignored_flags",
            nargs=0 if flag.is_switch else "?",
            default=(),
            help=argparse.SUPPRESS,
        )
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Note the flag, once."""
        noted: tuple[IgnoredFlag, ...] = namespace.ignored_flags
        if self._flag not in noted:
            namespace.ignored_flags = (*noted, self._flag)


class _SayDefaults(argparse.HelpFormatter):
    """Says a flag's default behind its help, where that does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default: Any = action.default
        if isinstance(default, list | tuple):
            default = " ".join(map(str, default))
        is_said = isinstance(default, int | float | str) and not isinstance(default, bool)
        if not is_said or default in ("", argparse.SUPPRESS) or "efault" in (action.help or ""):
            return action.help
        return f"{action.help} Default: {default}.".replace("%", "%%")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser with vLLM's spellings and errors that say what to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _SayDefaults)
        super().__init__(*args, **kwargs)
        self._notes: list[FlagNote] = []

    def add_refused_flags(self, flags: Sequence[RefusedFlag]) -> None:
        """Know flags well enough to refuse them by name."""
        for flag in flags:
            self._notes.append(FlagNote(flag.names, "refused, not supported yet", flag.advice))
            self.add_argument(*_spellings(flag), action=_RefuseAction, flag=flag)

    def add_ignored_flags(self, flags: Sequence[IgnoredFlag]) -> None:
        """Accept flags without effect; those given are in ``ignored_flags`` of the namespace."""
        for flag in flags:
            self._notes.append(FlagNote(flag.names, "accepted, without effect", flag.why))
            self.add_argument(*_spellings(flag), action=_IgnoreAction, flag=flag)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an argument nobody knows ends the program."""
        given = list(sys.argv[1:] if args is None else args)
        given = [_normalize(arg) for arg in given]
        # What stands behind a command's name is that command's.
        own = given if self._subparsers is None else given[:1]
        for topic in [arg.partition("=")[2] for arg in own if arg.startswith("--help=")]:
            print_help_about(self, topic, self._notes)
            self.exit()
        if CONFIG_FLAG in self._option_string_actions:
            given = expand_config(self, given)
        known, unknown = super().parse_known_args(fold_dotted_flags(self, given), namespace)
        if unknown:
            self._refuse_unknown(unknown[0])
        return known, unknown

    def _refuse_unknown(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}: see --help")
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        self.error(f"unknown flag {name}: {hint}")


def _spellings(flag: RefusedFlag | IgnoredFlag) -> list[str]:
    names = list(flag.names)
    if flag.is_switch:
        names += [f"--no-{name[2:]}" for name in names if name.startswith("--")]
    return names


def _normalize(argument: str) -> str:
    """Spell a long flag with dashes; its value, and keys behind a dot, stay as they are."""
    if not argument.startswith("--") or argument == "--":
        return argument
    name, equals, value = argument.partition("=")
    flag, dot, keys = name.partition(".")
    return flag.replace("_", "-") + dot + keys + equals + value
