"""Triton's interpreter, with what it makes again for every operation made once.

These took most of the time of kernels on tensors as small as the tests':

* for each launch, and each call of one function of kernels by another, it goes through all names of
  ``triton.language`` for those that it runs itself;
* for each operation it makes a table of numpy's types, and for each tensor its shape three times;
* for each sum and product of whole numbers it computes whether one of 32 bits overflows, by seven
  operations more, and says so to nobody unless it debugs;
* for each launch it reads the kernel's signature anew, and takes tensors to the host, where they
  are.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_MISSING = object()


def _any_kernel() -> tuple[Any, ...]:
    """The interpreter looks into a kernel's module for these two."""
    return tl, core


class Replacements:
    """Stands in for the interpreter's own search; that must not have run before.

    Owns: what is replaced of the language while a kernel runs.
    """

    def __init__(self) -> None:
        scope = interpreter._patch_lang(_any_kernel)
        places = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
        own = [(owner, name, vars(owner)[name]) for owner, name in places.values()]
        scope.restore()
        self._changes = [
            (owner, name, getattr(owner, name, _MISSING), value) for owner, name, value in own
        ]
        self._are_in_place = False

    def put(self, _: Any) -> "Replacements":
        """Have the language be the interpreter's; within a kernel it is already."""
        if not self._are_in_place:
            for owner, name, _, value in self._changes:
                setattr(owner, name, value)
            self._are_in_place = True
        return self

    def restore(self) -> None:
        """Have it be Triton's again."""
        for owner, name, value, _ in self._changes:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._are_in_place = False


def _remember_types(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find_type(dtype: Any) -> Any:
        if isinstance(dtype, core.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, core.pointer_type):
            return _ADDRESS
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return find_type


_ADDRESS = np.dtype(np.uint64)


def _remember_blocks(check: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        # What is no whole number is refused, though it may be equal to one.
        if sizes not in known or any(type(size) is not int for size in sizes):
            check(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    return make_block


def _remember_shapes(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return make_tensor


def _bind_by(read: Callable[[Any], inspect.FullArgSpec]) -> Callable[..., Mapping[str, Any]]:
    def bind(function: Any, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        names = read(function).args
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(bound) == len(args) + len(kwargs) == len(names) and bound.keys() == set(names):
            return bound
        # There are defaults, or it is wrong.
        return inspect.getcallargs(function, *args, **kwargs)

    return bind


def _remember_signatures() -> SimpleNamespace:
    read = functools.cache(inspect.getfullargspec)
    own = {"getfullargspec": read, "getcallargs": _bind_by(read)}
    annotations = functools.cache(inspect.get_annotations)
    return SimpleNamespace(**{**vars(inspect), **own, "get_annotations": annotations})


def _remember_pointers(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[torch.dtype, Any] = {}

    def convert_argument(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return convert(arg)
        if arg.dtype not in known:
            known[arg.dtype] = convert(arg).type
        kind, address = known[arg.dtype], np.array([arg.data_ptr()], dtype=np.uint64)
        return core.tensor(interpreter.TensorHandle(address, kind), kind)

    return convert_argument


def _leave_on_host(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    assert all(arg.is_cpu for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
    return args, kwargs


def _leave_as_written(*_: Any) -> None:
    """Kernels wrote to the tensors themselves."""


def remember() -> None:
    """Have the interpreter of this process make all that once."""
    interpreter._patch_lang = Replacements().put
    interpreter._get_np_dtype = _remember_types(interpreter._get_np_dtype)
    core.block_type.__init__ = _remember_blocks(core.block_type.__init__)
    core.tensor.__init__ = _remember_shapes(core.tensor.__init__)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.inspect = _remember_signatures()
    interpreter._implicit_cvt = _remember_pointers(interpreter._implicit_cvt)
    interpreter.GridExecutor._init_args_hst = _leave_on_host
    interpreter.GridExecutor._restore_args_dev = _leave_as_written
