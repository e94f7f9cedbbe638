"""Geometries of releases and of the peer, and units that no span ends with."""

import json
from pathlib import Path

import pytest

from benchmarks.recurrent_workloads import (
    POLICIES,
    RECURRENT_MODELS,
    WINDOW_MODELS,
    Run,
    make_cache,
    make_groups,
    measure,
    peer_block,
)
from benchmarks.workloads import format_table
from vllm.cachelab.sim.requests import PrefixUnits
from vllm.sampling_params import SamplingParams
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.request import Request


def unit_hashes(number: int, ids: tuple[int, ...], unit: int, num_tokens: int) -> list[bytes]:
    request = Request(
        str(number),
        [0] * num_tokens,
        SamplingParams(max_tokens=1),
        arrival_time=0.0,
        block_hasher=PrefixUnits(number, ids, unit, 512),
    )
    return list(request.block_hashes)


@pytest.mark.parametrize("unit", [128, 512, 528, 784, 1056, 96])
def test_units_are_equal_up_to_where_prompts_part(unit: int) -> None:
    first = unit_hashes(1, tuple(range(12)), unit, 12 * 512)
    assert len(set(first)) == len(first) == 12 * 512 // unit
    for shared in range(13):
        ids = (*range(shared), *range(100, 112 - shared))
        other = unit_hashes(2, ids, unit, 12 * 512)
        equal = [a == b for a, b in zip(first, other, strict=True)]
        assert equal == [(i + 1) * unit <= shared * 512 for i in range(len(first))]


def test_blocks_and_checkpoints_weigh_what_the_releases_say() -> None:
    # Blocks of 528, 784 and 1,056 tokens are what users of other engines report.
    blocks = [peer_block(make_groups(model)) for model in RECURRENT_MODELS]
    assert blocks == [(528, 3), (784, 3), (1056, 3), (1920, 3), (4352, 4)]
    # The windows' rows are 1,278 and 20,460 tokens, here in whole blocks.
    models = (*RECURRENT_MODELS, *WINDOW_MODELS)
    weights = (1664, 2432, 3328, 5888, 12_770, 1280, 20_480)
    for model, tokens in zip(models, weights, strict=True):
        config = make_cache(model, "auto", 102_400)
        geometry = CacheGeometry.from_config(config)
        per_token = sum(1 / group.block_size for group in geometry.dense)
        assert sum(geometry.lean_blocks) / per_token == pytest.approx(tokens, abs=1)
        assert config.num_blocks == 102_400 * per_token


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3.5-4b", "glm-5.3-flash", "gemma4-e4b"])
@pytest.mark.parametrize("policy", ["auto", "0", "peer"])
def test_a_conversation_is_replayed(policy: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"input_length": 512 * turn, "output_length": 1, "hash_ids": list(range(turn))}
        for turn in range(4, 20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rate = measure(Run(model, "conversation", 100, policy, path))
    # Every turn resumes at the end of the last one, or at the block below.
    best = sum(512 * turn for turn in range(4, 19)) / sum(512 * turn for turn in range(4, 20))
    has_long_blocks = policy == "peer" and model in RECURRENT_MODELS
    # Blocks of 4,352 tokens, in prompts of 9,728 at most.
    least = 0.3 if model == "glm-5.3-flash" else 0.8
    assert least * best < rate < best if has_long_blocks else rate == pytest.approx(best)
    assert "| row | " in format_table({"row": {policy: rate}}, POLICIES)
