"""What a line of the log looks like."""

import json
import logging
from pathlib import Path

import pytest

from vllm.exceptions import ConfigError
from vllm.logger import current_request_id, init_logger, setup_logging

logger = init_logger("vllm.some.module")


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("(EngineCore) ")
    logger.info("%d of them", 3)
    (line,) = _lines(capsys)
    assert line.startswith("(EngineCore) INFO ")
    assert line.endswith("] 3 of them")
    assert "[test_logger.py:" in line


def test_lines_of_a_request_carry_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    token = current_request_id.set("req-1")
    logger.info("inside")
    logging.getLogger("uvicorn.access").info("by the web server")
    current_request_id.reset(token)
    logger.info("outside")
    inside, access, outside = _lines(capsys)
    assert inside.endswith(" [req-1] inside")
    assert access.endswith(" [req-1] by the web server")
    assert "req-1" not in outside


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("(EngineCore) ", log_format="json")
    token = current_request_id.set("req-2")
    logger.warning("it's %s", '"quoted"\nand long', extra={"color_message": "for terminals"})
    current_request_id.reset(token)
    (line,) = _lines(capsys)
    record = json.loads(line)
    assert record["message"] == 'it\'s "quoted"\nand long'
    assert (record["level"], record["process"], record["request_id"]) == (
        *("WARNING", "EngineCore", "req-2"),
    )
    assert record["file"] == "test_logger.py"
    assert isinstance(record["line"], int)
    assert record["time"]
    fields = "time level process file line message request_id"
    assert sorted(record) == sorted(fields.split())


def test_an_error_carries_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(log_format="json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        logger.error("failed", exc_info=error)
    (line,) = _lines(capsys)
    assert "ValueError: broken" in json.loads(line)["exc_info"]


def test_a_configuration_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logging.yaml"
    path.write_text("version: 1\nloggers: {vllm: {level: ERROR}}\n")
    setup_logging(config_file=str(path))
    logger.warning("too little")
    logger.error("enough")
    (line,) = _lines(capsys)
    assert line.endswith("enough")


@pytest.mark.parametrize("content", ["version: 9", "[", "3", None])
def test_an_unusable_configuration(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "logging.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"logging\.yaml"):
        setup_logging(config_file=str(path))


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="text, json"):
        setup_logging(log_format="xml")
