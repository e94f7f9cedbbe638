"""Agents whose server is killed between turns: each goes on with what was said before.

The model of ``AGENT_SCRIPT`` says the same in every turn, in the tokens of a prompt that quotes it.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import AGENT_SCRIPT, PLATFORMS
from tests.e2e.scripted_checkpoint import write_scripted_v4
from tests.e2e.server_process import NO_TLS, ServerProcess
from tests.e2e.test_agent_loops import ARGUMENTS, RESULT, SCHEMA, UNIT
from tests.e2e.test_durable_cache import kill, look

LEAN = 128
_WAIT_S = 120.0

# Takes a server's address and the number of a turn; returns cached tokens, and those at its end.
Turn = Callable[[str, int], tuple[int, int]]


def openai_agent() -> Turn:
    """An agent of the openai package."""
    messages: list[Any] = [{"role": "user", "content": "Find the record. " * 20}]
    tool: Any = {"name": "look_up", "parameters": SCHEMA}

    def take_turn(url: str, turn: int) -> tuple[int, int]:
        with openai.OpenAI(
            base_url=url + "/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=NO_TLS),
        ) as client:
            answer = client.chat.completions.create(
                model="agent",
                messages=messages,
                tools=[{"type": "function", "function": tool}],
                temperature=0,
            )
        said = answer.choices[0].message
        assert said.tool_calls is not None
        call: Any = said.tool_calls[0]
        assert json.loads(call.function.arguments) == ARGUMENTS
        messages.append(said.model_dump(exclude_none=True))
        result = RESULT * (turn % 3 + 1)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        return details.cached_tokens or 0, answer.usage.total_tokens

    return take_turn


def anthropic_agent() -> Turn:
    """An agent of the anthropic package."""
    messages: list[Any] = [{"role": "user", "content": "Look for the record. " * 20}]

    def take_turn(url: str, turn: int) -> tuple[int, int]:
        with anthropic.Anthropic(
            base_url=url,
            api_key="none",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(verify=NO_TLS),
        ) as client:
            answer = client.messages.create(
                model="agent",
                messages=messages,
                tools=[{"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}],
                thinking={"type": "disabled"},
                max_tokens=500,
                extra_body={"temperature": 0},
            )
        call: Any = answer.content[-1]
        assert call.input == ARGUMENTS
        blocks = [block.to_dict(exclude_none=True) for block in answer.content]
        text = {"type": "text", "text": RESULT * (turn % 3 + 1)}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text]}
        messages.append({"role": "assistant", "content": blocks})
        messages.append({"role": "user", "content": [result]})
        usage = answer.usage
        cached = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        return cached, prompt + usage.output_tokens

    return take_turn


def wait_written(server: ServerProcess) -> None:
    """Wait until all that is to be kept is on the disk."""
    deadline = time.monotonic() + _WAIT_S
    while look(server)["offload"]["num_unwritten"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("platform_name", "host", "num_turns", "killed_before"),
    [("cpu", None, 6, (1, 4)), ("ascend", "16MiB", 4, (2,))],
)
def test_agents_go_on_after_kills(
    tmp_path: Path,
    platform_name: str,
    host: str | None,
    num_turns: int,
    killed_before: tuple[int, ...],
) -> None:
    write_scripted_v4(tmp_path / "model", AGENT_SCRIPT)
    tier = {"type": "fs", "root_dir": str(tmp_path / "cache"), "max_size": "64MiB"}
    # Restored even where computing so small a model is quicker.
    extra: dict[str, Any] = {"secondary_tiers": [tier], "always_restore": True}
    if host is not None:
        extra["cpu_bytes_to_use"] = host
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    flags = ("--served-model-name", "agent", "--max-model-len", "8192")
    flags += ("--kv-transfer-config", json.dumps({**raw, "kv_connector_extra_config": extra}))
    flags += ("--enable-prompt-tokens-details",)

    def serve(life: int) -> ServerProcess:
        return ServerProcess(
            tmp_path / f"{life}.txt",
            *flags,
            environment={**PLATFORMS[platform_name], "VLLM_SERVER_DEV_MODE": "1"},
            model=str(tmp_path / "model"),
        )

    agents = (openai_agent(), anthropic_agent())
    seen: list[list[tuple[int, int]]] = [[] for _ in agents]
    turn = 0
    for life, end in enumerate((*killed_before, num_turns)):
        with serve(life) as server:
            while turn < end:
                for agent, turns in zip(agents, seen, strict=True):
                    turns.append(agent(server.url, turn))
                turn += 1
            if end < num_turns:
                wait_written(server)
                kill(server)
    for turns in seen:
        for turn in range(1, num_turns):
            last = turns[turn - 1][1] - 1
            # Of two boundaries close to each other the disk keeps the one without compressor state.
            allowed = {last // UNIT * UNIT}
            if turn in killed_before:
                allowed.add(last // LEAN * LEAN)
            assert turns[turn][0] in allowed, (turn, turns)
