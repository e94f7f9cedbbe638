"""A storage that a checkpoint fills in its own layout and that keeps packed rows."""

from collections.abc import Callable, Mapping, Sequence

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.panels import CodedRows, PackedRows
from vllm.v1.attention.ops.stored import Inputs, PanelStack, RowSource

Convert = Callable[[Mapping[str, torch.Tensor]], CodedRows]


class PackingStorage:
    """A ``Storage``: until ``check`` what the files hold, afterwards panels alone.

    Args:
        num_rows: Outputs.
        num_columns: Inputs.
        raw: What follows the matrix's name in its tensors' names -> uninitialised destination.
        convert: Turns the filled tensors into rows of codes.
        inputs: What its products' inputs are rounded to.

    Owns: both forms, one after the other.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        raw: dict[str, torch.Tensor],
        convert: Convert,
        inputs: Inputs = "whole",
    ) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self._raw, self._convert, self._inputs = raw, convert, inputs
        self._packed: PackedRows | None = None

    def adopt(self, packed: PackedRows) -> list[torch.Tensor]:
        """Take a matrix that was packed before; return what files need not fill any more."""
        self._packed = packed
        return list(self._raw.values())

    @property
    def wanted_inputs(self) -> Inputs:
        """What its products' inputs are rounded to, if its groups allow it."""
        return self._inputs

    @property
    def packed(self) -> PackedRows:
        """The packed matrix."""
        assert self._packed is not None, "the checkpoint's loading has not finished"
        return self._packed

    @property
    def inputs(self) -> Inputs:
        """See ``RowSource``."""
        return self.packed.inputs

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``."""
        return self.packed.round_inputs(x)

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> PanelStack | None:
        """See ``RowSource``."""
        return self.packed.find_stack()

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``."""
        self.packed.write_rows(start, out)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``; once packed there are none."""
        return {f"{name}{suffix}": tensor for suffix, tensor in self._raw.items()}

    def check(self, name: str) -> None:
        """See ``Storage``; packs the codes, unless that was done before."""
        raw, self._raw = self._raw, {}
        if self._packed is not None:
            return
        bias = raw.pop(".bias", None)
        if bias is not None and bias.any():
            raise CheckpointError(
                f"{name}.bias is not zero, but the model that config.json describes has no bias "
                "there: the checkpoint is of another model."
            )
        self._packed = PackedRows(self._convert(raw), name, self._inputs)
