"""An option is one entry: default, flag, help, limits."""

import argparse
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm.config.options import (
    POSITIVE,
    Limit,
    check_options,
    option,
    option_of,
    options_of,
    values_for,
    within,
)
from vllm.exceptions import ConfigError
from vllm.v1.engine.option_flags import add_option_flags, take_options


@dataclass(frozen=True)
class Inner:
    share: float = option(0.5, "Of it.", group="two", limit=Limit(lambda s: s <= 1, "is much."))
    names: tuple[str, ...] = option((), group="two", flag="--name", many=True)


@dataclass(frozen=True)
class Engine:
    size: int | None = option(None, "How large.", group="one", also=("-s",), limit=POSITIVE)
    kind: Any = option("a", group="one", flag="--engine-kind", choices=("a", "b"))
    table: dict[str, Any] = option({}, group="one", metavar="JSON")
    derived: int = 3


@dataclass
class Given:
    size: int | None = option_of(Engine, "size")
    engine_kind: str = option_of(Engine, "kind")
    table: dict[str, Any] = option_of(Engine, "table")
    on: bool = option(False, "On.", group="two")
    count: int = option(1, group="two", parse=int, limit=within(1, 9))
    inner: Inner = field(default_factory=Inner)
    model: str = "m"


def _parse(*arguments: str) -> Given:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, Given)
    return Given(**take_options(Given, parser.parse_args(arguments)))


def test_no_flag_is_the_defaults() -> None:
    assert _parse() == Given()
    assert _parse().table is not Given().table


def test_flags_are_read_by_their_fields_types() -> None:
    given = _parse(
        *("-s", "4k", "--engine-kind", "b", "--table", '{"a": 1}', "--on", "--count", "2"),
        *("--share", "0.25", "--name", "x", "y"),
    )
    inner = Inner(share=0.25, names=("x", "y"))
    assert given == Given(4000, "b", {"a": 1}, on=True, count=2, inner=inner)
    assert not _parse("--on", "--no-on").on


def test_groups_and_order_are_the_fields() -> None:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, Given)
    text = parser.format_help()
    flags = ("--size", "--engine-kind", "--table", "--on", "--count", "--share", "--name")
    places = [text.rindex(f"  {flag}") for flag in flags]
    assert places == sorted(places)
    assert [o.flag for o in options_of(Given)] == list(flags)
    assert text.index("one:") < text.index("two:")


def test_what_only_passes_through_is_handed_on() -> None:
    given = Given(size=7, engine_kind="b", table={"k": 1})
    assert Engine(**values_for(Engine, given)) == Engine(7, "b", {"k": 1})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (Given(size=0), "size=0 must be positive."),
        (Given(engine_kind="c"), "engine_kind='c' is unknown: use one of a, b."),
        (Given(count=10), "count=10 is out of range: use 1 to 9."),
        (Engine(kind="c"), "engine_kind='c' is unknown"),
        (Inner(share=1.5), "share=1.5 is much."),
        (Given(size="32"), "size='32' must be a whole number."),  # type: ignore[arg-type]
        (Given(count=True), "count=True must be a whole number."),
        (Given(count=None), "count=None must be a whole number."),  # type: ignore[arg-type]
        (Inner(share="a"), "share='a' must be a number."),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_told(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_options(wrong)
    assert str(told.value).startswith(text)


def test_errors_may_name_flags() -> None:
    with pytest.raises(ConfigError, match=r"--share 1\.5 is much"):
        check_options(Inner(share=1.5), by_flag=True)


def test_values_that_are_no_texts_are_their_owners_business() -> None:
    """A dtype may be a torch.dtype; None stands where it is the default."""
    check_options(Engine(kind=object()))
    check_options(Engine())
    check_options(Inner(share=1))
