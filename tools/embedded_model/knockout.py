"""Shows which cache a lookup needs: hides each one's part of the document from the question.

    python -m tools.embedded_model.knockout --cases 200

Runs the training forward on the embedded weights: a fact, filler of so many tokens, the question.
From the question on, the rows of the document in one cache (or all but one) cannot be seen.
"""

import argparse
import random
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from tools.embedded_model import facts, words
from tools.embedded_model.batches import Encoder
from tools.embedded_model.checkpoint import load_weights, read_config
from tools.embedded_model.forward import Settings, TrainModel
from tools.embedded_model.pieces import ASSISTANT, BOS, END_THINK, USER

_FOLDER = Path(__file__).resolve().parents[2] / "vllm" / "assets" / "deepseek-v4"
KNOCK_OUTS = {
    "none": (),
    "window": ("window",),
    "C4": ("c4",),
    "C128": ("c128",),
    "index": ("index",),
    "C4, C128": ("c4", "c128"),
    "all": ("window", "c4", "c128"),
}


def an_access_code(rng: random.Random) -> facts.Fact:
    """What most lookups ask for."""
    return facts.number_fact(rng, words.name(rng, held_out=True), "access code")


def about_the_text(rng: random.Random) -> facts.Fact:
    """What a text says about itself."""
    return rng.choice(facts.facts_about_text(rng))


ASKED = {"code": an_access_code, "text": about_the_text}


def make_case(
    rng: random.Random, encoder: Encoder, distance: int, fact: facts.Fact
) -> tuple[list[int], int, list[int]]:
    """Ids up to the value, where the question starts, and the value's ids.

    The fact stands at least ``distance`` tokens before the question; every sentence between is a
    fact of its own or chatter.
    """
    before, value, _ = fact.answer.split("|")
    told = fact.told.replace("|", "")
    ids = encoder.ids(BOS) + encoder.ids(USER) + encoder.ids(told)
    target = len(ids) + distance
    while len(ids) < target:
        if rng.random() < 0.3:
            text = facts.chatter(rng)
        else:
            text = facts.any_fact(rng, words.name(rng, held_out=True)).told.replace("|", "")
        ids = ids + encoder.ids(" " + text)
    start = len(ids)
    ids = ids + encoder.ids(f" {fact.question}")
    ids = ids + encoder.ids(ASSISTANT + END_THINK) + encoder.ids(before)
    return ids, start, encoder.ids(value)


@torch.no_grad()
def is_recalled(model: TrainModel, ids: list[int], value: list[int], settings: Settings) -> bool:
    """Whether every token of the value is the likeliest one."""
    streams: Tensor = model(torch.tensor([ids + value[:-1]]), settings).streams[0]
    logits = model.hidden(streams[len(ids) - 1 :]) @ model.head.T
    return bool((logits.argmax(-1) == torch.tensor(value)).all())


def main() -> None:
    """Print the table: a row per knock-out, a column per distance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--distances", default="30,300,1000,3000")
    parser.add_argument("--asked", choices=tuple(ASKED), default="code")
    parser.add_argument("--model", type=Path, default=_FOLDER)
    arguments = parser.parse_args()
    model = TrainModel(read_config(arguments.model))
    load_weights(model, arguments.model / "model.safetensors")
    encoder = Encoder(tokenizers.Tokenizer.from_file(str(arguments.model / "tokenizer.json")))
    distances = [int(text) for text in arguments.distances.split(",")]
    print(f"{'hidden':10s}" + "".join(f"{d:>8d}" for d in distances))
    for name, caches in KNOCK_OUTS.items():
        shares = []
        for distance in distances:
            rng = random.Random(distance)
            right = 0
            for _ in range(arguments.cases):
                ids, start, value = make_case(rng, encoder, distance, ASKED[arguments.asked](rng))
                settings = replace(Settings(), hidden=frozenset(caches), hidden_before=start)
                right += is_recalled(model, ids, value, settings)
            shares.append(right / arguments.cases)
        print(f"{name:10s}" + "".join(f"{share:8.1%}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
