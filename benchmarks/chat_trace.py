"""Write a trace of a chat service, for ``vllm bench replay`` and ``vllm bench serve``.

    python -m benchmarks.chat_trace FILE [--conversations 200] [--turns 6] [--rate 2.0] [--seed 0]

Conversations begin at random times, each with one of a few system prompts; every turn sends all
that was said before, answers included, after a pause in which others speak. One object a line, in
the Mooncake project's form with 64 tokens under an id.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

BLOCK = 64


@dataclass(frozen=True)
class ChatShape:
    """How people talk.

    Attributes:
        num_conversations: How many there are.
        mean_turns: Of a conversation, at least one.
        rate: Conversations that begin in a second.
        mean_pause_s: Between an answer and the next question.
        system_blocks: Blocks of each system prompt; every conversation has one of them.
        turn_blocks: Most blocks of a question.
        answer_blocks: Most blocks of an answer.
    """

    num_conversations: int = 200
    mean_turns: float = 6.0
    rate: float = 2.0
    mean_pause_s: float = 20.0
    system_blocks: tuple[int, ...] = (8, 16, 24)
    turn_blocks: int = 12
    answer_blocks: int = 6


def make_chat_trace(shape: ChatShape, seed: int) -> list[dict[str, Any]]:
    """Return the lines of a trace, by time."""
    rng = random.Random(seed)
    fresh = count(1)
    systems = [[next(fresh) for _ in range(blocks)] for blocks in shape.system_blocks]
    lines: list[dict[str, Any]] = []
    start_s = 0.0
    for _ in range(shape.num_conversations):
        start_s += rng.expovariate(shape.rate)
        lines += _conversation(shape, rng, start_s, list(rng.choice(systems)), fresh)
    return sorted(lines, key=lambda line: float(line["timestamp"]))


def _conversation(
    shape: ChatShape, rng: random.Random, now_s: float, said: list[int], fresh: Iterator[int]
) -> Iterator[dict[str, Any]]:
    num_turns = max(1, round(rng.expovariate(1 / shape.mean_turns)))
    for _ in range(num_turns):
        said += [next(fresh) for _ in range(rng.randint(1, shape.turn_blocks))]
        answer = rng.randint(1, shape.answer_blocks)
        yield {
            "timestamp": round(now_s * 1000),
            "input_length": len(said) * BLOCK,
            "output_length": answer * BLOCK,
            "hash_ids": list(said),
        }
        said += [next(fresh) for _ in range(answer)]
        now_s += rng.expovariate(1 / shape.mean_pause_s)


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--conversations", type=int, default=ChatShape.num_conversations)
    parser.add_argument("--turns", type=float, default=ChatShape.mean_turns)
    parser.add_argument("--rate", type=float, default=ChatShape.rate)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = ChatShape(args.conversations, args.turns, args.rate)
    lines = make_chat_trace(shape, args.seed)
    args.path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
