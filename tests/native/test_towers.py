"""Towers on the native kernels: near torch, and the same bits for any threads and rows."""

from typing import Any

import pytest
import torch

from tests.native.test_library import builds
from vllm.model_executor.towers.encoder import EncoderPlan, LayerNames
from vllm.model_executor.towers.kernels import TorchKernels
from vllm.model_executor.towers.parts import make_turns
from vllm.model_executor.towers.weights import TowerWeights
from vllm.native.library import NativeContext
from vllm.native.loader import load_library
from vllm.native.towers import PAIR_GROUP, NativeTowerKernels, pack_pairs

NAMES = LayerNames(
    ("before", "behind", "before_mlp", "behind_mlp"),
    *"qkvo",
    up="up",
    down="down",
    gate="gate",
    query_norm="q_norm",
    key_norm="k_norm",
)
PLAIN = LayerNames(("before", "before_mlp"), *["qkv"] * 3, output="o", up="up", down="down")


class DrawnWeights(TowerWeights):
    """Those of a layer, drawn so that each matters.

    Args:
        plan: The layer.
        inner: Of the MLP.
        bound: What products are clamped to on both sides; 0: to nothing.
        dtype: Of the values.
    """

    def __init__(
        self,
        plan: EncoderPlan,
        inner: int,
        bound: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        d, heads = plan.width, plan.num_heads * plan.head_dim
        shared = plan.num_kv_heads * plan.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        matrices = {"q": (heads, d), "k": (shared, d), "v": (shared, d), "o": (d, heads)}
        matrices |= {"qkv": (heads + 2 * shared, d), "up": (inner, d), "gate": (inner, d)}
        for name, shape in {**matrices, "down": (d, inner)}.items():
            if bound:
                shapes[f"0.{name}.linear.weight"] = shape
                ends = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")]
                shapes |= {f"0.{name}.{end}": () for end in ends}
            else:
                shapes |= {f"0.{name}.weight": shape, f"0.{name}.bias": shape[:1]}
        for name in NAMES.norms:
            shapes |= {f"0.{name}.weight": (d,), f"0.{name}.bias": (d,)}
        shapes |= {f"0.{name}.weight": (plan.head_dim,) for name in ("q_norm", "k_norm")}
        super().__init__(None, {f"p.{name}": shape for name, shape in shapes.items()}, dtype)
        self._bound = bound

    def _read(self, name: str) -> torch.Tensor:
        return self._draw(name).to(self.dtype)

    def _draw(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(sum(name.encode()))
        noise = torch.randn(tuple(shape), generator=generator)
        if not shape:
            return torch.tensor(-self._bound if name.endswith("min") else self._bound)
        if len(shape) == 1:
            return 0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
        # A few values are far from the others, as in trained towers.
        noise[::7, ::11] *= 4
        return noise * shape[1] ** -0.5


def make_plan(**changes: Any) -> EncoderPlan:
    fields: dict[str, Any] = {
        "prefix": "p",
        "names": NAMES,
        "num_layers": 1,
        "width": 80,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 20,
        "scale": 20**-0.5,
        "eps": 1e-6,
        "norm": "rms",
    }
    return EncoderPlan(**{**fields, **changes})


def make_kernels(
    weights: TowerWeights,
    plan: EncoderPlan,
    build: str,
    num_threads: int,
    *,
    rounds: bool = False,
) -> Any:
    library = load_library()
    assert library is not None
    context = NativeContext(library, num_threads, build)
    return NativeTowerKernels(lambda: context, weights, plan, rounds=rounds)


def run(
    kernels: Any,
    plan: EncoderPlan,
    count: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    x = torch.randn(count, plan.width, generator=torch.Generator().manual_seed(seed))
    turns = None
    if plan.num_turned_parts:
        axes = [torch.arange(count) // 9, torch.arange(count) % 9]
        turns = make_turns(100.0, plan.head_dim // 4, axes)
    made: torch.Tensor = kernels.run_layer(0, x.to(dtype), turns)
    return made.float()


def measure(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of a difference, as a part of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


CASES: dict[str, tuple[EncoderPlan, int, float]] = {
    "plain, biases, one product of all": (make_plan(names=PLAIN, norm="layer"), 200, 0.0),
    "gated, all norms": (make_plan(norms_values=True, num_turned_parts=2, scale=1.0), 193, 0.0),
    "turned as one": (make_plan(names=PLAIN, norm="layer", num_turned_parts=1), 50, 0.0),
    "bounds": (make_plan(norms_values=True, scale=0.3), 97, 1.5),
    "key heads shared": (make_plan(num_kv_heads=2), 130, 0.0),
    "wide heads": (make_plan(head_dim=104, num_heads=2, num_kv_heads=1, scale=0.1), 40, 0.0),
    "odd sizes": (make_plan(width=33, head_dim=7, num_heads=3, num_kv_heads=3), 19, 0.0),
    "one row": (make_plan(), 1, 0.0),
    "a whole block": (make_plan(), PAIR_GROUP, 0.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("build", builds())
def test_a_layer_is_near_torchs(name: str, build: str) -> None:
    plan, count, bound = CASES[name]
    weights = DrawnWeights(plan, 150, bound)
    expected = run(TorchKernels(weights, plan), plan, count)
    exact = run(make_kernels(weights, plan, build, 1), plan, count)
    assert measure(exact, expected) < 1e-5
    found = run(make_kernels(weights, plan, build, 1, rounds=True), plan, count)
    rounded = DrawnWeights(plan, 150, bound, torch.bfloat16)
    halved = run(TorchKernels(rounded, plan), plan, count, dtype=torch.bfloat16)
    # More than four bits finer than bf16.
    assert measure(found, expected) < measure(halved, expected) / 20


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_threads_move_no_bit(name: str, rounds: bool) -> None:
    plan, count, bound = CASES[name]
    weights = DrawnWeights(plan, 150, bound)
    build = [build for build in builds() if build != "portable"][-1]
    alone = run(make_kernels(weights, plan, build, 1, rounds=rounds), plan, count)
    for num_threads in (2, 5):
        kernels = make_kernels(weights, plan, build, num_threads, rounds=rounds)
        assert torch.equal(run(kernels, plan, count), alone)
        # Other pictures in between, larger and smaller ones, leave nothing behind.
        run(kernels, plan, count + 101, seed=1)
        run(kernels, plan, max(1, count - 17), seed=2)
        assert torch.equal(run(kernels, plan, count), alone)


@pytest.mark.parametrize(
    ("rows", "cols", "count"), [(70, 200, 11), (16, 96, 6), (3, 1, 1), (1, 97, 100)]
)
def test_products_are_those_of_rounded_values(rows: int, cols: int, count: int) -> None:
    """Whole multiples of a scale for each output and group of inputs, whose sums fit 32 bits."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, cols, generator=generator)
    weight[0] = 0
    packed = pack_pairs(weight)
    assert packed.scales is not None
    codes = packed.words.view(torch.int16).view(*packed.words.shape, 2)
    wide = codes.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:rows, :cols].double()
    lengths = torch.nn.functional.pad(wide, (0, -cols % PAIR_GROUP)).view(rows, -1, PAIR_GROUP)
    assert lengths.norm(dim=2).max() <= 46_335
    scales = packed.scales.transpose(1, 2).flatten(0, 1)[:rows].double()
    rounded = wide * scales.repeat_interleave(PAIR_GROUP, 1)[:, :cols]
    torch.testing.assert_close(
        rounded.float(), weight, atol=weight.abs().max().item() / 9000, rtol=0
    )

    plan = make_plan()
    weights = TowerWeights(None, {"m.weight": (rows, cols)}, torch.float32)
    weights._known = {}
    weights._read = lambda name: weight  # type: ignore[method-assign]
    x = torch.randn(count, cols, generator=generator)
    found = {
        build: make_kernels(weights, plan, build, 2, rounds=True).map("m", x) for build in builds()
    }
    for made in found.values():
        exact = x.double() @ rounded.t()
        norm = x.norm(dim=1, keepdim=True).double() * rounded.norm(dim=1)
        assert ((made.double() - exact).abs() <= 3e-4 * norm + 1e-6).all()
    whole = [found[build] for build in builds() if build != "portable"]
    assert all(torch.equal(made, whole[0]) for made in whole)


@pytest.mark.parametrize("rounds", [False, True])
def test_what_is_no_number_stays_none(rounds: bool) -> None:
    plan = make_plan()
    weights = DrawnWeights(plan, 40)
    kernels = make_kernels(weights, plan, builds()[-1], 1, rounds=rounds)
    x = torch.zeros(3, plan.width)
    x[1, 5] = float("nan")
    assert kernels.run_layer(0, x, None)[1].isnan().all()
