"""Attributes that outsiders know on the scheduler and that a part of it holds."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class PartOf(Generic[T]):
    """An attribute of the scheduler that reads and writes one of a part's.

    The part is the one owner; the old name stays usable for code written against the interface.

    Args:
        part: The scheduler's attribute that is the part.
        name: The part's attribute.
    """

    def __init__(self, part: str, name: str) -> None:
        self._part = part
        self._name = name

    def __get__(self, scheduler: Any, owner: type | None = None) -> T:
        if scheduler is None:
            return cast("T", self)
        return cast("T", getattr(getattr(scheduler, self._part), self._name))

    def __set__(self, scheduler: Any, value: T) -> None:
        setattr(getattr(scheduler, self._part), self._name, value)
