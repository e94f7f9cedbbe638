"""A CUDA graph's stand-in: records a step's operators and kernels, and replays them.

As on a device, a replay runs what was recorded on the addresses it was recorded with and nothing
of Python in between. So that a test sees what a device would only make wrong:

* an operator that reads memory which neither lives as long as the model nor was made in the step
  is refused,
* a word from the device to the host is refused,
* before a replay all that the step made is NaN.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vllm.v1.attention.ops.triton.launch import launching_by, run_kernel

_aten = torch.ops.aten
_READS_OF_OPERATORS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique2.default,
}
_READS_OF_TENSORS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
}


# Whose objects keep tensors that are no parameters.
_STORED_MATRICES = "vllm.model_executor.layers.quantization."


class HostReadError(AssertionError):
    """A step waited for the device."""


class NoHostReads(TorchFunctionMode):
    """Refuses methods that bring a tensor's values to the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch that reads nothing on the host."""
        if func in _READS_OF_TENSORS:
            raise HostReadError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Refuses operators that wait for the device, and new tensors of the host's values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that the host does not wait for."""
        if func in _READS_OF_OPERATORS or func is _aten.lift_fresh.default:
            raise HostReadError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Guarded:
    """A model whose host waits for the device in no step.

    Args:
        model: The model; what else it has is its own.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Run a step as the model does."""
        with launching_by(run_unguarded), NoHostReads(), NoWaits():
            streams: torch.Tensor = self._model(*arguments)
        return streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def run_unguarded(kernel: Any, grid: Any, args: Any, options: Any) -> None:
    """Runs a kernel; what the interpreter does for it is nobody's to see."""
    with _disable_current_modes():
        run_kernel(kernel, grid, args, options)


def find_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and objects of ours."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, torch.nn.Module):
        for module in node.modules():
            yield from module.parameters(recurse=False)
            for value in vars(module).values():
                if not isinstance(value, torch.nn.Module):
                    yield from find_tensors(value)
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from find_tensors(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from find_tensors(value)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            yield from find_tensors(getattr(node, field.name))
    elif type(node).__module__.startswith(_STORED_MATRICES):
        yield from find_tensors(vars(node))


def _sides(func: Any) -> list[Any]:
    return [*func._schema.arguments, *func._schema.returns]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """One recorded step.

    Args:
        lasting: Tensors that stay where they are.

    Attributes:
        num_replays: How often it was replayed.
    """

    def __init__(self, lasting: set[int]) -> None:
        super().__init__()
        self._known = set(lasting)
        self._entries: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []
        self._is_in_kernel = False
        self.num_replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and remember it."""
        kwargs = dict(kwargs or {})
        if self._is_in_kernel:
            return func(*args, **kwargs)
        if func in _READS_OF_OPERATORS:
            raise HostReadError(f"{func} waits for the device")
        self._check(str(func), (args, kwargs))
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            # A collective writes what it was given; its second result is waited for.
            self._entries.append(lambda: func(*args, **kwargs)[1].wait())
            return result
        if any(item.alias_info is not None and item.alias_info.is_write for item in _sides(func)):
            self._entries.append(lambda: func(*args, **kwargs))
            return result
        # What lies elsewhere than every input is new; the rest are views.
        sources = {_address(tensor) for tensor in find_tensors((args, kwargs))}
        outputs = [tensor for tensor in find_tensors(result) if _address(tensor) not in sources]
        if outputs:
            self._made += outputs
            self._known |= {_address(output) for output in outputs}
            self._entries.append(lambda: self._run_again(func, args, kwargs, outputs))
        return result

    @staticmethod
    def _run_again(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        if func.name().startswith("aten::empty") or func.name().startswith("aten::new_empty"):
            return
        for output, again in zip(outputs, find_tensors(func(*args, **kwargs)), strict=True):
            output.copy_(again)

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Run a kernel and remember it; a ``Launcher``."""
        self._check(kernel.__name__, args)
        self._is_in_kernel = True
        try:
            run_kernel(kernel, grid, args, options)
        finally:
            self._is_in_kernel = False
        self._entries.append(lambda: run_kernel(kernel, grid, args, options))

    def _check(self, name: str, inputs: Any) -> None:
        for tensor in find_tensors(inputs):
            if tensor.numel() and _address(tensor) not in self._known:
                raise AssertionError(
                    f"{name} reads {tuple(tensor.shape)} {tensor.dtype}, which will not be there"
                )

    def replay(self) -> None:
        """Run the step again; see ``Graph``."""
        self.num_replays += 1
        for tensor in self._made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        for entry in self._entries:
            entry()


class GraphRecorder:
    """A ``GraphDevice`` of recordings.

    Args:
        lasting: What lives as long as the model: modules, tensors, containers of them.

    Attributes:
        recordings: In the order in which they were captured.
    """

    def __init__(self, *lasting: Any) -> None:
        self._lasting = lasting
        self.recordings: list[Recording] = []

    def capture(
        self, run: Callable[[], torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[Recording, torch.Tensor]:
        """Record a step; see ``GraphDevice``."""
        addresses = {_address(tensor) for tensor in find_tensors([*self._lasting, *buffers])}
        recording = Recording(addresses)
        with launching_by(recording.launch), NoHostReads(), recording:
            result = run()
        self.recordings.append(recording)
        return recording, result

    def allocated_bytes(self) -> int:
        """Nothing is measured here."""
        return 0

    def release(self) -> None:
        """Recordings hold nothing that others wait for."""
