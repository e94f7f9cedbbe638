"""What ``vllm bench`` and ``vllm cache`` say of their own flags."""

import pytest

from vllm.benchmarks import flags
from vllm.utils.argparse_utils import FlexibleArgumentParser

COMMANDS = ("serve", "startup", "replay", "simulate", "explain")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help(command: str) -> None:
    parser = FlexibleArgumentParser()
    getattr(flags, f"add_{command}_flags")(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_defaults_are_said() -> None:
    parser = FlexibleArgumentParser()
    flags.add_replay_flags(parser)
    text = " ".join(parser.format_help().split())
    assert (
        "--pool-gib GIB [GIB ...] KV cache of a server; several are compared. Default: 16.0."
        in text
    )
    # Said once, and of no switch.
    assert "Tokens a decode step brings; more is faster, and coarser. Default: 1. result:" in text
    assert "Refuse a bad line. --seed" in text
    assert "SUPPRESS" not in text
