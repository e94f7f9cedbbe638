"""Typed reading of config.json fields, with errors that name field, value and what is allowed."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import ConfigError

# What a float holds exactly: sizes are multiplied with floats, and nothing is larger.
LARGEST_INT = 1 << 53


class FieldReader:
    """Reads one JSON object; a JSON null counts as absent.

    Args:
        raw: The parsed object.
        prefix: Dotted path put before field names in messages.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def without(self, *names: str) -> "FieldReader":
        """Returns the object without some fields."""
        left = {name: value for name, value in self._raw.items() if name not in names}
        return FieldReader(left, self._prefix)

    def has(self, name: str) -> bool:
        """Tells whether the field is present and not null."""
        return self._raw.get(name) is not None

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        """Builds (does not raise) the error for a bad value."""
        return ConfigError(f"config.json: '{self._prefix}{name}' is {value!r}; allowed: {allowed}")

    def require(self, name: str, default: object, allowed: tuple[object, ...]) -> None:
        """Raises ConfigError unless the field (or its default) is one of ``allowed``."""
        value = self._raw.get(name, default)
        if value is not None and value not in allowed:
            raise self.error(name, value, ", ".join(repr(choice) for choice in allowed))

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Reads an integer of at least 1."""
        return self._int_from(1, name, default)

    def non_negative_int(self, name: str, default: int | None = None) -> int:
        """Reads an integer of at least 0."""
        return self._int_from(0, name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a positive finite number."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(name, value, "a positive number")
        return float(value)

    def non_negative_number(self, name: str, default: float) -> float:
        """Reads a finite number of at least 0."""
        return 0.0 if self._value(name, default) == 0 else self.number(name, default)

    def negative_number(self, name: str, default: float) -> float:
        """Reads a finite number below zero."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -float("inf") < value < 0:
            raise self.error(name, value, "a number below zero")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Reads true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def token_id(self, name: str, default: int) -> int:
        """Reads a token id; of a list of ids, the first."""
        value = self._value(name, default)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, value, "a token id of at least 0")
        return value

    def text(self, name: str, default: str) -> str:
        """Reads a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def refuse_other_spelling(self, name: str, spelled: "FieldReader") -> None:
        """Refuses an object that an older spelling gives beside the one that is read.

        Args:
            name: The older spelling's field; absent, or saying the same, it is of no consequence.
            spelled: The object that is read.

        Raises:
            ConfigError: The two differ in a field of the older one.
        """
        for key, value in self.mapping(name).items():
            if value is None:
                continue
            said = spelled._raw.get("rope_type" if key == "type" else key)
            if said != value:
                allowed = f"{said!r}, which {spelled._prefix[:-1]} says: give one of the two"
                raise self.error(f"{name}.{key}", value, allowed)

    def int_list(self, name: str) -> tuple[int, ...]:
        """Reads a list of integers; absent reads as empty."""
        value = self._raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise self.error(name, value, "a list of integers")
        return tuple(value)

    def sequence(self, name: str, num_items: int) -> Sequence[Any]:
        """Reads the first ``num_items`` items of a list that holds at least as many."""
        value = self._value(name, None)
        if not isinstance(value, list | tuple) or len(value) < num_items:
            raise self.error(name, value, f"a list of at least {num_items} items")
        return value[:num_items]

    def count(self, name: str) -> int:
        """Returns how many items a list has; absent, or no list: 0."""
        value = self._raw.get(name)
        return len(value) if isinstance(value, list | tuple) else 0

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Reads an object; absent reads as empty."""
        value = self._raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return value

    def sub_reader(self, name: str) -> "FieldReader":
        """Reads an object field as a reader of its own."""
        return FieldReader(self.mapping(name), f"{self._prefix}{name}.")

    def _int_from(self, least: int, name: str, default: int | None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, f"an integer of at least {least}")
        if value > LARGEST_INT:
            raise self.error(name, value, f"an integer up to {LARGEST_INT}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"config.json lacks '{self._prefix}{name}', which has no default")
        return default
