"""``vllm serve``: everything wrong is told before anything starts."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.config import VllmConfig
from vllm.entrypoints.cli.main import main, make_parser
from vllm.entrypoints.cli.serve import make_server_args
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.server_args import ServerArgs


@pytest.fixture(autouse=True)
def _keep_loggers() -> Iterator[None]:
    """The command sets up logging for its process; put back what was there."""
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_ascend", "uvicorn")]
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[VllmConfig, ServerArgs]]:
    """What would have been served."""
    calls: list[tuple[VllmConfig, ServerArgs]] = []

    def run_server(config: VllmConfig, args: ServerArgs) -> int:
        calls.append((config, args))
        return 0

    monkeypatch.setattr(api_server, "run_server", run_server)
    return calls


@pytest.mark.parametrize(
    "arguments", [[], ["deepseek-v4"], ["--model", "deepseek-v4"], ["-tp", "1", "deepseek-v4"]]
)
def test_the_model(started: list[Any], arguments: list[str]) -> None:
    assert main(["serve", *arguments]) == 0
    ((config, _),) = started
    assert config.model_config.model == "deepseek-v4"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--block-size", "48"], "32, 64, 128"),
        (["/no/such/model"], "/no/such/model"),
        (["--max-model-len", "1M"], "16384"),
        (["a", "--model", "b"], "given twice"),
        (["--port", "70000"], "65535"),
        (["--gpu-memory-utilization", "3"], "3"),
        (["--allowed-origins", "*", "--allow-credentials"], "list the origins"),
        (["--seed", "-1"], "seed=-1"),
        (["--seed", str(2**63)], "2**63 - 1"),
        (["--max-model-len", "1"], "at least 2"),
        (["--served-model-name", ""], "empty name"),
        (["--shutdown-timeout", "nan"], "finite"),
        (["--shutdown-timeout", "inf"], "finite"),
        (["--chat-template", "/no/such.jinja"], "/no/such.jinja"),
        (["--chat-template", "{% if %}"], "not valid Jinja"),
        (["--default-chat-template-kwargs", '{"foo": 1}'], "'foo'"),
    ],
)
def test_wrong_values_exit_with_2(
    started: list[Any], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "lots"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan"),
        ("VLLM_ENGINE_HEARTBEAT_TIMEOUT", "inf"),
        ("VLLM_CHECK_INVARIANTS", "maybe"),
    ],
)
def test_wrong_variables_exit_with_2(
    started: list[Any],
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["serve"]) == 2
    assert f"{name}='{value}'" in capsys.readouterr().err
    assert started == []


def test_a_variable_that_nothing_reads_is_told_of(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert main(["serve"]) == 0
    assert "VLLM_USE_V1 has no effect" in capsys.readouterr().err


def test_flags_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-env")

    def parse(*arguments: str) -> ServerArgs:
        return make_server_args(make_parser().parse_args(["serve", "m", *arguments]))

    args = parse(
        *("--host", "::1", "--port", "0", "--shutdown_timeout", "1.5"),
        *("--default-chat-template-kwargs", '{"thinking": false}', "--generation-config", "vllm"),
        *("--enable-log-requests", "--max-log-len", "1k", "--enable-request-id-headers"),
        *("--allowed-origins", '["http://a"]', "--uvicorn-log-level", "warning"),
    )
    assert (args.host, args.port, args.shutdown_timeout_s) == ("::1", 0, 1.5)
    assert args.default_chat_template_kwargs == {"thinking": False}
    assert (args.generation_config, args.max_log_len) == ("vllm", 1000)
    assert args.enable_log_requests
    assert args.enable_request_id_headers
    assert args.allowed_origins == ("http://a",)
    assert args.api_keys == ("from-env",)
    assert parse("--api-key", "a", "b").api_keys == ("a", "b")
    monkeypatch.delenv("VLLM_API_KEY")
    assert parse() == ServerArgs()


def test_keys_stay_out_of_the_log(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key", "hunter2", "--seed", "5"]) == 0
    log = capsys.readouterr().err
    assert "hunter2" not in log
    assert "seed=5" in log
    assert "derived defaults: max_model_len=16384" in log
