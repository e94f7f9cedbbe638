"""``--help=TOPIC``."""

import pytest

from vllm.entrypoints.cli.main import main


def _help(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", f"--help={topic}"])
    printed = capsys.readouterr()
    assert caught.value.code == (2 if printed.err else 0)
    return printed.out + printed.err


@pytest.mark.parametrize("topic", ["max-num-seqs", "--max-num-seqs", "max_num_seqs"])
def test_one_flag(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(topic, capsys)
    assert "--max-num-seqs MAX_NUM_SEQS" in text
    assert "Requests running at a time" in text
    assert text.count("  --") == 1


@pytest.mark.parametrize("topic", ["KV cache", "CacheConfig", "kv cache"])
def test_one_group(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(topic, capsys)
    assert "--block-size" in text
    assert "--kv-cache-dtype" in text
    assert "--port" not in text


def test_a_part_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help("ssl", capsys)
    assert "--ssl-keyfile" in text
    assert "--enable-ssl-refresh" in text
    assert "--port" not in text


def test_flags_that_are_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trust-remote-code: accepted, without effect: " in _help("trust-remote-code", capsys)
    assert "refused, not supported yet: " in _help("pipeline-parallel-size", capsys)


def test_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for topic in ("groups", "listgroup"):
        assert {"server", "model", "KV cache", "scheduling"} <= set(
            _help(topic, capsys).splitlines()
        )


def test_all_lists_every_known_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help("all", capsys)
    for name in ("--port", "--compilation-config", "--pipeline-parallel-size"):
        assert name in text


def test_an_unknown_topic(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help("nothing-like-it", capsys)
    assert "there is no such flag or group" in text
    assert "scheduling" in text
