"""DeepSeek-V4.1 in plain torch, from its equations: rows of positions, no pages, no batches.

A step may drop rows layer by layer (``first``), begin above missing window rows (``read_from``) or
leave the entries alone (``writes_entries``): so what a boundary must hold can be tried out.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
NOTHING = float("nan")


@dataclass
class State:
    """What is kept of a prefix: ids, window rows by layer, entries, keys and open windows."""

    ids: list[int] = field(default_factory=list)
    windows: dict[int, torch.Tensor] = field(default_factory=dict)
    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    opened: dict[int, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> "State":
        parts = (self.windows, self.entries, self.keys, self.opened)
        return State(list(self.ids), *({k: v.clone() for k, v in part.items()} for part in parts))


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def turn(x: torch.Tensor, positions: torch.Tensor, rates: torch.Tensor, sign: int) -> torch.Tensor:
    """Turns the interleaved pairs at the end of the last axis; x [T, ..., d]."""
    angles = positions.double()[:, None] * rates.double() * sign
    cos, sin = angles.cos().float(), angles.sin().float()
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = 2 * len(rates)
    even, odd = x[..., -width::2], x[..., 1 - width :: 2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([x[..., :-width], pairs.flatten(-2)], -1)


def prime_after(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


class Reference:
    """The model: its config as published, its tensors, and the folded id of each id.

    ``wrong`` names an equation that is another model's, to see that it would show.
    """

    def __init__(
        self, raw: dict[str, Any], tensors: Tensors, folded: list[int], wrong: str = ""
    ) -> None:
        self.wrong = wrong
        self.c = c = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, **raw}
        self.w, self.folded = tensors, folded
        self.eps = c["rms_norm_eps"]
        half = c["qk_rope_head_dim"] // 2
        steps = torch.arange(half).double() / half
        self.main = c["rope_theta"] ** -steps
        yarn, theta = c["rope_scaling"], c["compress_rope_theta"]

        def find_pair(turns: float) -> float:
            length = yarn["original_max_position_embeddings"]
            return 2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(find_pair(yarn["beta_fast"])), 0)
        high = min(math.ceil(find_pair(yarn["beta_slow"])), 2 * half - 1)
        ramp = ((torch.arange(half) - low) / max(high - low, 0.001)).clamp(0, 1).double()
        self.compressed = theta**-steps * (ramp / yarn["factor"] + 1 - ramp)
        self.primes, candidate = {}, c["engram_vocab_size"]
        for layer in c["engram_layer_ids"]:
            own = []
            for _ in range((c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]):
                own.append(prime_after(candidate))
                candidate = own[-1] + 1
            self.primes[layer] = own

    def source(self, name: str, layer: int) -> int:
        return max(i for i in self.c[name] if i <= layer)

    def gates(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        fn, base, scale = (self.w[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        m = norm(x.flatten(1), None, self.eps) @ fn.T
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        mix = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return pre, post, mix

    def step(
        self,
        state: State,
        new_ids: list[int],
        first: list[int] | None = None,
        read_from: int = 0,
        writes_entries: bool = True,
    ) -> torch.Tensor:
        """Appends tokens to a state; returns the logits of the rows that are left."""
        start = len(state.ids)
        state.ids = state.ids + new_ids
        positions = torch.arange(start, len(state.ids))
        streams = self.w["embed.weight"][new_ids].unsqueeze(1)
        streams = streams.repeat(1, self.c["hc_mult"], 1)
        pre = torch.zeros(len(new_ids), self.c["hc_mult"])
        pre[:, 0] = 1
        chosen: dict[int, torch.Tensor] = {}
        for layer in range(self.c["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer in self.primes:
                streams = self.engram(layer, streams, positions, state.ids)
            own, post, mix = self.gates(streams, f"{name}.hc_attn")
            pre = own if self.wrong == "own gates" else pre
            x = (pre.unsqueeze(2) * streams).sum(1)
            x = norm(x, self.w[f"{name}.attn_norm.weight"], self.eps)
            kept = positions >= (first[layer] if first else 0)
            self.store(layer, x, positions, state, writes_entries)
            positions = positions[kept]
            output = self.attend(layer, x[kept], positions, state, chosen, read_from)
            streams = self.write(output, streams[kept], post[kept], mix[kept])
            pre, post, mix = self.gates(streams, f"{name}.hc_ffn")
            x = (own[kept].unsqueeze(2) * streams).sum(1)
            output = self.experts(name, norm(x, self.w[f"{name}.ffn_norm.weight"], self.eps))
            streams = self.write(output, streams, post, mix)
        hidden = norm((pre.unsqueeze(2) * streams).sum(1), self.w["norm.weight"], self.eps)
        return hidden @ self.w["head.weight"].T

    def write(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        mixed = "tji,tid->tjd" if self.wrong == "mix transposed" else "tij,tid->tjd"
        return post.unsqueeze(2) * output.unsqueeze(1) + torch.einsum(mixed, mix, streams)

    def engram(
        self, layer: int, streams: torch.Tensor, positions: torch.Tensor, ids: list[int]
    ) -> torch.Tensor:
        c, name = self.c, f"layers.{layer}.engram"
        longest, width = c["engram_max_ngram_size"], c["hidden_size"]
        limit = max(1, (2**63 - 1) // c["engram_compressed_vocab_size"] // 2)
        drawn = np.random.default_rng(10007 * layer).integers(0, limit, longest, dtype=np.int64)
        factors = [2 * int(value) + 1 for value in drawn]
        pad, image = self.folded[c["engram_pad_token_id"]], c.get("image_token_id")
        rows = []
        for position in positions.tolist():
            tokens, is_open = [self.folded[ids[position]]], True
            for back in range(1, longest):
                at = position - back
                is_open = is_open and at >= 0 and ids[at] != image
                tokens.append(self.folded[ids[at]] if is_open else pad)
            offset = 0
            for place, prime in enumerate(self.primes[layer]):
                count, mixed = 2 + place // c["engram_n_heads"], 0
                for token, factor in zip(tokens[:count], factors, strict=False):
                    mixed ^= token * factor
                rows.append(mixed % prime + offset)
                offset += prime
        table = self.w[f"{name}.embed.weight"][rows].float()
        mixed = table.view(len(positions), -1) @ self.w[f"{name}.wkv.weight"].T
        mixed = mixed.view(len(positions), c["hc_mult"] + 1, width)
        queries = norm(streams, None, self.eps) * self.w[f"{name}.q_weight"]
        keys = norm(mixed[:, :-1], None, self.eps) * self.w[f"{name}.k_weight"]
        agreed = (queries * keys).sum(-1) * width**-0.5
        gate = torch.sigmoid(agreed.sign() * agreed.abs().clamp(min=1e-6).sqrt())
        shows = torch.tensor([ids[position] != image for position in positions.tolist()])
        return streams + (gate * shows[:, None]).unsqueeze(2) * mixed[:, -1:]

    def rates(self, layer: int) -> torch.Tensor:
        return self.compressed if self.c["compress_ratios"][layer] else self.main

    def store(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        state: State,
        writes_entries: bool,
    ) -> None:
        name, width = f"layers.{layer}.attn", self.c["head_dim"]
        row = norm(x @ self.w[f"{name}.wkv.weight"].T, self.w[f"{name}.kv_norm.weight"], self.eps)
        held = state.windows.get(layer, torch.empty(0, width))
        grown = torch.full((len(state.ids), width), NOTHING)
        grown[: len(held)] = held
        grown[positions] = turn(row, positions, self.rates(layer), 1)
        state.windows[layer] = grown
        if layer in self.c["kv_source_layer_ids"] and writes_entries:
            self.compress(layer, x, int(positions[0]), state)

    def compress(self, layer: int, x: torch.Tensor, start: int, state: State) -> None:
        name, ratio = f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        rows = x @ self.w[f"{name}.compressor.wkv.weight"].T
        if ratio > 1:
            gate = x @ self.w[f"{name}.compressor.wgate.weight"].T
            opened = torch.cat([rows, gate], 1)
            before = start % ratio
            if before:
                opened = torch.cat([state.opened[layer][-before:], opened])
            count = len(opened) // ratio
            state.opened[layer] = opened[count * ratio :]
            values, scores = opened[: count * ratio].unflatten(0, (count, ratio)).chunk(2, -1)
            rows = (scores.softmax(1) * values).sum(1)
        at = (start // ratio + torch.arange(len(rows))) * ratio
        latent = norm(rows, self.w[f"{name}.compressor.norm.weight"], self.eps)
        key = norm(
            latent @ self.w[f"{name}.indexer.wk.weight"].T,
            self.w[f"{name}.indexer.k_norm.weight"],
            self.eps,
        )
        for kept, made in ((state.entries, latent), (state.keys, key)):
            turned = turn(made, at, self.compressed, 1)
            kept[layer] = torch.cat([kept.get(layer, turned[:0]), turned])

    def attend(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        state: State,
        chosen: dict[int, torch.Tensor],
        read_from: int,
    ) -> torch.Tensor:
        c, name, count = self.c, f"layers.{layer}.attn", len(positions)
        latent = norm(
            x @ self.w[f"{name}.wq_a.weight"].T, self.w[f"{name}.q_norm.weight"], self.eps
        )
        queries = (latent @ self.w[f"{name}.wq_b.weight"].T).unflatten(1, (-1, c["head_dim"]))
        if self.wrong == "heads normed":
            queries = norm(queries, None, self.eps)
        queries = turn(queries, positions, self.rates(layer), 1)
        columns = torch.arange(len(state.ids))
        sees = (columns <= positions[:, None]) & (
            columns > positions[:, None] - c["sliding_window"]
        )
        sees &= columns >= read_from
        keys = torch.where(sees.any(0)[:, None], state.windows[layer], 0.0)
        ratio = c["compress_ratios"][layer]
        if ratio:
            source = self.source("kv_source_layer_ids", layer)
            whole = (positions[:, None] + 1) // ratio > torch.arange(len(state.entries[source]))
            picked = self.choose(layer, source, x, latent, positions, whole, state, chosen)
            keys = torch.cat([keys, state.entries[source]])
            sees = torch.cat([sees, picked], 1)
        scores = torch.einsum("thd,kd->thk", queries, keys) * c["head_dim"] ** -0.5
        scores = scores.masked_fill(~sees[:, None], float("-inf"))
        sink = self.w[f"{name}.attn_sink"].expand(count, -1).unsqueeze(2)
        weights = torch.cat([sink, scores], 2).softmax(-1)[..., 1:]
        output = turn(weights @ keys, positions, self.rates(layer), -1)
        groups = output.flatten(1).unflatten(1, (c["o_groups"], -1))
        matrices = self.w[f"{name}.wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        mixed = torch.einsum("tgi,gri->tgr", groups, matrices).flatten(1)
        return mixed @ self.w[f"{name}.wo_b.weight"].T

    def choose(
        self,
        layer: int,
        source: int,
        x: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        whole: torch.Tensor,
        state: State,
        chosen: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Returns bool [T, K]; -1 of ``chosen`` holds the candidates, if they were named."""
        c, name = self.c, f"layers.{layer}.attn.indexer"
        if layer not in c["index_source_layer_ids"]:
            # Queries may have been dropped since.
            return last(chosen[self.source("index_source_layer_ids", layer)], len(positions))
        queries = (latent @ self.w[f"{name}.wq_b.weight"].T).view(
            len(x), c["index_n_heads"], c["index_head_dim"]
        )
        queries = turn(queries, positions, self.compressed, 1)
        scale = (c["index_head_dim"] * c["index_n_heads"]) ** -0.5
        heads = x @ self.w[f"{name}.weights_proj.weight"].T * scale
        products = torch.einsum("thd,kd->thk", queries, state.keys[source]).relu()
        scores = (heads.unsqueeze(2) * products).sum(1).masked_fill(~whole, float("-inf"))
        named = c.get("candidate_source_layer_id")
        if layer == named:
            chosen[-1] = self.name_candidates(scores, whole)
        elif named is not None and layer > named:
            scores = scores.masked_fill(~last(chosen[-1], len(positions)), float("-inf"))
        chosen[layer] = keep_best(scores, c["index_topk"])
        return chosen[layer]

    def name_candidates(self, scores: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        size, count = self.c["candidate_block_size"], scores.shape[1]
        fill = torch.full((len(scores), -count % size), float("-inf"))
        best = torch.cat([scores, fill], 1).unflatten(1, (-1, size)).amax(2)
        for row, visible in enumerate(whole.sum(1).tolist()):
            if visible:
                best[row, (visible - 1) // size] = float("inf")
        kept = keep_best(best, self.c["candidate_topk_blocks"])
        return kept.repeat_interleave(size, 1)[:, :count]

    def experts(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        c, name = self.c, f"{layer}.ffn"
        scores = torch.nn.functional.softplus(x @ self.w[f"{name}.gate.weight"].T).sqrt()
        ids = (scores + self.w[f"{name}.gate.bias"]).topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        output = self.expert(f"{name}.shared_experts", x)
        for expert in range(c["n_routed_experts"]):
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            if share.any():
                output = output + share * self.expert(f"{name}.experts.{expert}", x)
        return output

    def expert(self, name: str, x: torch.Tensor) -> torch.Tensor:
        limit = self.c["swiglu_limit"]
        gate, up = (x @ self.w[f"{name}.{part}.weight"].T for part in ("w1", "w3"))
        inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return inner @ self.w[f"{name}.w2.weight"].T


def last(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows[len(rows) - count :]


def keep_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Marks the best of each row that are above -inf; of equal ones the first."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)
    return kept & (scores > float("-inf"))
