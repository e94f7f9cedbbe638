"""``--config file.yaml``."""

from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import make_parser

FILE = """
model: from/the/file
port: 1234
max_model_len: 4k
served-model-name: [a, b]
enable-prefix-caching: false
enable-log-requests: true
kv-events-config: {enable_kv_cache_events: true, endpoint: "tcp://*:1"}
allowed-origins: ["http://x"]
chat-template: null
tensor-parallel-size: 1
trust-remote-code: true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of flags of every kind."""
    path = tmp_path / "flags.yaml"
    path.write_text(FILE)
    return path


def test_a_file_says_what_the_command_line_could(file: Path) -> None:
    args = make_parser().parse_args(["serve", "--config", str(file)])
    assert (args.port, args.max_model_len, args.config_model) == (1234, 4000, "from/the/file")
    assert args.served_model_name == ["a", "b"]
    assert args.enable_prefix_caching is False
    assert args.enable_log_requests is True
    assert args.kv_events_config == {"enable_kv_cache_events": True, "endpoint": "tcp://*:1"}
    assert args.allowed_origins == ["http://x"]
    assert args.chat_template is None
    assert [flag.names[0] for flag in args.ignored_flags] == ["--trust-remote-code"]


def test_a_text_is_what_the_file_says_letter_by_letter(tmp_path: Path) -> None:
    """YAML would make 83, 45045, true, 1000 and 31 of these, and a server would know other keys."""
    path = tmp_path / "flags.yaml"
    path.write_text(
        "api-key: [0123, 12:30:45, yes, 1_000, 'a b']\nadmin-api-key: 0x1F\nrevision: 0123456\n"
        "served-model-name: on\nhost: 1.10\nport: 8_001\nmax-model-len: 4k\nreasoning-parser: no"
    )
    args = make_parser().parse_args(["serve", "--config", str(path)])
    assert list(args.api_key) == ["0123", "12:30:45", "yes", "1_000", "a b"]
    assert (args.admin_api_key, args.revision, args.host) == ("0x1F", "0123456", "1.10")
    assert args.served_model_name == ["on"]
    assert (args.port, args.max_model_len, args.reasoning_parser) == (8001, 4000, "no")


def test_merged_flags_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("port: 7\nhf-overrides: &a {revision: r1, host: h}\n<<: *a\n")
    args = make_parser().parse_args(["serve", "--config", str(path)])
    assert (args.port, args.revision, args.host) == (7, "r1", "h")


def test_the_command_line_goes_before_it(file: Path) -> None:
    arguments = ["serve", f"--config={file}", "m", "--port", "9", "--enable-prefix-caching"]
    args = make_parser().parse_args(arguments)
    assert (args.model_positional, args.port, args.enable_prefix_caching) == ("m", 9, True)
    assert args.max_model_len == 4000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("no-such-flag: 1", "'no-such-flag' is no flag"),
        ("config: other.yaml", "'config' is no flag"),
        ("- a\n- b", "'key: value' lines"),
        ("a: [", "cannot be read as YAML"),
        ("port: many", "invalid int value"),
        ("pipeline-parallel-size: 8", "--pipeline-parallel-size 8 is known but not supported yet"),
    ],
)
def test_a_wrong_file_is_told(
    tmp_path: Path, content: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["serve", "--config", str(path)])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_one_file_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "absent.yaml")
    for arguments in (["--config", path], ["--config", path, "--config", path]):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["serve", *arguments])
    message = capsys.readouterr().err
    assert "absent.yaml" in message
    assert "give it once" in message


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert make_parser().parse_args(["serve", "--config", str(path), "m"]).port == 8000
