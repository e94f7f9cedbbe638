"""The seam for quantised weights: layers call what they got, and keep no weight of their own."""

from collections.abc import Sequence

import torch

from vllm.distributed.parallel_state import SingleProcessGroup
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    GroupedColumnParallelLinear,
    ReplicatedLinear,
    TensorFactory,
)
from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec
from vllm.v1.attention.ops.registry import get_reference_op


class HalvedMatrix:
    """Keeps half of each value, as a stand-in for a storage of its own."""

    row_source = None

    def __init__(self, in_size: int, out_size: int, num_groups: int) -> None:
        self.half = torch.empty(out_size, in_size)
        self.num_groups = num_groups
        self.num_prepared = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.map_prepared(self.prepare(x))

    def prepare(self, x: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.num_prepared += 1
        return "doubled", 2 * x

    def map_prepared(self, prepared: tuple[str, torch.Tensor]) -> torch.Tensor:
        assert prepared[0] == "doubled"
        return prepared[1] @ self.half.T

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.half.view(self.num_groups, -1, self.half.shape[1])
        return 2 * torch.einsum("tgi,goi->tgo", x, halves)

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.half": self.half}


class HalvedWeights:
    """Quantises the matrices it was given the names of; records what it was asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []

    def make_matrix(self, spec: MatrixSpec) -> HalvedMatrix | None:
        self.asked.append(spec.name)
        if spec.name not in self.names:
            return None
        return HalvedMatrix(spec.in_size, spec.out_size, spec.num_groups)

    def has_part(self, prefix: str) -> bool:
        return True

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        return None

    def find_row_decoder(self, name: str, width: int) -> None:
        """No table is stored otherwise."""

    def make_experts(self, spec: ExpertsSpec) -> None:
        return None

    def finish_loading(self) -> None:
        pass


def factory(quantization: HalvedWeights) -> TensorFactory:
    make = TensorFactory(
        torch.float32, torch.device("cpu"), SingleProcessGroup(), get_reference_op, quantization
    )
    return make.within("p")


def fill(slot: torch.Tensor) -> torch.Tensor:
    return slot.copy_(torch.randn(slot.shape))


def test_some_of_fused_matrices() -> None:
    quantization = HalvedWeights("p.b")
    layer = ReplicatedLinear(4, (3, 5, 2), factory(quantization), ("a", "b"))
    assert quantization.asked == ["p.a", "p.b"]
    assert layer.weight.shape == (5, 4)
    (a,) = layer.part_slots(0, "p.a").values()
    slots = layer.part_slots(1, "p.b")
    assert list(slots) == ["p.b.half"]
    half, last = slots["p.b.half"], layer.weight_parts()[2]
    for slot in (a, half, last):
        fill(slot)
    x = torch.randn(6, 4)
    expected = torch.cat([x @ a.T, 2 * x @ half.T, x @ last.T], -1)
    torch.testing.assert_close(layer(x), expected)


def test_fused_matrices_share_their_prepared_input() -> None:
    quantization = HalvedWeights("p.a", "p.c")
    layer = ReplicatedLinear(4, (3, 5, 2), factory(quantization), ("a", "b", "c"))
    first, _, last = layer._quantised
    a, c = fill(first.half), fill(last.half)
    (b,) = layer.part_slots(1, "p.b").values()
    fill(b)
    x = torch.randn(6, 4)
    expected = torch.cat([2 * x @ a.T, x @ b.T, 2 * x @ c.T], -1)
    torch.testing.assert_close(layer(x), expected)
    assert (first.num_prepared, last.num_prepared) == (1, 0)


def test_a_whole_layer() -> None:
    layer = ColumnParallelLinear("n", 4, 3, factory(HalvedWeights("p.c")), "c")
    assert layer.weight.numel() == 0
    half = fill(layer.weight_slots("p.c")["p.c.half"])
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), 2 * x @ half.T)


def test_grouped_matrices() -> None:
    plain = GroupedColumnParallelLinear("g", 2, 4, 3, factory(HalvedWeights()), "d")
    halved = GroupedColumnParallelLinear("g", 2, 4, 3, factory(HalvedWeights("p.d")), "d")
    weight = fill(plain.weight_slots("p.d")["p.d.weight"])
    halved.weight_slots("p.d")["p.d.half"].copy_(weight / 2)
    x = torch.randn(5, 8)
    torch.testing.assert_close(halved(x), plain(x))


def test_a_matrix_without_a_name_is_never_asked_for() -> None:
    quantization = HalvedWeights("p.")
    ColumnParallelLinear("n", 4, 3, factory(quantization))
    assert quantization.asked == []
