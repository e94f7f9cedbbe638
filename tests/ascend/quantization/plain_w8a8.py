"""W8A8_DYNAMIC written down once more, plainly: no npu call, no fusion, one matrix at a time.

Rows are rounded to 8 bits by their largest value, products of integers are exact, scales come last.
"""

from collections.abc import Collection, Sequence

import torch

from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whole numbers -127 .. 127 and the step between them, per row."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    numbers = torch.where(step > 0, x.float() / step, 0.0).round()
    return numbers, step


class PlainMatrix:
    """One int8 matrix [out, in] as published."""

    row_source = None

    def __init__(self, in_size: int, out_size: int, num_groups: int = 1) -> None:
        self.weight = torch.empty(out_size, in_size, dtype=torch.int8)
        self.scale = torch.empty(out_size, 1)
        self.offset = torch.empty(out_size, 1)
        self._num_groups = num_groups

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.map_groups(x.unsqueeze(1)).squeeze(1)

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def map_prepared(self, prepared: torch.Tensor) -> torch.Tensor:
        return self(prepared)

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        weights, scales = self.weight.chunk(self._num_groups), self.scale.chunk(self._num_groups)
        for group, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
            numbers, step = round_rows(x[:, group])
            exact = (numbers.double() @ weight.double().T).float()
            outputs.append(exact * scale.T * step)
        return torch.stack(outputs, 1)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        parts = {"weight": self.weight, "weight_scale": self.scale, "weight_offset": self.offset}
        return {f"{name}.{leaf}": part for leaf, part in parts.items()}


class PlainExperts:
    """Routed experts and the shared one, a token and an expert at a time."""

    def __init__(self, num_experts: int, hidden: int, inner: int, limit: float) -> None:
        self._limit = limit
        self._names = [f"experts.{e}" for e in range(num_experts)] + ["shared_experts"]
        shapes = {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}
        self._experts = [
            {leaf: PlainMatrix(*shape) for leaf, shape in shapes.items()} for _ in self._names
        ]

    def _run(self, expert: dict[str, PlainMatrix], x: torch.Tensor) -> torch.Tensor:
        gate = expert["w1"](x).clamp(max=self._limit)
        up = expert["w3"](x).clamp(-self._limit, self._limit)
        return expert["w2"](gate * torch.sigmoid(gate) * up)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        mixed = torch.zeros(x.shape, dtype=torch.float64)
        for index, expert in enumerate(self._experts[:-1]):
            for token, place in (expert_ids == index).nonzero().tolist():
                row = self._run(expert, x[token : token + 1])[0]
                mixed[token] += weights[token, place].double() * row
        return (mixed.float() + self._run(self._experts[-1], x)).to(x.dtype)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, expert in zip(self._names, self._experts, strict=True):
            for leaf, matrix in expert.items():
                found |= matrix.slots(f"{prefix}.{name}.{leaf}")
        return found


class PlainW8A8:
    """A ``WeightQuantization`` of every matrix in ``names``, experts included."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def make_matrix(self, spec: MatrixSpec) -> PlainMatrix | None:
        if spec.name not in self._names:
            return None
        return PlainMatrix(spec.in_size, spec.out_size, spec.num_groups)

    def make_experts(self, spec: ExpertsSpec) -> PlainExperts:
        return PlainExperts(spec.num_experts, spec.hidden_size, spec.inner_size, spec.limit)

    def has_part(self, prefix: str) -> bool:
        return True

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        return None

    def finish_loading(self) -> None:
        pass
