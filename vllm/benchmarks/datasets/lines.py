"""Lines of JSON from files that people made: bad ones are counted and shown, or refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")
_NUM_SHOWN = 3


@dataclass(slots=True)
class BadLines:
    """The lines of a file that were left out.

    Attributes:
        path: The file.
        is_strict: Whether the first bad line ends the run.
        count: How many.
        shown: The first of them, with what is wrong.
    """

    path: Path
    is_strict: bool = False
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, number: int, problem: str) -> None:
        """Note a bad line.

        Raises:
            ConfigError: With ``is_strict``.
        """
        text = f"line {number} of {self.path}: {problem}"
        if self.is_strict:
            raise ConfigError(f"{text}. Leave --strict out to skip such lines.")
        self.count += 1
        if len(self.shown) < _NUM_SHOWN:
            self.shown.append(text)

    def report(self) -> None:
        """Log how many lines were left out, and the first of them."""
        if self.count:
            first = "; ".join(self.shown)
            logger.warning("%d lines were skipped, among them: %s", self.count, first)

    def nothing_left(self) -> ConfigError:
        """Return the error of a file of which no line could be used."""
        why = "; ".join(self.shown) or "it is empty"
        return ConfigError(f"{self.path} has no usable line, that is a JSON object a line: {why}.")


def read_json_lines(
    path: Path, parse: Callable[[dict[str, Any]], T], bad: BadLines, every: int = 1
) -> Iterator[T]:
    """Yield what the good lines of a file say.

    Args:
        path: JSON lines; empty lines are passed over.
        parse: Makes something of an object; KeyError, TypeError and ValueError say it is bad.
        bad: Takes the others.
        every: Only each such line.

    Raises:
        ConfigError: The file cannot be read; with ``bad.is_strict``, a line is bad.
    """
    try:
        # Editors and spreadsheets begin a file with a mark of its encoding.
        file = path.open(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    with file:
        for index, line in enumerate(islice(file, 0, None, every)):
            if not line.strip():
                continue
            number = index * every + 1
            try:
                raw = json.loads(line)
                if not isinstance(raw, dict):
                    raise ValueError(f"a {type(raw).__name__} where an object is needed")
                yield parse(raw)
            except KeyError as error:
                bad.add(number, f"there is no {error}")
            except (TypeError, ValueError) as error:
                bad.add(number, str(error))
            except RecursionError:
                bad.add(number, "it is nested too deeply")
