"""Every flag that vLLM users type is known: supported, or refused by name."""

import pytest

from vllm.entrypoints.cli.main import make_parser
from vllm.entrypoints.cli.refused_flags import REFUSED_SERVE_FLAGS
from vllm.utils.argparse_utils import RefusedFlag

# The sixty flags that matter most, and the next ten.
_LISTED = """
served-model-name host port api-key max-model-len gpu-memory-utilization max-num-seqs
max-num-batched-tokens block-size enable-prefix-caching prefix-caching-hash-algo
prefix-cache-retention-interval prefix-match-unit kv-cache-dtype kv-cache-memory-bytes
num-gpu-blocks-override kv-offloading-size kv-offloading-backend kv-transfer-config
kv-events-config enable-chunked-prefill scheduling-policy async-scheduling max-num-queued-reqs dtype
quantization load-format tokenizer tokenizer-mode trust-remote-code revision download-dir
tool-call-parser enable-auto-tool-choice reasoning-parser chat-template chat-template-content-format
default-chat-template-kwargs structured-outputs-config speculative-config max-logprobs logprobs-mode
seed enforce-eager compilation-config tensor-parallel-size pipeline-parallel-size
data-parallel-size enable-expert-parallel distributed-executor-backend config disable-log-stats
enable-log-requests max-log-len disable-access-log-for-endpoints enable-prompt-tokens-details
enable-request-id-headers enable-force-include-usage otlp-traces-endpoint kv-cache-metrics
kv-cache-metrics-sample shutdown-timeout allowed-origins ssl-keyfile ssl-certfile root-path
stream-interval generation-config override-generation-config hf-overrides enable-lora lora-modules
enable-sleep-mode api-server-count uvicorn-log-level sse-keep-alive-interval
enable-per-request-metrics
"""
EXPECTED = frozenset(_LISTED.split())


def _serve_options() -> set[str]:
    parser = make_parser()
    options: set[str] = set()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            options |= set(action.choices["serve"]._option_string_actions)
    return options


def test_every_known_flag_is_known() -> None:
    assert {f"--{name}" for name in EXPECTED} <= _serve_options()
    assert {"-tp", "-pp", "-dp", "-ep", "-q", "-sc", "-cc"} <= _serve_options()


@pytest.mark.parametrize(
    "flag",
    ["--model", "--uds", "--host", "--tool-call-parser", "--cache-trace", "--tokenizer", "m"],
)
def test_a_value_that_is_empty_is_not_taken_for_none(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that is not set must not serve another model, or on another socket."""
    given = [""] if flag == "m" else [flag, ""]
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["serve", *given])
    assert caught.value.code == 2
    assert "'' is empty" in capsys.readouterr().err
    assert make_parser().parse_args(["serve", "--root-path", ""]).root_path == ""


@pytest.mark.parametrize("flag", REFUSED_SERVE_FLAGS, ids=lambda flag: flag.names[0])
def test_each_is_refused_by_name(flag: RefusedFlag, capsys: pytest.CaptureFixture[str]) -> None:
    for name in flag.names:
        value = [] if flag.is_switch else ["something"]
        with pytest.raises(SystemExit) as caught:
            make_parser().parse_args(["serve", "m", name, *value])
        assert caught.value.code == 2
        message = capsys.readouterr().err
        assert f"error: {flag.names[0]}" in message
        assert "known but not supported yet" in message
    for value_text in flag.harmless:
        make_parser().parse_args(["serve", "m", flag.names[0], value_text])
