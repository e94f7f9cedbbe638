"""A differentiable forward of DeepSeek-V4 over whole batches, for training the embedded model.

It has the maths of ``vllm/model_executor/models/deepseek_v4`` without its caches: every sequence of
a batch [B, L] starts at position 0 and is computed at once. The experts are computed densely and
weighed by the router's choice, the window is a band of chunks, and matrix products run in bfloat16
when asked to. A test holds its logits against the engine's.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.embedded_model.attention import attend, entry_keys_mask, window_chunks, window_mask


@dataclass(frozen=True)
class Settings:
    """How a forward runs, apart from the weights.

    Attributes:
        dtype: Of matrix products.
        window: Rows a query sees, itself included; None: the config's.
        sinkhorn_iters: None: the config's. The projection has converged long before 20.
        select: Whether the indexer's top-k cuts attention; without it all entries are read.
        index_loss: Whether to return the indexer's divergence from the attention.
        hidden: Caches ("window", "c4", "c128", "index") of which queries at and after
            ``hidden_before`` see nothing that lies before it.
    """

    dtype: torch.dtype = torch.float32
    window: int | None = None
    sinkhorn_iters: int | None = None
    select: bool = True
    index_loss: bool = False
    hidden: frozenset[str] = frozenset()
    hidden_before: int = 0


@dataclass
class Output:
    """What a forward returns.

    Attributes:
        streams: [B, L, n, D] after the last layer.
        index_loss: Sum of the indexers' divergences from their layer's attention.
        loads: Tokens per expert [E], by scored layer.
        attended: Each layer's queries and keys, for losses on where it looks.
    """

    streams: Tensor
    index_loss: Tensor
    loads: dict[int, Tensor]
    attended: list["Attended"]


@dataclass
class Attended:
    """Queries [B, L, H, d], window rows [B, L, d] and entries [B, L // ratio, d] or None."""

    queries: Tensor
    rows: Tensor
    entries: Tensor | None
    sink: Tensor
    ratio: int


def rms(x: Tensor, eps: float) -> Tensor:
    """Weight-less RMS norm over the last axis, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rope_tables(config: dict[str, Any], compress: bool, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, rope_dim / 2] of window layers or of those with a compressor."""
    dim = config["qk_rope_head_dim"]
    base = config["compress_rope_theta" if compress else "rope_theta"]
    theta = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    yarn = config.get("rope_scaling")
    if compress and yarn:
        original = yarn["original_max_position_embeddings"]

        def bound(beta: float) -> float:
            turns: float = dim * math.log(original / (beta * 2 * math.pi))
            return turns / (2 * math.log(base))

        low = max(math.floor(bound(yarn["beta_fast"])), 0)
        high = min(math.ceil(bound(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
        theta = theta * (ramp / yarn["factor"] + 1 - ramp)
    angles = (positions.double()[:, None] * theta).float()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last ``2 * cos.shape[-1]`` channels in interleaved pairs."""
    width = 2 * cos.shape[-1]
    tail = x[..., -width:]
    a, b = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


class HyperMix(nn.Module):
    """Pre, post and residual mixing of one sublayer; residual streams [T, n, D]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        n, d = config["hc_mult"], config["hidden_size"]
        self.n, self.eps, self.norm_eps = n, config["hc_eps"], config["rms_norm_eps"]
        self.iters = config["hc_sinkhorn_iters"]
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * d) / math.sqrt(n * d))
        base = torch.cat([torch.full((n,), -1.1), torch.zeros(n), 3.0 * torch.eye(n).flatten()])
        self.base = nn.Parameter(base + 0.5 * torch.randn_like(base))
        self.scale = nn.Parameter(torch.full((3,), 0.1))

    def forward(self, x: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sublayer's input [T, D], post [T, n] and A [T, n, n]."""
        n = self.n
        flat = x.flatten(-2)
        turn = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        m = F.linear(flat.to(settings.dtype), self.fn.to(settings.dtype)).float() * turn
        scale = torch.cat([s.expand(k) for s, k in zip(self.scale, (n, n, n * n), strict=True)])
        m = m * scale + self.base
        pre = m[..., :n].sigmoid() + self.eps
        post = 2 * m[..., n : 2 * n].sigmoid()
        mix = torch.unflatten(m[..., 2 * n :], -1, (n, n)).softmax(-1) + self.eps
        mix = sinkhorn(mix, settings.sinkhorn_iters or self.iters, self.eps)
        return (pre[..., None] * x).sum(1), post, mix


def sinkhorn(mix: Tensor, iters: int, eps: float) -> Tensor:
    """Normalise columns, then ``iters - 1`` times rows and columns; [T, n, n]."""
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


class HyperHead(nn.Module):
    """Collapses the streams to one hidden state."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        n, d = config["hc_mult"], config["hidden_size"]
        self.eps, self.norm_eps = config["hc_eps"], config["rms_norm_eps"]
        self.fn = nn.Parameter(torch.randn(n, n * d) / math.sqrt(n * d))
        self.base = nn.Parameter(torch.full((n,), -1.1))
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, n, D] to [T, D]."""
        m = F.linear(rms(x.flatten(-2), self.norm_eps), self.fn)
        w = (m * self.scale + self.base).sigmoid() + self.eps
        return torch.einsum("tn,tnd->td", w, x)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))


class Compressor(nn.Module):
    """Pools every ``ratio`` tokens into one entry of width ``width``; ratio 4 overlaps."""

    def __init__(self, config: dict[str, Any], ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.eps = ratio, width, config["rms_norm_eps"]
        rows = 2 * width if ratio == 4 else width
        self.wkv = _matrix(rows, config["hidden_size"])
        self.wgate = _matrix(rows, config["hidden_size"])
        self.ape = nn.Parameter(0.1 * torch.randn(ratio, rows))
        self.norm = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, L, 2 * rows] to the roped entries [B, L // ratio, width]."""
        ratio, width = self.ratio, self.width
        count = projected.shape[1] // ratio
        rows = torch.unflatten(projected[:, : count * ratio].float(), 1, (count, ratio))
        c, g = rows.chunk(2, -1)
        s = g + self.ape
        if ratio == 4:
            c = torch.cat([_previous(c[..., :width], 0.0), c[..., width:]], 2)
            s = torch.cat([_previous(s[..., :width], -1e9), s[..., width:]], 2)
        entries = rms((s.softmax(2) * c).sum(2), self.eps) * self.norm
        return rotate(entries, cos[::ratio][:count], sin[::ratio][:count])


def _previous(rows: Tensor, fill: float) -> Tensor:
    return torch.cat([torch.full_like(rows[:, :1], fill), rows[:, :-1]], 1)


class Attention(nn.Module):
    """Window rows plus compressed entries, one key-value head, sinks, grouped output."""

    def __init__(self, config: dict[str, Any], ratio: int) -> None:
        super().__init__()
        self.config, self.ratio = config, ratio
        d, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        q, groups, rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
        self.wq_a, self.wq_b = _matrix(q, d), _matrix(heads * width, q)
        self.q_norm = nn.Parameter(torch.ones(q))
        self.wkv = _matrix(width, d)
        self.kv_norm = nn.Parameter(torch.full((width,), 1.5))
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = _matrix(groups * rank, heads * width // groups)
        self.wo_b = _matrix(d, groups * rank, 0.3)
        if ratio:
            self.compressor = Compressor(config, ratio, width)
        if ratio == 4:
            self.index_wq = _matrix(config["index_n_heads"] * config["index_head_dim"], q)
            self.index_weights = _matrix(config["index_n_heads"], d)
            self.index_compressor = Compressor(config, ratio, config["index_head_dim"])

    def forward(
        self, x: Tensor, tables: dict[bool, tuple[Tensor, Tensor]], settings: Settings
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor | None]]:
        """Map the normed input [B, L, D] to [B, L, D]; the indexer's loss; queries and keys."""
        config, heads, width = self.config, self.config["num_attention_heads"], self.wkv.shape[0]
        cos, sin = tables[bool(self.ratio)]
        mats: list[Tensor] = [self.wq_a, self.wkv]
        if self.ratio:
            mats += [self.compressor.wkv, self.compressor.wgate]
        x = x.to(settings.dtype)
        parts = torch.split(
            F.linear(x, torch.cat(mats).to(settings.dtype)),
            [self.wq_a.shape[0], width, sum(m.shape[0] for m in mats[2:])],
            -1,
        )
        qr = rms(parts[0], config["rms_norm_eps"]) * self.q_norm
        qr = qr.to(settings.dtype)
        q = torch.unflatten(F.linear(qr, self.wq_b.to(settings.dtype)), -1, (heads, width))
        q = rotate(rms(q, config["rms_norm_eps"]), cos[:, None], sin[:, None])
        kv = rotate(rms(parts[1], config["rms_norm_eps"]) * self.kv_norm, cos, sin)
        window = settings.window or config["sliding_window"]
        length = x.shape[1]
        keys, mask = window_chunks(kv, window), window_mask(length, window)
        if "window" in settings.hidden:
            mask = _hide(mask, 1, window, settings.hidden_before)
        loss, entries, scores = None, None, None
        if self.ratio:
            entries = self.compressor(parts[2], cos, sin)
            visible = entry_keys_mask(length, window, self.ratio, entries.shape[1])
            if f"c{self.ratio}" in settings.hidden:
                visible = _hide(visible, self.ratio, 0, settings.hidden_before)
            if self.ratio == 4 and (settings.index_loss or settings.select):
                scores = self._index_scores(x.detach(), qr.detach(), cos, sin, settings)
                if "index" in settings.hidden:  # keys that say nothing: the first ones are chosen
                    scores = torch.zeros_like(scores)
            if settings.select and entries.shape[1] > config["index_topk"] and scores is not None:
                visible = _cut(visible, scores, config["index_topk"], window)
            chunks = keys.shape[1]
            shared = entries[:, None].expand(-1, chunks, -1, -1)
            keys = torch.cat([keys, shared], 2)
            mask = torch.cat([mask.expand(*visible.shape[:-1], -1), visible], -1)
        o, p = attend(q, keys, mask, self.attn_sink, window, settings.dtype)
        if entries is not None and settings.index_loss and scores is not None:
            loss = _index_divergence(p[..., 2 * window : -1], scores, length)
        o = rotate(o, cos[:, None], -sin[:, None]).to(settings.dtype)
        groups, rank = config["o_groups"], config["o_lora_rank"]
        o = torch.unflatten(o, 2, (groups, heads // groups)).flatten(3)
        wo_a = self.wo_a.to(settings.dtype).view(groups, rank, -1)
        z = torch.einsum("blgi,gri->blgr", o, wo_a).flatten(2)
        return F.linear(z, self.wo_b.to(settings.dtype)).float(), loss, (q, kv, entries)

    def _index_scores(
        self, x: Tensor, qr: Tensor, cos: Tensor, sin: Tensor, settings: Settings
    ) -> Tensor:
        config, dtype = self.config, settings.dtype
        heads, width = config["index_n_heads"], config["index_head_dim"]
        compressor = self.index_compressor
        projected = F.linear(x, torch.cat([compressor.wkv, compressor.wgate]).to(dtype))
        keys = compressor(projected, cos, sin).to(dtype)
        q = torch.unflatten(F.linear(qr, self.index_wq.to(dtype)), -1, (heads, width))
        q = rotate(q, cos[:, None], sin[:, None]).to(dtype)
        w = F.linear(x, self.index_weights.to(dtype)).float() * (heads * width) ** -0.5
        batch, length = x.shape[:2]
        scores = q.flatten(1, 2) @ keys.transpose(1, 2)
        scores = scores.relu().view(batch, length, heads, -1)
        # One product [1, heads] x [heads, keys] per query.
        found: Tensor = (w.to(dtype)[:, :, None] @ scores).squeeze(2).float()
        return found


def _hide(mask: Tensor, ratio: int, window: int, before: int) -> Tensor:
    """Hide keys of positions below ``before`` from queries at and after it.

    Args:
        mask: [1, chunks, 1, W, K].
        ratio: Tokens per key.
        window: W where keys are a band's that starts W before the chunk; 0: keys of all positions.
        before: The position.
    """
    chunks, rows, count = mask.shape[1], mask.shape[3], mask.shape[4]
    query = torch.arange(chunks * rows).view(1, chunks, 1, rows, 1)
    start = torch.arange(chunks).view(1, chunks, 1, 1, 1) * rows - window if window else 0
    last = (torch.arange(count) + 1) * ratio - 1 + start
    return mask.masked_fill((query >= before) & (last < before), -torch.inf)


def _cut(visible: Tensor, scores: Tensor, top_k: int, window: int) -> Tensor:
    """Hide all but the best ``top_k`` visible entries: mask [B, chunks, 1, W, K]."""
    batch, length, count = scores.shape
    allowed = visible.flatten(0, 3)[:length] if visible.dim() == 5 else visible
    hidden = visible.view(-1, count)[:length]
    del allowed
    best = (scores.detach() + hidden).topk(top_k, -1).indices
    chosen = torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0) + hidden
    return F.pad(chosen, (0, 0, 0, -length % window)).view(batch, -1, 1, window, count)


def _index_divergence(p: Tensor, scores: Tensor, length: int) -> Tensor:
    """KL of the indexer's softmax from the attention summed over heads, in mean over queries."""
    target = p.detach().float().sum(2).flatten(1, 2)[:, :length]
    mass = target.sum(-1, keepdim=True)
    target = target / mass.clamp_min(1e-6)
    count = scores.shape[-1]
    visible = torch.arange(count) < ((torch.arange(length) + 1) // 4)[:, None]
    log_q = scores.masked_fill(~visible, -1e9).log_softmax(-1)
    cross = -(target * log_q).sum(-1)
    entropy = -(target * target.clamp_min(1e-9).log()).sum(-1)
    weight = mass[..., 0]
    return ((cross - entropy) * weight).sum() / weight.sum().clamp_min(1.0)


class MoE(nn.Module):
    """Routed experts and the shared one, stacked; the shared expert is the last."""

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: dict[str, Any], hashed: bool) -> None:
        super().__init__()
        self.config = config
        d, inner, experts = (
            config["hidden_size"],
            config["moe_intermediate_size"],
            config["n_routed_experts"],
        )
        self.gate = _matrix(experts, d)
        self.hashed = hashed
        if hashed:
            top_k, vocab = config["num_experts_per_tok"], config["vocab_size"]
            table = torch.rand(vocab, experts).argsort(-1)[:, :top_k]
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("bias", torch.zeros(experts))
        self.w1 = nn.Parameter(torch.randn(experts + 1, inner, d) / math.sqrt(d))
        self.w3 = nn.Parameter(torch.randn(experts + 1, inner, d) / math.sqrt(d))
        self.w2 = nn.Parameter(0.3 * torch.randn(experts + 1, d, inner) / math.sqrt(inner))

    def forward(self, x: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Map [T, D] and the token ids [T] to [T, D] and the experts' loads [E]."""
        config, limit = self.config, self.config["swiglu_limit"]
        scores = F.softplus(F.linear(x, self.gate)).sqrt()
        if self.hashed:
            chosen = self.tid2eid[ids]
        else:
            chosen = (scores.detach() + self.bias).topk(config["num_experts_per_tok"], -1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config["routed_scaling_factor"]
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], -1)
        x = x.to(dtype)
        gate = F.linear(x, self.w1.flatten(0, 1).to(dtype)).clamp(max=limit)
        up = F.linear(x, self.w3.flatten(0, 1).to(dtype)).clamp(-limit, limit)
        hidden = torch.unflatten(F.silu(gate) * up, -1, self.w1.shape[:2])
        hidden = (hidden * weights.to(dtype)[..., None]).flatten(-2)
        down = self.w2.transpose(0, 1).flatten(1).to(dtype)
        return F.linear(hidden, down).float(), mask.sum(0)


class Block(nn.Module):
    """One layer: attention and experts, each between hyper-connections."""

    def __init__(self, config: dict[str, Any], ratio: int, hashed: bool) -> None:
        super().__init__()
        self.eps = config["rms_norm_eps"]
        self.hc_attn, self.hc_ffn = HyperMix(config), HyperMix(config)
        self.attn_norm = nn.Parameter(torch.ones(config["hidden_size"]))
        self.ffn_norm = nn.Parameter(torch.ones(config["hidden_size"]))
        self.attn = Attention(config, ratio)
        self.ffn = MoE(config, hashed)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        tables: dict[bool, tuple[Tensor, Tensor]],
        settings: Settings,
    ) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, Tensor | None]]:
        """Map the streams [B, L, n, D]; the indexer's loss, the experts' loads, the attended."""
        batch, length = ids.shape
        x = x.flatten(0, 1)
        y, post, mix = self.hc_attn(x, settings)
        y = (rms(y, self.eps) * self.attn_norm).view(batch, length, -1)
        o, loss, attended = self.attn(y, tables, settings)
        x = post[..., None] * o.flatten(0, 1)[:, None] + (mix[..., None] * x[:, :, None]).sum(1)
        y, post, mix = self.hc_ffn(x, settings)
        o, loads = self.ffn(rms(y, self.eps) * self.ffn_norm, ids.flatten(), settings.dtype)
        x = post[..., None] * o[:, None] + (mix[..., None] * x[:, :, None]).sum(1)
        return x.view(batch, length, *x.shape[1:]), loss, loads, attended


class Drafter(nn.Module):
    """The MTP block: from the streams at t and the token at t + 1 to the token at t + 2."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d = config["hidden_size"]
        self.eps = config["rms_norm_eps"]
        self.block = Block(config, 0, False)
        self.e_proj, self.h_proj = _matrix(d, d, 0.7), _matrix(d, d, 0.7)
        self.enorm, self.hnorm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.norm = nn.Parameter(torch.ones(d))
        self.hc_head = HyperHead(config)

    def forward(
        self,
        streams: Tensor,
        embedded: Tensor,
        ids: Tensor,
        tables: dict[bool, tuple[Tensor, Tensor]],
        settings: Settings,
    ) -> Tensor:
        """Return the block's streams [B, L, n, D]; ``embedded`` [B, L, D] is of the next tokens."""
        e = F.linear(rms(embedded, self.eps) * self.enorm, self.e_proj)
        h = F.linear(rms(streams, self.eps) * self.hnorm, self.h_proj)
        out: Tensor = self.block(h + e[:, :, None], ids, tables, settings)[0]
        return out


class TrainModel(nn.Module):
    """The whole model; parameters carry names that ``checkpoint.py`` maps to the published ones."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        d, vocab = config["hidden_size"], config["vocab_size"]
        self.embed = nn.Parameter(torch.randn(vocab, d))
        self.head = nn.Parameter(0.1 * torch.randn(vocab, d) / math.sqrt(d))
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        self.layers = nn.ModuleList(
            Block(config, ratio, i < config["num_hash_layers"]) for i, ratio in enumerate(ratios)
        )
        self.norm = nn.Parameter(torch.ones(d))
        self.hc_head = HyperHead(config)
        self.mtp = Drafter(config)

    @property
    def blocks(self) -> list[Block]:
        """The main layers."""
        return [block for block in self.layers if isinstance(block, Block)]

    def tables(self, length: int) -> dict[bool, tuple[Tensor, Tensor]]:
        """Rotary tables by whether the layer has a compressor."""
        positions = torch.arange(length)
        return {kind: rope_tables(self.config, kind, positions) for kind in (False, True)}

    def forward(self, ids: Tensor, settings: Settings) -> Output:
        """Run the main layers over token ids [B, L]."""
        tables = self.tables(ids.shape[1])
        x = self.embed[ids][:, :, None].expand(-1, -1, self.config["hc_mult"], -1)
        total, loads, attended = torch.zeros(()), {}, []
        for i, block in enumerate(self.blocks):
            x, loss, load, (q, rows, entries) = block(x, ids, tables, settings)
            attended.append(Attended(q, rows, entries, block.attn.attn_sink, block.attn.ratio))
            total = total if loss is None else total + loss
            if not block.ffn.hashed:
                loads[i] = load
        return Output(x, total, loads, attended)

    def hidden(self, streams: Tensor) -> Tensor:
        """Collapse chosen streams [M, n, D] to the normed hidden states [M, D]."""
        return rms(self.hc_head(streams), self.config["rms_norm_eps"]) * self.norm

    def draft_hidden(self, streams: Tensor) -> Tensor:
        """The same for the MTP block's streams."""
        return rms(self.mtp.hc_head(streams), self.config["rms_norm_eps"]) * self.mtp.norm
