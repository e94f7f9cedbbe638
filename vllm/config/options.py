"""Options: fields of a dataclass that also know their flag, its help and what values they take.

    gpu_memory_utilization: float = option(
        0.92, "Share of the device's memory to use.", group="KV cache", limit=SHARE
    )

is all there is to write of an option. ``vllm serve``'s flags and ``--help`` come from it
(``vllm/v1/engine/option_flags.py``), the tables of docs/configuration.md (``tools/options_doc.py``)
and the checks of values (:func:`check_options`). What an engine is told stands in ``EngineArgs``,
which takes options that only pass through to a configuration from there (:func:`option_of`); what
a server is told, in ``ServerArgs``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from vllm.exceptions import ConfigError

_KEY = "option"
# Programs write values without a flag to read them: LLM(block_size="32").
_NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value must be, and how an error says so."""

    holds: Callable[[Any], bool]
    text: str


POSITIVE = Limit(lambda value: value >= 1, "must be positive.")
NOT_NEGATIVE = Limit(lambda value: value >= 0, "must be at least 0.")
AT_LEAST_ONE = Limit(lambda value: value >= 1, "must be at least 1.")


def within(low: int, high: int) -> Limit:
    """Return the limit of a number from ``low`` to ``high``."""
    return Limit(lambda value: low <= value <= high, f"is out of range: use {low} to {high}.")


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its name, type and default.

    Attributes:
        text: Of ``--help``; empty: the name says it.
        group: Heading of ``--help`` and of the page that lists it.
        flag: Its flag; empty: the field's name, with dashes.
        also: Other spellings of the flag.
        choices: The values it takes; empty: any that ``limit`` allows.
        limit: What a value must be; None is always allowed where it is the default.
        parse: Reads the flag's text; None: as the field's type says.
        many: Whether the flag takes several values.
        count: How many it takes, if more than one and always as many; 0: see ``many``.
        metavar: Stands for the value in ``--help``.
        more: What the page says beside ``text``, as Markdown.
    """

    text: str
    group: str
    flag: str = ""
    also: tuple[str, ...] = ()
    choices: Sequence[str] = ()
    limit: Limit | None = None
    parse: Callable[[str], Any] | None = None
    many: bool = False
    count: int = 0
    metavar: str | tuple[str, ...] | None = None
    more: str = ""


def option(default: Any, text: str = "", *, group: str, **rest: Any) -> Any:
    """Return a dataclass field that is an option; the rest is as in :class:`Option`."""
    return _field(default, Option(text, group, **rest))


def option_of(owner: type, name: str) -> Any:
    """Return a field that is another dataclass's option, handed on to it."""
    found = next(f for f in fields(owner) if f.name == name)
    return _field(_default_of(found), found.metadata[_KEY])


def _field(default: Any, described: Option) -> Any:
    metadata = {_KEY: described}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def _default_of(found: "Field[Any]") -> Any:
    if found.default_factory is not MISSING:
        return found.default_factory()
    return found.default


@dataclass(frozen=True, slots=True)
class NamedOption:
    """An option where it stands: its field's name, type and default.

    Attributes:
        flag: The long flag.
        dest: Its name among parsed arguments.
    """

    name: str
    type: Any
    default: Any
    about: Option

    @property
    def flag(self) -> str:
        return self.about.flag or "--" + self.name.replace("_", "-")

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")


def find_option(found: "Field[Any]") -> NamedOption | None:
    """Return the option that a field is; None: it is none."""
    about: Option | None = found.metadata.get(_KEY)
    if about is None:
        return None
    return NamedOption(found.name, found.type, _default_of(found), about)


def options_of(owner: type) -> list[NamedOption]:
    """Return a dataclass's options, those of dataclasses in it among them."""
    options: list[NamedOption] = []
    for found in fields(owner):
        option = find_option(found)
        if option is not None:
            options.append(option)
        elif isinstance(found.type, type) and is_dataclass(found.type):
            options += options_of(found.type)
    return options


def plain_type(kind: Any) -> Any:
    """Return a type without "or None"; other unions stay."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    rest = [part for part in get_args(kind) if part is not NoneType]
    return rest[0] if len(rest) == 1 else kind


def check_options(owner: Any, *, by_flag: bool = False) -> None:
    """Check each option's value by itself.

    Args:
        owner: A dataclass with options.
        by_flag: Whether errors call them by their flags, else by the names of arguments.

    Raises:
        ConfigError: A value is not one that its option takes.
    """
    for found in fields(owner):
        option, value = find_option(found), getattr(owner, found.name)
        if option is None or (value is None and option.default is None):
            continue
        about = option.about
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        named = f"{option.flag} {shown}" if by_flag else f"{option.dest}={shown}"
        # Outsiders also give what a text names, such as a torch.dtype.
        if about.choices and isinstance(value, str) and value not in about.choices:
            leave = ", or leave it out" if option.default is None else ""
            raise ConfigError(f"{named} is unknown: use one of {', '.join(about.choices)}{leave}.")
        kind, words = _NUMBERS.get(plain_type(option.type), (object, ""))
        if get_origin(plain_type(option.type)) in (dict, Mapping):
            kind, words = Mapping, "a dictionary"
        if not isinstance(value, kind) or (words and isinstance(value, bool)):
            raise ConfigError(f"{named} must be {words}.")
        if about.limit is not None and not about.limit.holds(value):
            raise ConfigError(f"{named} {about.limit.text}")


def values_for(owner: type, source: Any) -> dict[str, Any]:
    """Return the options of ``owner`` that ``source`` has taken over, by ``owner``'s names."""
    taken = {o.flag: o.name for o in options_of(type(source))}
    return {o.name: getattr(source, taken[o.flag]) for o in options_of(owner) if o.flag in taken}
