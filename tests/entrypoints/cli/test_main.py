"""The ``vllm`` command."""

import pytest

from vllm.entrypoints.cli.main import main, make_parser


def _exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_version_says_what_this_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--version") == 0
    assert "not the vllm-project's engine" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--help", "--help=all"])
def test_help_of_serve(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert _exit_code("serve", argument) == 0
    text = capsys.readouterr().out
    for flag in ("--block-size", "--shutdown-timeout", "--api-key", "--max-model-len"):
        assert flag in text
    # What is not served stands apart, and only where everything is asked for.
    options, _, notes = text.partition("accepted, without effect")
    assert "--pipeline-parallel-size" not in options
    assert ("--pipeline-parallel-size" in notes) == (argument == "--help=all")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code() == 2
    assert _exit_code("srve") == 2
    assert "serve" in capsys.readouterr().err


def test_where_a_command_is_named_no_other_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser("render").parse_args(["chat"])
    assert "invalid choice: 'chat' (choose from 'render')" in capsys.readouterr().err
    assert make_parser("run-batch").parse_args(["run-batch", "-i", "a", "-o", "b"]).command
    for name in ("serve", "collect-env", "decisions"):
        assert name in make_parser("srve").format_help()
