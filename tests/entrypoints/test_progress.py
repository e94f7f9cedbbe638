"""The progress bar of offline inference."""

from typing import Any

import pytest

from vllm.entrypoints.progress import PromptProgress
from vllm.outputs import CompletionOutput, RequestOutput


class Bar:
    """Remembers what a bar is told."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.count = 0
        self.postfix = ""
        self.is_closed = False

    def update(self, count: int) -> None:
        self.count += count

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfix = text

    def close(self) -> None:
        self.is_closed = True


def _output(num_prompt: int, *num_answers: int) -> RequestOutput:
    answers = [CompletionOutput(i, "", [0] * count) for i, count in enumerate(num_answers)]
    return RequestOutput("r", None, [0] * num_prompt, None, answers, True)


def test_a_bar_of_ones_own_is_told_of_requests_and_speed() -> None:
    bars: list[Bar] = []
    times = iter((0.0, 2.0, 4.0))

    def make(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[0]

    with PromptProgress(2, make, clock=lambda: next(times)) as progress:
        (bar,) = bars
        assert (bar.settings["total"], bar.settings["disable"]) == (2, False)
        progress.add(_output(10, 4))
        assert bar.postfix == "est. speed input: 5.00 toks/s, output: 2.00 toks/s"
        progress.add(_output(30, 2, 2))
        assert bar.postfix == "est. speed input: 10.00 toks/s, output: 2.00 toks/s"
        assert bar.count == 2
    assert bar.is_closed


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_the_usual_bar(use_tqdm: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with PromptProgress(1, use_tqdm) as progress:
        progress.add(_output(3, 1))
    assert ("Processed prompts: 100%" in capsys.readouterr().err) == use_tqdm
