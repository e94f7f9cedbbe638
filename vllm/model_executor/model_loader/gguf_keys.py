"""Typed reading of a GGUF file's keys. Torch-free."""

from typing import Any

from vllm.exceptions import ConfigError
from vllm.utils.gguf_file import GgufFile


class Keys:
    """Typed reading of one architecture's keys.

    Args:
        file: The file's header.
        architecture: The prefix of the keys.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self._prefix = file, architecture

    def has(self, name: str) -> bool:
        """Whether the file has the key."""
        return f"{self._prefix}.{name}" in self.file.keys

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a number of at least 1; a file may say it of each layer, if all are alike."""
        value = self._get(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.refuse(name, value, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refuse(name, value, "a positive number")
        # As its shortest spelling in fp32: 1e-6, not 9.999999974752427e-07.
        return float(f"{value:.7g}")

    def integers(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Return one number for each layer; a file may give one for all."""
        value = self._get(name, default)
        if not isinstance(value, list):
            return [self.integer(name, default)] * count
        if len(value) != count or not all(type(item) is int and item >= 1 for item in value):
            raise self.refuse(name, value, f"{count} integers of at least 1, one a layer")
        return value

    def booleans(self, name: str, count: int, num_drafting: int = 0) -> list[bool]:
        """Return one for each layer; a file may have those of blocks that draft behind them."""
        value = self._get(name, None)
        if (
            not isinstance(value, list)
            or len(value) not in (count, count + num_drafting)
            or not all(type(item) is bool for item in value)
        ):
            raise self.refuse(name, value, f"{count} booleans, one a layer")
        return value[:count]

    def count(self, name: str) -> int:
        """Return a number that may be 0, as it is where the key is missing."""
        value = self._get(name, 0)
        if type(value) is not int or value < 0:
            raise self.refuse(name, value, "an integer of at least 0")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return whether something is so."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, value, "true or false")
        return value

    def counts(self, name: str, count: int) -> list[int]:
        """Return a number that may be 0 for each layer; a file may give one for all."""
        value = self._get(name, None)
        if not isinstance(value, list):
            return [self.count(name)] * count
        if len(value) < count or not all(type(item) is int and item >= 0 for item in value):
            raise self.refuse(name, value, f"{count} integers of at least 0, one a layer")
        return value[:count]

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a number above 0 for each layer; a file may give one for all."""
        value = self._get(name, None)
        if not isinstance(value, list):
            return [self.number(name)] * count
        if len(value) < count or not all(type(item) is float and 0 < item < 1e30 for item in value):
            raise self.refuse(name, value, f"{count} numbers above 0, one a layer")
        return [float(f"{item:.7g}") for item in value[:count]]

    def require(self, name: str, default: Any, *allowed: Any) -> None:
        """Refuse another value than those that are served.

        Raises:
            ConfigError: It is another.
        """
        value = self._get(name, default)
        if value not in allowed:
            raise self.refuse(name, value, ", ".join(map(repr, allowed)))

    def text(self, name: str, default: str) -> str:
        """Return a word."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, value, "text")
        return value

    def refuse(self, name: str, value: object, allowed: str) -> ConfigError:
        """Return the error of a key that says what is not served."""
        return ConfigError(
            f"{self.file.path}: key {self._prefix}.{name} is {value!r}; allowed: {allowed}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.file.keys.get(f"{self._prefix}.{name}", default)
        if value is None:
            raise ConfigError(
                f"{self.file.path} lacks the key {self._prefix}.{name}, which has no default"
            )
        return value
