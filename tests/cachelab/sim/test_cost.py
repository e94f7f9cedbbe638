"""The cost model finds the coefficients that made its steps."""

import random
from pathlib import Path

import pytest

from vllm.cachelab.sim.cost import CostModel, StepShape
from vllm.exceptions import ConfigError


def _steps(count: int) -> list[StepShape]:
    rng = random.Random(1)
    shapes = []
    for _ in range(count):
        shape = StepShape()
        if rng.random() < 0.3:
            shape.add(rng.randrange(4000), rng.randint(1, 2000), is_decode=False)
        for _ in range(rng.randint(0, 30)):
            shape.add(rng.randrange(1, 5000), 1, is_decode=True)
        shapes.append(shape)
    return shapes


def test_a_step_is_counted_by_what_it_computes() -> None:
    shape = StepShape()
    shape.add(100, 10, is_decode=False)
    shape.add(50, 2, is_decode=True)
    assert shape == StepShape(10, 1050, 2, 1, 52)


def test_a_fit_finds_what_made_the_steps() -> None:
    true = CostModel(0.02, 3e-5, 0.0, 1e-4, 2e-8)
    shapes = _steps(300)
    rng = random.Random(2)
    seconds = [true.seconds(shape) * rng.uniform(0.98, 1.02) for shape in shapes]
    seconds[7] *= 50  # the machine paused
    found = CostModel.fit(shapes, seconds)
    for shape in shapes[:50]:
        assert found.seconds(shape) == pytest.approx(true.seconds(shape), rel=0.05)


def test_no_coefficient_is_below_zero() -> None:
    shapes = _steps(60)
    # Steps that get shorter with what they compute: no such machine exists.
    seconds = [1.0 / (1 + shape.decode_tokens + shape.prefill_tokens) for shape in shapes]
    found = CostModel.fit(shapes, seconds)
    assert min(found.per_step, found.per_prefill_token, found.per_decode_token) >= 0


def test_coefficients_travel_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    CostModel.published_a3().save(path)
    assert CostModel.load(path) == CostModel.published_a3()
    path.write_text('{"per_step": -1, "per_prefill_token": 1}')
    with pytest.raises(ConfigError, match="from 0"):
        CostModel.load(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="per_step"):
        CostModel.load(path)


def test_a_fit_needs_steps() -> None:
    with pytest.raises(ConfigError, match="8 steps"):
        CostModel.fit([StepShape()], [1.0])
