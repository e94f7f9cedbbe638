"""A matrix of codes as it is being loaded: what it is, and the destinations of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.quantization_config import WeightScheme
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import Shard

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_INTEGERS = {"I32": torch.int32, "I64": torch.int64}


class RawTensors:
    """Destinations of one matrix's tensors, in the types that the files have.

    Owns: the destinations, by suffix of the matrix's name.

    Args:
        name: The matrix's published name, without ".weight".
        tensors: What the files hold, by the model's names.
        device: Where it lives.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, StoredTensor], device: torch.device
    ) -> None:
        self._name, self._tensors, self._device = name, tensors, device
        self.raw: dict[str, torch.Tensor] = {}

    def take(self, suffix: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take a tensor that must be there."""
        self.raw[suffix] = torch.empty(shape, dtype=dtype, device=self._device)

    def has(self, suffix: str) -> bool:
        """Return whether the files have a tensor."""
        return self._name + suffix in self._tensors

    def take_as_stored(self, suffix: str) -> None:
        """Take a tensor whose shape and type only the files know.

        Raises:
            CheckpointError: They have none.
        """
        stored = self._tensors.get(self._name + suffix)
        if stored is None:
            raise CheckpointError(
                f"The checkpoint has no {self._name}{suffix}: it is broken; download it again."
            )
        self.take(suffix, _FLOATS.get(stored.dtype, torch.uint8), stored.shape)

    def take_if_stored(self, suffix: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take one that may be left out."""
        if self.has(suffix):
            self.take(suffix, dtype, shape)

    def take_one(self, suffix: str) -> None:
        """Take a number, which some writers store as a list of one."""
        stored = self._tensors.get(self._name + suffix)
        has_axis = stored is not None and len(stored.shape) > 0
        self.take(suffix, torch.float32, (1,) if has_axis else ())

    def take_floats(self, suffix: str, shape: tuple[int, ...]) -> None:
        """Take scales in their own type: fp16 has no room for all of bf16's."""
        stored = self._tensors.get(self._name + suffix)
        self.take(suffix, _FLOATS.get(stored.dtype if stored else "", torch.float32), shape)

    def take_scales(self, shape: tuple[int, int]) -> None:
        """Take scales of compressed-tensors, which may be one of the whole matrix."""
        stored = self._tensors.get(f"{self._name}.weight_scale")
        is_one = shape[1] == 1 and stored is not None and stored.shape in ((), (1,))
        self.take_floats(".weight_scale", stored.shape if is_one and stored else shape)

    def take_shape(self, shape: tuple[int, int]) -> None:
        """Take the true size of a matrix, which ends within a word perhaps; known already."""
        stored = self._tensors.get(f"{self._name}.weight_shape")
        if stored is not None:
            self.take(".weight_shape", _INTEGERS.get(stored.dtype, torch.int64), (len(shape),))

    def take_zero_bias(self, num_rows: int) -> None:
        """Take a bias of zeros, which some writers store where the model has none."""
        if f"{self._name}.bias" in self._tensors:
            self.raw[".bias"] = torch.zeros(num_rows, device=self._device)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix that is stored as codes.

    Attributes:
        name: Its published name, without ".weight".
        scheme: How it is stored.
        size: Rows and columns of this rank's part.
        whole: The same of all parts together.
        shard: Which part this is; None: all of it.
        make: Takes the destinations.
    """

    name: str
    scheme: WeightScheme
    size: tuple[int, int]
    whole: tuple[int, int]
    shard: Shard | None
    make: RawTensors

    @property
    def width(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.scheme.bits

    @property
    def num_groups(self) -> int:
        """Groups of inputs under one scale, in a row."""
        group = self.scheme.group
        return -(-self.size[1] // group) if group else 1
