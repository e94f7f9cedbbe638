"""Conversations with pictures: cold = warm = restored = in company, to the last bit.

    python -m benchmarks.image_exactness --model FOLDER --conversations 1000

Random conversations share their beginnings with each other and show a few pictures again and again.
Each is answered four ways: alone by an engine that caches nothing; in turn by one that caches, on a
disk too; after that one's end by another with its folders; and with others at a time. Tokens and
log probabilities must be equal, on the native kernels: torch's sums depend on what else runs. One
line of JSON tells what was compared, and how much was hit.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm import LLM, SamplingParams

_NUM_PICTURES = 12
_MOST_AT_A_TIME = 8
_GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation so far.

    Attributes:
        parts: Token ids of texts, and numbers of pictures, in order.
    """

    parts: tuple[tuple[int, ...] | int, ...]

    @property
    def pictures(self) -> list[int]:
        """Numbers of its pictures."""
        return [part for part in self.parts if isinstance(part, int)]


def draw_turns(count: int, max_id: int, seed: int) -> list[Turn]:
    """Return conversations, most of which go on where another one was.

    Args:
        count: How many.
        max_id: Token ids of texts are between 3 and this.
        seed: Of the draws.
    """
    draws = np.random.default_rng(seed)
    turns: list[Turn] = []
    for _ in range(count):
        begun = (
            turns[int(draws.integers(len(turns)))].parts if turns and draws.random() < 0.8 else ()
        )
        if begun and draws.random() < 0.3:
            # Another end: what was said last is said otherwise.
            begun = begun[: int(draws.integers(len(begun)))]
        if sum(isinstance(part, int) for part in begun) >= 4:
            begun = ()
        parts = list(begun)
        for _ in range(int(draws.integers(1, 4))):
            if draws.random() < 0.4 and sum(isinstance(part, int) for part in parts) < 4:
                parts.append(int(draws.integers(_NUM_PICTURES)))
            words = draws.integers(3, max_id, int(draws.integers(1, 50)))
            parts.append(tuple(int(word) for word in words))
        turns.append(Turn(tuple(parts)))
    return turns


class Engine:
    """One engine in this process, and what it answered.

    Args:
        model: A checkpoint that sees.
        settings: Of the engine.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.llm = LLM(model, **settings)
        family = self.llm.llm_engine.vllm_config.model_config.image_family
        tokenizer = self.llm.get_tokenizer()
        if family is None or tokenizer is None:
            raise SystemExit(f"{model} is shown no pictures")
        marker = tokenizer.token_to_id(family.text.marker)
        assert marker is not None
        self._marker: int = marker
        draws = np.random.default_rng(0)
        self._pictures = []
        for _ in range(_NUM_PICTURES):
            height, width = draws.integers(40, 260, 2)
            self._pictures.append(draws.integers(0, 256, (height, width, 3), np.uint8))
        self.num_hit = 0

    def ask(self, turns: Sequence[Turn], at_a_time: int = 1) -> list[Any]:
        """Return tokens and log probabilities of each answer."""
        answers: list[Any] = []
        for at in range(0, len(turns), at_a_time):
            prompts: list[Any] = [self._prompt(turn) for turn in turns[at : at + at_a_time]]
            for output in self.llm.generate(prompts, _GREEDY, use_tqdm=False):
                (answer,) = output.outputs
                assert answer.logprobs is not None
                bits = [
                    row[token].logprob
                    for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
                ]
                answers.append((list(answer.token_ids), bits))
                self.num_hit += output.num_cached_tokens or 0
        return answers

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        ids: list[int] = []
        for part in turn.parts:
            ids += [self._marker] if isinstance(part, int) else part
        images = [self._pictures[number] for number in turn.pictures]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def run(model: str, count: int, seed: int, max_id: int, **settings: Any) -> dict[str, Any]:
    """Answer conversations four ways; return what was compared and found."""
    turns = draw_turns(count, max_id, seed)
    common = {"block_size": 16, "max_model_len": 2048, "max_num_seqs": _MOST_AT_A_TIME}
    common |= {"kv_cache_memory_bytes": 64 << 20, **settings}
    told: dict[str, Any] = {
        "conversations": count,
        "pictures": sum(len(turn.pictures) for turn in turns),
        "seed": seed,
    }
    cold_engine = Engine(model, **common, enable_prefix_caching=False)
    with cold_engine.llm:
        cold = cold_engine.ask(turns)
    with tempfile.TemporaryDirectory() as folder:
        kept = {
            "prefix_cache_dir": os.path.join(folder, "rows"),
            "mm_encoder_cache_dir": os.path.join(folder, "towers"),
        }
        for name, extra, at_a_time in (
            ("warm", kept, 1),
            ("restored", kept, 1),
            ("in company", {}, _MOST_AT_A_TIME),
        ):
            engine = Engine(model, **common, **extra)
            with engine.llm:
                answers = engine.ask(turns, at_a_time)
            told[name] = {
                "different": sum(own != other for own, other in zip(answers, cold, strict=True)),
                "tokens hit": engine.num_hit,
            }
    return told


def main() -> int:
    """Run; 1: an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="A checkpoint that sees, a small one.")
    parser.add_argument("--conversations", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-id", type=int, default=250, help="Token ids of texts are below.")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    told = run(args.model, args.conversations, args.seed, args.max_id)
    print(json.dumps(told))
    return int(any(told[name]["different"] for name in ("warm", "restored", "in company")))


if __name__ == "__main__":
    sys.exit(main())
