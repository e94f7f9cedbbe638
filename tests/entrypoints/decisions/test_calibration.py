"""Fitting a temperature to questions whose answers are known."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.cli.main import main
from vllm.entrypoints.decisions.calibration import Labelled, find_temperature, fit
from vllm.entrypoints.decisions.labelled_lines import read_labelled
from vllm.entrypoints.decisions.scoring import make_distribution, softmax
from vllm.exceptions import ConfigError


def overconfident(count: int, temperature: float, seed: int = 3) -> list[Labelled]:
    """Questions whose right answers are drawn at a temperature, and told as if at 1."""
    draws = random.Random(seed)
    questions = []
    for _ in range(count):
        logprobs = [draws.gauss(-3, 3) for _ in range(draws.randint(2, 5))]
        weights = softmax(logprobs, temperature)
        questions.append(Labelled(logprobs, draws.choices(range(len(weights)), weights)[0]))
    return questions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.2])
def test_the_temperature_that_made_the_answers_is_found(temperature: float) -> None:
    found = fit(overconfident(4000, temperature))
    assert found.temperature == pytest.approx(temperature, rel=0.08)
    assert found.after.loss <= found.before.loss
    assert found.after.error < 0.03
    assert found.held_out is not None
    assert found.held_out.error < 0.04
    assert not found.is_bound
    if temperature == 2.2:
        assert found.before.error > 3 * found.after.error


def test_the_loss_is_least_there() -> None:
    questions = overconfident(50, 1.7)

    def loss(temperature: float) -> float:
        return -sum(math.log(softmax(q.logprobs, temperature)[q.right]) for q in questions)

    best = find_temperature(questions)
    assert all(loss(best) <= loss(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_answers_that_are_always_right_or_never_have_no_temperature() -> None:
    assert fit([Labelled([-1.0, -2.0], 0)] * 4).is_bound
    assert fit([Labelled([-1.0, -2.0], 1)] * 4).is_bound


def test_extremes_stay_numbers() -> None:
    assert softmax([-math.inf, -math.inf], 1.0) == (0.5, 0.5)
    assert softmax([-1e6, 0.0, -math.inf], 0.01) == (0.0, 1.0, 0.0)
    one = make_distribution([(0, [-0.0])], 3.0)
    assert (one.probabilities, one.confidence, one.mean_index) == ((1.0,), 1.0, 0.0)


def test_rotated_orders_are_brought_back() -> None:
    read = [(0, [-1.0, -2.0, -3.0]), (1, [-2.0, -3.0, -1.0])]
    found = make_distribution(read, 1.0)
    assert found.probabilities == pytest.approx(softmax([-1.0, -2.0, -3.0], 1.0))


QUESTIONS = [
    {"type": "predicate", "instructions": "a?"},
    {"type": "choice", "instructions": "b?", "choices": [{"value": True}, {"value": "true"}]},
    {"type": "score", "instructions": "c?", "levels": [{"label": "lo"}, {"label": "hi"}]},
]


def test_requests_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines: list[dict[str, Any]] = [
        {"logprobs": [-1, -2.5], "label": 1},
        {"input": "x", "questions": QUESTIONS, "expected": [False, "true", "hi"]},
        {"input": "x", "questions": QUESTIONS, "expected": [True, True, 0]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    asked: list[Mapping[str, Any]] = []

    def ask(body: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(body)
        return {"answers": [{"label_logprobs": [-0.1, -2.0]}] * 3}

    found = list(read_labelled(path, ask))
    assert [q.right for q in found] == [1, 1, 1, 1, 0, 0, 0]
    assert asked == [
        {"input": "x", "questions": QUESTIONS, "return_label_logprobs": True} for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: must be an object"),
        ('{"logprobs": [-1], "label": 0}', "two numbers"),
        ('{"logprobs": [-1, true], "label": 0}', "two numbers"),
        ('{"logprobs": [-1, -2], "label": 2}', "label=2"),
        ('{"input": "x", "questions": [], "expected": []}', "holds 0 questions"),
        (json.dumps({"input": "x", "questions": QUESTIONS, "expected": [True]}), "expected"),
        (json.dumps({"input": "x", "questions": QUESTIONS[:1], "expected": [1]}), "1 is no answer"),
        (
            json.dumps({"input": "x", "questions": QUESTIONS[2:], "expected": ["mid"]}),
            "'mid' is no answer",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=fault.replace("[", r"\[")):
        list(read_labelled(path, lambda body: body))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    questions = overconfident(500, 1.8)
    rows = ({"logprobs": list(q.logprobs), "label": q.right} for q in questions)
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["decisions", "fit", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["temperature"] == pytest.approx(fit(questions).temperature)
    assert main(["decisions", "fit", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"--decision-temperature {told['temperature']:.3f}" in text
    assert "calibration error" in text
    assert main(["decisions", "fit", str(tmp_path / "none")]) == 2
    path.write_text("")
    assert main(["decisions", "fit", str(path)]) == 2
