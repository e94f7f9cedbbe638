"""Read-only lists, and the raw bytes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, SupportsIndex, TypeVar, overload

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ConstantList(Sequence[T], Generic[T]):
    """A view of a list that cannot be changed through it; it follows the list as that grows."""

    __slots__ = ("_x",)

    def __init__(self, x: list[T]) -> None:
        self._x = x

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("This list is read-only: its owner alone changes it.")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def index(self, value: T, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of a value; ValueError if it is absent."""
        return self._x.index(value, start, len(self._x) if stop is None else stop)

    @overload
    def __getitem__(self, item: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, item: slice) -> list[T]: ...

    def __getitem__(self, item: SupportsIndex | slice) -> T | list[T]:
        return self._x[item]

    def __contains__(self, item: object) -> bool:
        return item in self._x

    def __iter__(self) -> Iterator[T]:
        return iter(self._x)

    def __len__(self) -> int:
        return len(self._x)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConstantList):
            return bool(self._x == other._x)
        return bool(self._x == other)

    __hash__ = None  # type: ignore[assignment]  # a view of something that changes

    def __add__(self, other: list[T] | ConstantList[T]) -> list[T]:
        return self._x + list(other)

    def __repr__(self) -> str:
        return f"ConstantList({self._x})"

    def copy(self) -> list[T]:
        """Return an independent, ordinary list."""
        return self._x.copy()


def tensor_data(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's values in row-major order, whatever its dtype."""
    # Whoever holds a tensor has torch loaded; the API process must not load it for this module.
    import torch  # noqa: PLC0415

    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data
