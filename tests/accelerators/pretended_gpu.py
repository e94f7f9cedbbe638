"""A GPU's stand-in for whole engines: tensors that say they are on ``cuda`` and lie on the CPU.

Every operator runs for real, so answers can be compared with a CPU's. What a device would refuse,
and plain CPU tensors hide, is refused here too:

* an operator, or a kernel, that is given tensors of the device and of the host at once (an index
  and a copy may be the host's),
* ``numpy()`` of a tensor of the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.accelerators.graph_recorder import run_unguarded
from vllm.config import VllmConfig
from vllm.gpu.decode_graphs import GraphDevice
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.ops.triton.launch import launching_by

DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
# What may read the host's memory beside the device's, as torch allows.
_COPIES = {_aten.copy_.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}


class DeviceMismatchError(AssertionError):
    """Memory of the host where a device reads its own, or the other way round."""


class FarTensor(torch.Tensor):
    """A tensor of the device.

    Args:
        held: Its values, on the CPU.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type["FarTensor"], held: torch.Tensor) -> "FarTensor":
        """Makes the tensor that others see."""
        # A wrapper cannot say that it is conjugated lazily.
        held = held.resolve_conj()
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs what torch's own bindings cannot without a device."""
        own = _METHODS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator on the values."""
        return _run(func, args, dict(kwargs or {}))


def _get_item(tensor: torch.Tensor, index: Any) -> Any:
    _check_index(tensor, index)
    found = _near(tensor)[tree_map(_near, index)]
    return FarTensor(found) if isinstance(tensor, FarTensor) else found


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    _check_index(tensor, index)
    _near(tensor)[tree_map(_near, index)] = _near(value)


def _check_index(tensor: torch.Tensor, index: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, FarTensor) and any(isinstance(item, FarTensor) for item in items):
        raise DeviceMismatchError("a tensor of the host is indexed by one of the device")


def _to_list(tensor: torch.Tensor) -> Any:
    return _near(tensor).tolist()


def _refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    raise DeviceMismatchError(f"numpy() of a tensor {tuple(tensor.shape)} of the device")


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _near(tensor).copy_(_near(source), non_blocking)
    return tensor


def _make_contiguous(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    made = _near(tensor).contiguous(**options)
    return tensor if made is _near(tensor) else FarTensor(made)


def _fill_where(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    _run(_aten.masked_fill_.Scalar, (tensor, mask, value), {})
    return tensor


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.masked_fill_: _fill_where,
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: _make_contiguous,
    torch.Tensor.copy_: _copy,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.tolist: _to_list,
    torch.Tensor.numpy: _refuse,
}


def _near(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, FarTensor) else value


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the values of its tensors; what it makes is where they are."""
    named = [*args, *kwargs.values()]
    device = next((value for value in named if isinstance(value, torch.device)), None)
    tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    are_far = [isinstance(tensor, FarTensor) for tensor in tensors]
    if any(are_far) and not all(are_far):
        _check_mixed(func, tensors)
    kwargs.pop("pin_memory", None)
    if func is _aten.mm.dtype:
        # On a CPU no product has sums wider than its inputs.
        left, right = (_near(value).float() for value in args[:2])
        return FarTensor((left @ right).to(args[2]))
    result = func(*tree_map(_near, args), **tree_map(_near, kwargs))
    # What was written, and what a move left where it was, is the caller's own.
    known = {id(_near(tensor)): tensor for tensor in tensors}
    is_far = device.type == DEVICE.type if device is not None else any(are_far)

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = known.get(id(value))
        if own is not None and isinstance(own, FarTensor) == is_far:
            return own
        moved = value if own is None else value.clone()
        return FarTensor(moved) if is_far else moved

    return tree_map(place, result)


def _check_mixed(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    near = [tensor for tensor in tensors if not isinstance(tensor, FarTensor)]
    # A number may be a tensor of the host's.
    if func in _COPIES or not any(tensor.dim() for tensor in near):
        return
    if func in _INDEXED and isinstance(tensors[0], FarTensor):
        return
    where = ", ".join(
        f"{'device' if isinstance(tensor, FarTensor) else 'host'} {tuple(tensor.shape)}"
        for tensor in tensors
    )
    raise DeviceMismatchError(f"{func} of tensors in two places: {where}")


class _OnDevice(TorchDispatchMode):
    """Makes tensors on the device where one is asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator where its tensors are."""
        return _run(func, args, dict(kwargs or {}))


class _FromHost(TorchFunctionMode):
    """Takes values of Python to the device by way of the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch."""
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FarTensor):
        raise DeviceMismatchError(f"pinned memory for a tensor {tuple(tensor.shape)} of the device")
    return tensor


def _launch(kernel: Any, grid: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
    for value in (*args, *options.values()):
        if isinstance(value, torch.Tensor) and not isinstance(value, FarTensor):
            raise DeviceMismatchError(
                f"{kernel.__name__} reads {tuple(value.shape)} {value.dtype} of the host"
            )
    near = {name: _near(value) for name, value in options.items()}
    run_unguarded(kernel, grid, tuple(_near(value) for value in args), near)


class _Event:
    """``torch.cuda.Event``, at once."""

    def record(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


class PretendedPlatform(CudaPlatform):
    """The CUDA platform on the pretended device, kernels interpreted."""

    device_name = "pretended-gpu"
    dist_backend = "gloo"

    def _look_for_obstacle(self) -> str:
        return ""

    def default_dtype(self, config: VllmConfig) -> str:
        """Return float32: what is compared with a CPU is compared in it."""
        del config
        return "float32"

    def make_device(self, local_rank: int) -> torch.device:
        """Return the device."""
        del local_rank
        return DEVICE

    def total_memory_bytes(self) -> int:
        """Return a small card's."""
        return 8 << 30

    def free_memory_bytes(self) -> int:
        """Return all of it."""
        return 8 << 30

    def device_memory(self) -> Any:
        """Return None: nothing is measured."""
        return None

    def make_graph_device(self) -> GraphDevice | None:
        """Return None: nothing is captured."""
        return None


@contextmanager
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has torch pretend that there is a device."""
    with ExitStack() as stack, monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "_lazy_init", lambda: None)
        patched.setattr(torch.cuda, "Event", _Event)
        # Views of a wrapped tensor cannot be made in inference mode.
        patched.setattr(torch._C, "_InferenceMode", lambda _: torch.no_grad())
        patched.setattr(torch.Tensor, "pin_memory", _pin)
        stack.enter_context(launching_by(_launch))
        stack.enter_context(_FromHost())
        stack.enter_context(_OnDevice())
        yield
