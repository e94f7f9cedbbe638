"""``vllm collect-env``."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.cli.collect_env import describe_cards, make_report
from vllm.entrypoints.cli.main import main


def test_secrets_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    report = make_report()
    assert "hunter2" not in report
    assert "VLLM_API_KEY=(set)" in report
    assert "VLLM_LOGGING_LEVEL=DEBUG" in report
    named = [line.split()[0] for line in report.splitlines() if line.strip()]
    assert [named.count(name) for name in ("torch", "fastapi", "llguidance")] == [1, 1, 1]


class Cards:
    """``torch.cuda`` of two cards, one of them broken."""

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(
            name=f"card {index}", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
        )

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if index:
            raise RuntimeError("uncorrectable error")
        return 60 << 30, 80 << 30


def test_every_card_is_told_of() -> None:
    first, second = describe_cards(Cards())
    assert first.endswith(
        "card 0, compute capability 9.0, 132 multiprocessors, 60.0 of 80.0 GiB free"
    )
    assert "it cannot be used: uncorrectable error" in second


def test_the_platform_is_named() -> None:
    lines = make_report().splitlines()
    assert [line for line in lines if line.startswith("Platform")] == ["Platform cpu"]
    assert "GPUs     none that torch reaches" in lines


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    assert "Python" in capsys.readouterr().out
