"""W8A8_DYNAMIC: int8 weights with a scale per output, activations quantised per row at run time.

A matrix is published as int8 [out, in] with fp32 scale and offset [out, 1]. It is kept [in, out],
as the product wants it; slots are transposed views, so that loading transposes. Offsets of this
symmetric scheme are zero, which is checked.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec
from vllm.v1.attention.ops.stored import RowSource
from vllm_ascend.ops.dtype_codes import code_of
from vllm_ascend.ops.experts import clamped_swiglu, grouped_product, route, unroute

_NZ_FORMAT = 29  # fractal NZ: the tiling the matrix unit reads without rearranging


class Int8Stack:
    """E matrices of one shape.

    Args:
        num_matrices: E.
        in_size: Inputs of a matrix.
        out_size: Its outputs.
        scale_dtype: Type of the scales.
        device: Where it lives.
    """

    def __init__(
        self,
        num_matrices: int,
        in_size: int,
        out_size: int,
        scale_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_matrices, in_size, out_size)
        self.weights = torch.empty(shape, dtype=torch.int8, device=device)
        self.scales = torch.empty((num_matrices, out_size), dtype=scale_dtype, device=device)
        # Stays zero where the checkpoint has none.
        self.offsets = torch.zeros((num_matrices, out_size), device=device)

    def slots(
        self, index: int, name: str, outputs: slice, has_offset: bool
    ) -> dict[str, torch.Tensor]:
        """Return the destinations of the published matrix ``name``: some outputs of one matrix."""
        found = {
            f"{name}.weight": self.weights[index, :, outputs].t(),
            f"{name}.weight_scale": self.scales[index, outputs].unsqueeze(1),
        }
        if has_offset:
            found[f"{name}.weight_offset"] = self.offsets[index, outputs].unsqueeze(1)
        return found

    def finish(self, name: str, use_nz: bool) -> None:
        """Check the offsets, and rearrange the weights if asked for.

        Raises:
            CheckpointError: An offset is not zero.
        """
        if self.offsets.any():
            raise CheckpointError(
                f"{name}.weight_offset is not zero: asymmetric weights are not supported. "
                "Quantise the weights symmetrically."
            )
        if use_nz:
            self.weights = torch.ops.npu.npu_format_cast(self.weights, _NZ_FORMAT)


class QuantisedRows(NamedTuple):
    """int8 rows [..., in] and their fp32 scales [...]."""

    rows: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor) -> QuantisedRows:
    """Quantise rows [..., in], each by its largest value. No rows: no call."""
    if not x.shape[0]:
        return QuantisedRows(x.to(torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32))
    return QuantisedRows(*torch.ops.npu.npu_dynamic_quant(x))


def multiply(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [T, out] in ``dtype`` of int8 rows [T, in] and an int8 weight [in, out]."""
    product: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        rows, weight, scale, pertoken_scale=row_scales, output_dtype=code_of(dtype)
    )
    return product


class W8A8Matrix:
    """A ``QuantisedMatrix``."""

    row_source: RowSource | None = None

    def __init__(self, spec: MatrixSpec, has_offset: bool) -> None:
        self._name, self._has_offset, self._dtype = spec.name, has_offset, spec.dtype
        self._stack = Int8Stack(1, spec.in_size, spec.out_size, torch.float32, spec.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        return self.map_prepared(self.prepare(x))

    def prepare(self, x: torch.Tensor) -> QuantisedRows:
        """Quantise rows [T, in], once for all matrices over them."""
        return quantise(x)

    def map_prepared(self, prepared: QuantisedRows) -> torch.Tensor:
        """Map quantised rows to [T, out]."""
        weight, scale = self._stack.weights[0], self._stack.scales[0]
        if not prepared.rows.shape[0]:
            return weight.new_empty((0, weight.shape[1]), dtype=self._dtype)
        return multiply(prepared.rows, prepared.scales, weight, scale, self._dtype)

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, 1, in] to [T, 1, out]; ``W8A8GroupedMatrix`` maps more groups."""
        assert x.shape[1] == 1, f"{self._name} was made for one group, not {x.shape[1]}"
        return self(x[:, 0]).unsqueeze(1)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination."""
        return self._stack.slots(0, name, slice(None), self._has_offset)

    def finish(self, use_nz: bool) -> None:
        """See ``Int8Stack.finish``."""
        self._stack.finish(self._name, use_nz)


class W8A8GroupedMatrix:
    """A ``QuantisedMatrix`` over slices of its input, each slice quantised by itself.

    Kept [g * out, in] as published: rows of one group are then one piece of memory, and the product
    takes their transposed view.
    """

    row_source: RowSource | None = None

    def __init__(self, spec: MatrixSpec, has_offset: bool) -> None:
        self._name, self._num_groups, self._dtype = spec.name, spec.num_groups, spec.dtype
        size, device = (spec.out_size, spec.in_size), spec.device
        self._weight = torch.empty(size, dtype=torch.int8, device=device)
        self._scale = torch.empty(spec.out_size, device=device)
        self._offset = torch.zeros(spec.out_size, device=device) if has_offset else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Refuse: ``W8A8Matrix`` does it."""
        return self.map_prepared(self.prepare(x))

    def prepare(self, x: torch.Tensor) -> QuantisedRows:
        """Quantise slices [T, g, in], each by itself."""
        return quantise(x)

    def map_prepared(self, prepared: QuantisedRows) -> torch.Tensor:
        """Refuse: ``W8A8Matrix`` does it."""
        raise AssertionError(f"{self._name} maps {self._num_groups} groups, not a whole input")

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, g, in] to [T, g, out / g]."""
        weights, scales = self._weight.chunk(self._num_groups), self._scale.chunk(self._num_groups)
        if not x.shape[0]:
            return x.new_empty((0, self._num_groups, scales[0].shape[0]))
        rows, row_scales = self.prepare(x)
        parts = [
            multiply(
                rows[:, group].contiguous(),
                row_scales[:, group].contiguous(),
                weight.t(),
                scale,
                self._dtype,
            )
            for group, (weight, scale) in enumerate(zip(weights, scales, strict=True))
        ]
        return torch.stack(parts, 1)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination."""
        found = {f"{name}.weight": self._weight, f"{name}.weight_scale": self._scale.unsqueeze(1)}
        if self._offset is not None:
            found[f"{name}.weight_offset"] = self._offset.unsqueeze(1)
        return found

    def finish(self, use_nz: bool) -> None:
        """Check the offset; transposed views keep the plain format.

        Raises:
            CheckpointError: An offset is not zero.
        """
        del use_nz
        if self._offset is not None and self._offset.any():
            raise CheckpointError(
                f"{self._name}.weight_offset is not zero: asymmetric weights are not supported. "
                "Quantise the weights symmetrically."
            )


class GatedMatrices:
    """The gate, up and down matrices of E experts.

    Args:
        spec: The experts: E of them, over D inputs, with M values between their matrices.
        scale_dtype: Type of the weights' scales.
    """

    def __init__(self, spec: ExpertsSpec, scale_dtype: torch.dtype) -> None:
        hidden, inner = spec.hidden_size, spec.inner_size
        self._inner_size, self._limit, self._dtype = inner, spec.limit, spec.dtype
        self.num_experts = spec.num_experts
        self._gate_up = Int8Stack(spec.num_experts, hidden, 2 * inner, scale_dtype, spec.device)
        self._down = Int8Stack(spec.num_experts, inner, hidden, scale_dtype, spec.device)

    def map_rows(
        self, rows: torch.Tensor, row_scales: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Map int8 rows sorted by expert, with their scales, to rows [N, D]."""
        code = code_of(self._dtype)
        up, down = self._gate_up, self._down
        hidden = grouped_product(
            rows,
            up.weights,
            counts,
            scales=up.scales,
            row_scales=row_scales,
            output_dtype=code,
        )
        rows, row_scales = quantise(clamped_swiglu(hidden, self._limit))
        return grouped_product(
            rows,
            down.weights,
            counts,
            scales=down.scales,
            row_scales=row_scales,
            output_dtype=code,
        )

    def map_all(self, rows: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        """Map int8 rows by the only expert."""
        up, down = self._gate_up, self._down
        hidden = multiply(rows, row_scales, up.weights[0], up.scales[0], self._dtype)
        rows, row_scales = quantise(clamped_swiglu(hidden, self._limit))
        return multiply(rows, row_scales, down.weights[0], down.scales[0], self._dtype)

    def slots(self, index: int, name: str, has_offset: bool) -> dict[str, torch.Tensor]:
        """Return the destinations of one expert's w1, w3 and w2."""
        gate, up = slice(0, self._inner_size), slice(self._inner_size, None)
        return {
            **self._gate_up.slots(index, f"{name}.w1", gate, has_offset),
            **self._gate_up.slots(index, f"{name}.w3", up, has_offset),
            **self._down.slots(index, f"{name}.w2", slice(None), has_offset),
        }

    def finish(self, name: str, use_nz: bool) -> None:
        """See ``Int8Stack.finish``."""
        self._gate_up.finish(f"{name}.w1 or w3", use_nz)
        self._down.finish(f"{name}.w2", use_nz)


class PlainGatedMatrices:
    """A shared expert that was left unquantised."""

    def __init__(self, spec: ExpertsSpec) -> None:
        hidden, inner = spec.hidden_size, spec.inner_size
        self._limit = spec.limit
        self._gate_up = torch.empty((2 * inner, hidden), dtype=spec.dtype, device=spec.device)
        self._down = torch.empty((hidden, inner), dtype=spec.dtype, device=spec.device)

    def map_all(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, D] to [T, D]."""
        return linear(clamped_swiglu(linear(x, self._gate_up), self._limit), self._down)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return the destinations of w1, w3 and w2."""
        gate, up = self._gate_up.chunk(2)
        return {f"{name}.w1.weight": gate, f"{name}.w3.weight": up, f"{name}.w2.weight": self._down}


class W8A8Experts:
    """A ``QuantisedExperts``; a token's row is quantised once for all its experts.

    Args:
        routed: The routed experts.
        shared: The shared one.
        prefix: Published prefix of the layer, with its dot, for messages.
        has_offset: Whether the checkpoint stores offsets of the routed ones.
        has_shared_offset: Whether it stores offsets of the shared one.
    """

    def __init__(
        self,
        routed: GatedMatrices,
        shared: GatedMatrices | PlainGatedMatrices,
        prefix: str,
        has_offset: bool,
        has_shared_offset: bool,
    ) -> None:
        self._routed, self._prefix = routed, prefix
        self._has_offset, self._has_shared_offset = has_offset, has_shared_offset
        self._shared = shared if isinstance(shared, GatedMatrices) else None
        self._plain_shared = shared if isinstance(shared, PlainGatedMatrices) else None

    # From the start: its kernels group the rows by expert.
    is_one_product = True

    def stack(self) -> None:
        """See ``QuantisedExperts``: they lie in stacks already."""

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Map [T, D] to [T, D]."""
        if not x.shape[0]:
            return torch.empty_like(x)
        own_rows, own_scales = quantise(x)
        rows, row_index, counts, row_scales = route(
            own_rows, expert_ids, self._routed.num_experts, own_scales
        )
        mixed = unroute(self._routed.map_rows(rows, row_scales, counts), row_index, weights)
        if self._plain_shared is not None:
            return mixed + self._plain_shared.map_all(x)
        assert self._shared is not None
        return mixed + self._shared.map_all(own_rows, own_scales)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination."""
        found: dict[str, torch.Tensor] = {}
        for expert in range(self._routed.num_experts):
            name = f"{prefix}.experts.{expert}"
            found.update(self._routed.slots(expert, name, self._has_offset))
        name = f"{prefix}.shared_experts"
        if self._plain_shared is not None:
            return found | self._plain_shared.slots(name)
        assert self._shared is not None
        return found | self._shared.slots(0, name, self._has_shared_offset)

    def finish(self, use_nz: bool) -> None:
        """See ``Int8Stack.finish``."""
        self._routed.finish(f"{self._prefix}experts", use_nz)
        if self._shared is not None:
            self._shared.finish(f"{self._prefix}shared_experts", use_nz)
