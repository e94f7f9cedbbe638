"""The resend benchmark: a sample of its checks passes, and a lost hit is reported."""

import json

import pytest

from benchmarks.prefix_driver import Outcome
from benchmarks.resend import Report, main


def test_a_sample_finds_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--units", "128"]) == 0
    line = json.loads(capsys.readouterr().out)
    for kind in ("resend", "junction", "chat"):
        assert line["values"][f"{kind}_128"]["checks"] >= 20
        assert line["values"][f"{kind}_128"]["failures"] == 0


def test_a_lost_hit_is_a_failure() -> None:
    report = Report("resend")
    report.expect("n 300", Outcome("1", 300, 128, 128, {}), 256)
    assert report.failures == ["resend n 300: hit 128, expected 256"]
