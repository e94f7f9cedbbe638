"""Equal bits: the same chats asked in every way.

Chats go on turn by turn, each behind the model's own answer, as programs send them: one that is
asked where there is a cache finds rows of the prompt before it, and of the answer.
"""

import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_weights.chats import draw_text, encode_chat
from benchmarks.real_weights.checks import BLOCK_SIZE, Report, open_engine
from benchmarks.real_weights.progress import tell
from benchmarks.real_weights.side_by_side import run_side_by_side
from vllm import LLM, SamplingParams

_TURNS, _MOST_SENTENCES = 4, 8
# Of the engine whose chats are all asked again.
_WARM_POOL_BYTES = 4 << 30
# Chats whose rows a process that is killed may not have written yet.
_ON_THEIR_WAY = 4


class _Reply(NamedTuple):
    """A greedy answer.

    Attributes:
        token_ids: Its tokens.
        bits: Their log probabilities.
        text: The same in words.
        is_hit: Whether all whole units of the prompt were found.
    """

    token_ids: tuple[int, ...]
    bits: tuple[float, ...]
    text: str
    is_hit: bool


@dataclass(frozen=True, slots=True)
class _Chats:
    """Chats, and how they were answered without a cache, one at a time.

    Attributes:
        path: The model's file.
        prompts: Tokens of each.
        expected: The answers.
    """

    path: Path
    prompts: Sequence[list[int]]
    expected: Sequence[_Reply]

    def compare(self, report: Report, name: str, replies: Sequence[_Reply]) -> None:
        """Take note of how many answers have the same bits."""
        pairs = zip(replies, self.expected, strict=True)
        differing = sum(a.token_ids != b.token_ids or a.bits != b.bits for a, b in pairs)
        report.figures[name] = len(self.prompts) - differing
        if differing:
            report.faults.append(f"{name}: {differing} of {len(self.prompts)} answers differ")

    def ask_in_turn(self, llm: LLM) -> list[_Reply]:
        """Ask all, one at a time."""
        return [_ask(llm, [ids])[0] for ids in self.prompts]


def check_exactness(path: Path, num_chats: int, seed: int) -> Report:
    """Ask the same chats in every way: each bit is the same.

    Cold, first, warm, in chunks, in company, drafted, restored from a folder, and restored from a
    folder whose writer was killed while it wrote.
    """
    with open_engine(path, enable_prefix_caching=False) as llm:
        chats = _Chats(path, *_answer_cold(llm, num_chats, seed))
    tell(f"cold: {num_chats} chats of {sum(map(len, chats.prompts))} tokens")
    ways: Mapping[str, Callable[[_Chats], Report]] = {
        "restored": _restore,
        "warm": _ask_again,
        "killed": _restore_of_killed,
        "drafted": partial(_ask_with, "drafted", {"speculative_config": {"method": "ngram"}}),
        "chunks": partial(_ask_with, "chunks", {"max_num_batched_tokens": 64}),
        "company": _ask_together,
    }
    found = run_side_by_side({name: partial(way, chats) for name, way in ways.items()})
    report = Report({"chats": num_chats})
    for name in ("warm", "chunks", "company", "drafted", "restored", "killed"):
        report.figures |= found[name].figures
        report.faults += found[name].faults
    return report


def _answer_cold(llm: LLM, num_chats: int, seed: int) -> tuple[list[list[int]], list[_Reply]]:
    """Draw chats and answer them; each conversation is asked turn by turn."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts: list[list[int]] = []
    replies: list[_Reply] = []
    while len(prompts) < num_chats:
        rng = random.Random(f"{seed} {len(prompts)}")
        said: list[str] = []
        for _ in range(min(_TURNS, num_chats - len(prompts))):
            said.append(draw_text(rng, rng.randrange(1, _MOST_SENTENCES)))
            prompts.append(encode_chat(tokenizer, said))
            replies += _ask(llm, prompts[-1:])
            said.append(replies[-1].text)
    return prompts, replies


def _ask_again(chats: _Chats) -> Report:
    report = Report({})
    with open_engine(chats.path, kv_cache_memory_bytes=_WARM_POOL_BYTES) as llm:
        chats.compare(report, "first", chats.ask_in_turn(llm))
        replies = chats.ask_in_turn(llm)
    chats.compare(report, "warm", replies)
    hits = report.figures["warm_hits"] = sum(reply.is_hit for reply in replies)
    if hits < len(replies):
        report.faults.append(f"warm: only {hits} chats hit to the unit")
    return report


def _ask_with(name: str, options: Mapping[str, Any], chats: _Chats) -> Report:
    report = Report({})
    with open_engine(chats.path, **options) as llm:
        chats.compare(report, name, chats.ask_in_turn(llm))
    return report


def _ask_together(chats: _Chats) -> Report:
    report = Report({})
    with open_engine(chats.path) as llm:
        chats.compare(report, "company", _ask(llm, chats.prompts))
    return report


def _restore(chats: _Chats) -> Report:
    report = Report({})
    with tempfile.TemporaryDirectory() as folder:
        for name in ("written", "restored"):
            with open_engine(chats.path, kv_transfer_config=_keep_in(folder)) as llm:
                chats.compare(report, name, chats.ask_in_turn(llm))
    return report


def _restore_of_killed(chats: _Chats) -> Report:
    report = Report({})
    num_chats = len(chats.prompts)
    with tempfile.TemporaryDirectory() as folder:
        num_answered = -(-num_chats // 2)
        _write_and_be_killed(chats, num_answered, folder)
        with open_engine(chats.path, kv_transfer_config=_keep_in(folder)) as llm:
            replies = chats.ask_in_turn(llm)
    chats.compare(report, "killed", replies)
    hits = sum(reply.is_hit for reply in replies[:num_answered])
    report.figures["killed_hits"] = hits
    # Rows of the last few may have been on their way.
    if hits * 4 < num_chats - _ON_THEIR_WAY:
        report.faults.append(f"killed: only {hits} of {num_answered} chats are found")
    return report


def _keep_in(folder: str) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": f"{folder}/cache", "max_size": "2GiB"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"secondary_tiers": [tier], "always_restore": True},
    }


def _write_and_be_killed(chats: _Chats, num_answers: int, folder: str) -> None:
    """Have a process answer chats with a folder for their rows, and kill it in the midst."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(chats.path, folder, chats.prompts, there))
    process.start()
    there.close()
    try:
        for _ in range(num_answers):
            here.recv()
    finally:
        process.kill()
        process.join()


def _answer(path: Path, folder: str, prompts: Sequence[list[int]], told: Connection) -> None:
    # The engine in this process, so that it dies with it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with open_engine(path, kv_transfer_config=_keep_in(folder)) as llm:
        for ids in prompts:
            _ask(llm, [ids])
            told.send(len(ids))


def _ask(llm: LLM, prompts: Sequence[list[int]]) -> list[_Reply]:
    """Return greedy answers with the bits of their log probabilities."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    replies = []
    for ids, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        tokens = tuple(answer.token_ids)
        bits = tuple(entry[t].logprob for entry, t in zip(answer.logprobs, tokens, strict=True))
        whole = (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        replies.append(_Reply(tokens, bits, answer.text, output.num_cached_tokens == whole))
    return replies
