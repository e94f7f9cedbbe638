"""``vllm collect-env``."""

import pytest

from vllm.entrypoints.cli.collect_env import make_report
from vllm.entrypoints.cli.main import main


def test_secrets_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    report = make_report()
    assert "hunter2" not in report
    assert "VLLM_API_KEY=(set)" in report
    assert "VLLM_LOGGING_LEVEL=DEBUG" in report
    assert "fastapi" in report


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    assert "Python" in capsys.readouterr().out
