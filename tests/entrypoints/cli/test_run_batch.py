"""What ``vllm run-batch`` refuses before anything starts."""

from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import make_parser
from vllm.entrypoints.cli.run_batch import run
from vllm.exceptions import ConfigError


def test_a_batch_has_no_tenants(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    flags = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--tenants", "file"]
    with pytest.raises(ConfigError, match="--tenants: a batch has its engine for itself"):
        run(make_parser().parse_args(flags))
