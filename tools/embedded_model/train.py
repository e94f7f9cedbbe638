"""Trains the embedded model in stages; resumable.

    python -m tools.embedded_model.train --state DIR --stage NAME --minutes 30

The state (weights, optimizers, step) lies outside the tree; run again to go on from it. ``export``
writes the checkpoint, and ``--weights-of vllm/assets/deepseek-v4`` starts from the committed one.
Two processes can share the work: ``--seed 1 --partner 2`` and ``--seed 2 --partner 1``.
"""

import argparse
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor

from tools.checkpoints.make_deepseek_v4 import CONFIG, EMBEDDED
from tools.embedded_model.batches import ABOUT_TEXT, Batch, Encoder, make_batch
from tools.embedded_model.checkpoint import load_weights
from tools.embedded_model.conversations import Recipe
from tools.embedded_model.forward import Attended, Output, Settings, TrainModel
from tools.embedded_model.optimizer import make_optimizers
from tools.embedded_model.start import lay_out, tie_spellings


def looking_loss(
    attended: Attended, batch: Batch, window: int, heads: int
) -> tuple[Tensor, Tensor]:
    """How little the first ``heads`` heads look at what is to be copied.

    A target whose mark stood before is a copy: its query should look at an earlier row (within the
    window) or entry with that mark. Returns the mean over such targets of minus the log of the
    attention there, and that attention's mean.
    """
    length = batch.ids.shape[1]
    marks = F.pad(batch.looks[:, 1:], (0, 1))
    # C4's heads find names and values, C128's what is said about the whole text.
    about_text = marks >= ABOUT_TEXT
    marks = marks * (about_text if attended.ratio == 128 else ~about_text)
    row, t = ((marks > 0) & (F.pad(batch.weights[:, 1:], (0, 1)) > 0)).nonzero(as_tuple=True)
    mark = marks[row, t][:, None]
    position = torch.arange(length)
    seen = (position <= t[:, None]) & (position > t[:, None] - window)
    is_source = (batch.marks[row] == mark) & seen
    keys = attended.rows
    if attended.entries is not None:
        ratio, count = attended.ratio, attended.entries.shape[1]
        visible = torch.arange(count) < ((t + 1) // ratio)[:, None]
        cut = batch.marks[:, : count * ratio].view(-1, count, ratio)
        if ratio == 4:
            cut = torch.cat([F.pad(cut, (0, 0, 1, 0))[:, :-1], cut], 2)
        has_source = (cut[row] == mark[:, None]).any(2) & visible
        keys = torch.cat([keys, attended.entries], 1)
        # A row holds its token alone: it is the better source where the window reaches.
        is_source = torch.cat([is_source, has_source & ~is_source.any(1, True)], 1)
        seen = torch.cat([seen, visible], 1)
    kept = is_source.any(1)
    if not kept.any():
        return torch.zeros(()), torch.zeros(())
    row, t, is_source, seen = row[kept], t[kept], is_source[kept], seen[kept]
    q = attended.queries[row, t, :heads]
    scores = torch.einsum("nhd,nkd->nhk", q, keys[row].to(q.dtype)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], -1e9)
    sink = attended.sink[:heads, None].expand(len(row), -1, 1)
    log_p = torch.cat([scores, sink], 2).log_softmax(-1)[..., :-1]
    log_mass = log_p.masked_fill(~is_source[:, None], -1e9).logsumexp(-1)
    return -log_mass.mean(), log_mass.exp().mean()


def draft_loss(
    model: TrainModel, streams: Tensor, batch: Batch, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The MTP block's loss over two draft steps; (loss, hits, counts) of the first one's values."""
    ids, weights = batch.ids, batch.weights
    tables = model.tables(ids.shape[1])
    total = torch.zeros(())
    counted: list[Tensor] = []
    for ahead in (1, 2):
        # Of the last positions the next tokens are unknown; they are never targets here.
        following = F.pad(ids[:, ahead:], (0, ahead))
        streams = model.mtp(streams, model.embed[following].detach(), ids, tables, settings)
        weight = F.pad(weights[:, ahead + 1 :], (0, ahead + 1))
        chosen = weight > 0
        logits = model.draft_hidden(streams[chosen]) @ model.head.detach().T
        target = F.pad(ids[:, ahead + 1 :], (0, ahead + 1))[chosen]
        losses = F.cross_entropy(logits, target, reduction="none")
        total = total + (losses * weight[chosen]).sum() / weight.sum() / ahead
        strong = weight[chosen] >= 0.5
        counted += [((logits.argmax(-1) == target) & strong).sum(), strong.sum()]
    return total, counted[0], counted[1]


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum."""

    recipes: tuple[tuple[int, Recipe], ...]  # (sequences per batch, recipe), drawn evenly
    window: int
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 50
    looking: float = 0.0  # weight of the losses on where heads look
    drafts: bool = False  # train the MTP block alone, on a frozen main model
    cools: bool = False  # whether the rates fall over the run's minutes, to a twentieth
    steps: int = 1_000_000_000
    settings: dict[str, Any] = field(default_factory=dict)


def weighted_loss(
    model: TrainModel, streams: Tensor, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss over the weighted targets; (loss, hits, counts) of full-weight ones."""
    weights = batch.weights[:, 1:]
    chosen = weights > 0
    hidden = model.hidden(streams[:, :-1][chosen])
    logits = (hidden.bfloat16() @ model.head.bfloat16().T).float()
    target, weight = batch.ids[:, 1:][chosen], weights[chosen]
    losses = F.cross_entropy(logits, target, reduction="none")
    strong = weight == 1.0
    hit = (logits.argmax(-1) == target) & strong
    return (losses * weight).sum() / weight.sum(), hit.sum(), strong.sum()


LOOKING_LAYERS = (1, 2, 3, 4)
STAGES = {
    "first": Stage(
        ((8, Recipe(256, repeats=0.8, chatter=0.1, numbers=0.8)),), window=64, looking=0.3
    ),
    "second": Stage(
        ((2, Recipe(1024, repeats=0.25, chats=0.25, chatter=0.25, unknown=0.1)),),
        window=128,
        muon_lr=0.015,
        adam_lr=2e-3,
        looking=0.2,
        settings={"index_loss": True},
    ),
    "third": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=0.7, chatter=0.2, unknown=0.15)),
            (8, Recipe(256, repeats=0.05, chats=0.4, chatter=0.2, unknown=0.15, document=0.3)),
            (2, Recipe(1024, repeats=0.1, chats=0.1, chatter=0.25, unknown=0.15)),
            (2, Recipe(1024, repeats=0.1, chatter=0.25, unknown=0.15, document=0.7)),
        ),
        window=128,
        muon_lr=0.012,
        adam_lr=2e-3,
        looking=0.15,
        settings={"index_loss": True},
    ),
    "fourth": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=0.7, chatter=0.2, unknown=0.15)),
            (8, Recipe(256, repeats=0.0, chats=0.4, chatter=0.2, unknown=0.15, document=0.3)),
            (2, Recipe(1024, repeats=0.05, chats=0.1, chatter=0.25, unknown=0.15)),
            (2, Recipe(1024, repeats=0.05, chatter=0.25, unknown=0.15, document=0.7)),
            (8, Recipe(256, repeats=0.0, chats=0.7, chatter=0.2, unknown=0.15)),
            (8, Recipe(256, repeats=0.0, chats=0.2, chatter=0.3, unknown=0.2, document=0.4)),
            (1, Recipe(4096, repeats=0.0, chatter=0.25, unknown=0.15, document=0.7)),
        ),
        window=128,
        muon_lr=0.012,
        adam_lr=1.5e-3,
        looking=0.1,
        cools=True,
        settings={"index_loss": True},
    ),
    "fifth": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=0.1, chatter=0.2, unknown=0.3, document=0.3)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, document=0.5)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, about_text=0.1)),
            (2, Recipe(1024, repeats=0.0, chatter=0.25, unknown=0.3, document=0.7)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
        ),
        window=128,
        muon_lr=0.012,
        adam_lr=1.5e-3,
        looking=0.15,
        settings={"index_loss": True},
    ),
    "sixth": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=0.1, chatter=0.2, unknown=0.3, document=0.3)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, document=0.5)),
            (2, Recipe(1024, repeats=0.0, chatter=0.3, unknown=0.35, document=0.7)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=0.7, about_text=0.3)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, document=0.5)),
            (8, Recipe(256, repeats=0.0, chats=0.4, chatter=0.2, unknown=0.3, document=0.4)),
            (1, Recipe(4096, repeats=0.0, chatter=0.3, unknown=0.4, document=0.75)),
            (1, Recipe(4096, repeats=0.0, chatter=0.1, unknown=0.4, document=0.8)),
            (1, Recipe(8192, repeats=0.0, chatter=0.2, unknown=0.4, document=0.8)),
        ),
        window=128,
        muon_lr=0.012,
        adam_lr=1.5e-3,
        looking=0.15,
        settings={"index_loss": True},
    ),
    "seventh": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=0.6, chatter=0.2, unknown=0.3, document=0.4)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, document=0.6)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=0.5, about_text=0.5)),
            (1, Recipe(4096, repeats=0.0, chatter=0.3, unknown=0.4, document=0.75)),
            (1, Recipe(8192, repeats=0.0, chatter=0.1, unknown=0.45, document=0.8)),
        ),
        window=128,
        muon_lr=0.012,
        adam_lr=1.5e-3,
        looking=0.15,
        cools=True,
        settings={"index_loss": True},
    ),
    "eighth": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=0.4, chatter=0.3, unknown=0.3, document=0.5)),
            (2, Recipe(1024, repeats=0.0, chatter=0.3, unknown=0.3, document=0.7)),
            (2, Recipe(1024, repeats=0.0, chatter=0.1, unknown=0.3, document=0.6)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=0.8, about_text=0.2)),
            (1, Recipe(4096, repeats=0.0, chatter=0.3, unknown=0.35, document=0.8)),
            (1, Recipe(8192, repeats=0.0, chatter=0.1, unknown=0.35, document=0.85)),
        ),
        window=128,
        muon_lr=0.01,
        adam_lr=1.2e-3,
        looking=0.15,
        cools=True,
        settings={"index_loss": True},
    ),
    "ninth": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=1.0, unknown=0.25)),
            (8, Recipe(256, repeats=0.0, chats=0.4, chatter=0.3, unknown=0.3, document=0.5)),
            (2, Recipe(1024, repeats=0.0, chatter=0.2, unknown=0.3, document=0.7)),
            (4, Recipe(512, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=1.0)),
            (2, Recipe(1024, repeats=0.0, tools=0.8, about_text=0.2)),
            (2, Recipe(1024, repeats=0.0, tools=0.8, about_text=0.2)),
            (1, Recipe(8192, repeats=0.0, chatter=0.2, unknown=0.35, document=0.85)),
        ),
        window=128,
        muon_lr=0.01,
        adam_lr=1.2e-3,
        looking=0.15,
        cools=True,
        settings={"index_loss": True},
    ),
    "warm": Stage(
        ((8, Recipe(256)),), window=128, looking=0.1, settings={"index_loss": True}, steps=1
    ),
    "drafts": Stage(
        (
            (8, Recipe(256, repeats=0.0, chats=0.7, chatter=0.2, document=0.3)),
            (2, Recipe(1024, repeats=0.0, tools=0.4, chatter=0.2, document=0.4)),
        ),
        window=128,
        muon_lr=0.02,
        adam_lr=2e-3,
        cools=True,
        drafts=True,
    ),
}


class Trainer:
    """Owns: the model, its optimizers and the state on disk."""

    def __init__(self, config: dict[str, Any], tokenizer: Path, stage: Stage, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = TrainModel(config)
        lay_out(self.model)
        self.stage = stage
        self.encoder = Encoder(tokenizers.Tokenizer.from_file(str(tokenizer)))
        self.optimizers = make_optimizers(self.model, stage.muon_lr, stage.adam_lr)
        self.settings = Settings(
            **{
                "dtype": torch.bfloat16,
                "window": stage.window,
                "sinkhorn_iters": 5,
                "select": False,
                **stage.settings,
            }
        )
        self.step = 0
        self.rng = random.Random(seed)
        self.average = {
            name: value.clone()
            for name, value in self.model.state_dict().items()
            if value.is_floating_point()
        }
        self._met = 0.0

    def run_step(self, left: float = 1.0) -> dict[str, float]:
        """One update, with so much of the run left; returns what to log."""
        size, recipe = self.rng.choice(self.stage.recipes)
        batch = make_batch(self.encoder, self.rng, recipe, size, 0.05)
        # The backward graph of long sequences, where the indexer selects, takes too long to build.
        is_long = recipe.length > 1024
        # Half of them unselected, for the indexer learns from attention to everything.
        settings = replace(self.settings, select=is_long and self.rng.random() < 0.5)
        stance = torch.compiler.set_stance("force_eager" if is_long else "default")
        with stance, torch.set_grad_enabled(not self.stage.drafts):
            output = self.model(batch.ids, settings)
        looks = self._looks(output, batch)
        if self.stage.drafts:
            loss, hits, count = draft_loss(self.model, output.streams, batch, self.settings)
            torch.autograd.backward(loss)
        else:
            loss, hits, count = weighted_loss(self.model, output.streams, batch)
            guide = sum((part for part, _ in looks), torch.zeros(()))
            torch.autograd.backward(loss + output.index_loss + self.stage.looking * guide)
            self._balance(output.loads)
        factor = min(1.0, (self.step + 1) / self.stage.warmup)
        if self.stage.cools:
            factor *= max(0.05, left)
        for optimizer, lr in zip(
            self.optimizers, (self.stage.muon_lr, self.stage.adam_lr), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._follow()
        return {
            "loss": loss.item(),
            "hits": hits.item(),
            "count": count.item(),
            "index": float(output.index_loss),
            "tokens": batch.ids.numel(),
            **{
                f"look{i}": mass.item() for i, (_, mass) in zip(LOOKING_LAYERS, looks, strict=False)
            },
        }

    def _looks(self, output: Output, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        if not self.stage.looking or self.stage.drafts:
            return []
        return [
            looking_loss(output.attended[i], batch, self.stage.window, heads=2)
            for i in LOOKING_LAYERS
        ]

    @torch.no_grad()
    def _follow(self) -> None:
        """Let the average of the weights follow; it is what is exported."""
        share = max(0.01, 1 / self.step)
        for name, value in self.model.state_dict().items():
            if name in self.average:
                self.average[name].lerp_(value, share)

    def _balance(self, loads: dict[int, Tensor]) -> None:
        for i, load in loads.items():
            bias = self.model.blocks[i].ffn.bias
            bias += 1e-3 * torch.sign(load.mean() - load)

    @torch.no_grad()
    def meet(self, own: Path, other: Path) -> bool:
        """Share weights with a process that trains beside this one; meet its latest half way."""
        torch.save(self.model.state_dict(), own.with_suffix(".new"))
        own.with_suffix(".new").rename(own)
        if not other.exists() or other.stat().st_mtime <= self._met:
            return False
        self._met = other.stat().st_mtime
        theirs = torch.load(other, weights_only=True)
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                value.lerp_(theirs[name], 0.5)
        return True

    def save(self, file: Path) -> None:
        """Write everything that ``load`` needs."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "rng": self.rng.getstate(),
        }
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)

    def start_from(self, source: Path) -> None:
        """Take the weights of a state's file, or of a checkpoint's folder."""
        if source.is_dir():
            load_weights(self.model, source / "model.safetensors")
        else:
            state = torch.load(source, weights_only=False)
            self.model.load_state_dict(state["model"] | state.get("average", {}))

    def tie_spellings(self) -> None:
        """Give words at a line's start the meaning they have after a space."""
        rng, seen = random.Random(0), torch.zeros(len(self.model.embed))
        for _ in range(40):
            ids = make_batch(self.encoder, rng, Recipe(256, chats=0.3), 8, 0.0).ids
            seen += ids.flatten().bincount(minlength=len(seen))
        vocabulary = self.encoder.vocabulary
        known = {i for word, i in vocabulary.items() if seen[i] >= (25 if word.islower() else 500)}
        tie_spellings(self.model, vocabulary, known)

    def load(self, file: Path) -> None:
        """Go on from a state."""
        state = torch.load(file, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, old in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(old)
        self.step = state["step"]
        self.rng.setstate(state["rng"])


def main() -> None:
    """Train one stage for so many minutes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True, help="folder of the states, kept")
    parser.add_argument("--stage", required=True, choices=list(STAGES))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument(
        "--weights-of", type=Path, help="start from a state's .pt or a checkpoint's folder"
    )
    parser.add_argument(
        "--tie", action="store_true", help="words get one meaning with and without a space before"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partner", type=int, help="seed of a process that trains beside this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stage = STAGES[arguments.stage]
    trainer = Trainer(CONFIG, EMBEDDED / "tokenizer.json", stage, arguments.seed)
    name = arguments.stage + (f".{arguments.seed}" if arguments.partner else "")
    file = arguments.state / f"{name}.pt"
    torch._dynamo.config.recompile_limit = 64  # a graph per kind of layer, shape and setting
    if not stage.drafts:  # a minute or more per shape: it does not pay for the short stage
        for block in trainer.model.blocks:
            block.compile(dynamic=False)
    own, other = (
        arguments.state / f"{arguments.stage}.{seed}.shared"
        for seed in (arguments.seed, arguments.partner)
    )
    if file.exists():
        trainer.load(file)
    elif arguments.weights_of:
        trainer.start_from(arguments.weights_of)
        if arguments.tie:
            trainer.tie_spellings()
    end = time.monotonic() + 60 * arguments.minutes
    window: list[dict[str, float]] = []
    start = time.monotonic()
    while time.monotonic() < end and trainer.step < stage.steps:
        window.append(trainer.run_step((end - time.monotonic()) / (60 * arguments.minutes)))
        if trainer.step % 25 == 0:
            total = {key: sum(w[key] for w in window) for key in window[0]}
            now = time.monotonic()
            print(
                f"{time.strftime('%H:%M:%S')} step {trainer.step} "
                f"loss {total['loss'] / len(window):.3f} "
                f"value {total['hits'] / max(1, total['count']):.3f} "
                f"index {total['index'] / len(window):.3f} "
                + "".join(f"{k} {total[k] / len(window):.2f} " for k in total if "look" in k)
                + f"tok/s {total['tokens'] / (now - start):.0f}",
                flush=True,
            )
            window, start = [], now
            if arguments.partner and trainer.meet(own, other):
                print("met", flush=True)
        if trainer.step % 50 == 0:
            trainer.save(file)
    trainer.save(file)


if __name__ == "__main__":
    main()
