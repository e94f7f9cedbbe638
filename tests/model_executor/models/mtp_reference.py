"""The MTP block of DeepSeek-V4 in plain torch: whole sequences, fp32, no cache, no sharing.

Written from the architecture's equations; it shares no code with ``vllm``. Only tests use it.

T tokens, n residual streams, width D, H heads of size d, vocabulary V.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

PREFIX = "mtp.0."


@dataclass
class Draft:
    """What the block says after ``num_known`` tokens.

    Attributes:
        logits: ``[k, V]``: of the tokens at ``num_known``, ``num_known + 1``, ...
        margin: The least gap, over all steps, of an argmax or an expert choice to the next best.
    """

    logits: torch.Tensor
    margin: float

    @property
    def token_ids(self) -> list[int]:
        """The greedy draft."""
        ids: list[int] = self.logits.argmax(-1).tolist()
        return ids


class MtpReference:
    """The block of one checkpoint.

    Args:
        tensors: Published name -> tensor; ``mtp.0.*``, ``embed.weight``, ``head.weight``.
        config: config.json in the published spelling.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self._tensors = {name: tensor.detach().float() for name, tensor in tensors.items()}
        self._config = {
            "rms_norm_eps": 1e-6,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            **config,
        }
        self._margin = math.inf

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[PREFIX + name]

    def draft(self, streams: torch.Tensor, token_ids: list[int], k: int) -> Draft:
        """Draft k tokens greedily after known tokens.

        Args:
            streams: ``[T, n, D]`` of the main model, T at least ``len(token_ids) - 1``.
            token_ids: All known tokens; the last one's own streams are not known.
            k: Tokens of the draft.
        """
        self._margin = math.inf
        inputs = streams[: len(token_ids) - 1]
        tokens = list(token_ids)
        logits = []
        for _ in range(k):
            output = self.run(inputs, tokens[1:])
            logits.append(self.collapse(output[-1:])[0])
            best = logits[-1].topk(2).values
            self._margin = min(self._margin, float(best[0] - best[1]))
            # The next step takes the block's own streams at the position they stand for.
            tokens.append(int(logits[-1].argmax()))
            inputs = torch.cat([inputs, output[-1:]])
        return Draft(torch.stack(logits), self._margin)

    def run(self, streams: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
        """Return the block's streams ``[T, n, D]`` for main streams and the tokens after them."""
        eps = self._config["rms_norm_eps"]
        embedded = self._tensors["embed.weight"][torch.tensor(next_ids)]
        embedded = _norm(embedded, self["enorm.weight"], eps) @ self["e_proj.weight"].T
        hidden = _norm(streams, self["hnorm.weight"], eps) @ self["h_proj.weight"].T
        mixed = hidden + embedded[:, None, :]
        for kind, sublayer in (("attn", self._attend), ("ffn", self._mix_experts)):
            pre, post, mix = self._connect(mixed, f"hc_{kind}_")
            taken = torch.einsum("tn,tnd->td", pre, mixed)
            output = sublayer(_norm(taken, self[f"{kind}_norm.weight"], eps))
            carried = torch.einsum("tij,tid->tjd", mix, mixed)
            mixed = post[:, :, None] * output[:, None, :] + carried
        return mixed

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Return logits ``[T, V]`` of the block's streams."""
        projected = self._project(streams, self["hc_head_fn"])
        weights = torch.sigmoid(projected * self["hc_head_scale"] + self["hc_head_base"])
        weights = weights + self._config["hc_eps"]
        hidden = torch.einsum("tn,tnd->td", weights, streams)
        normed = _norm(hidden, self["norm.weight"], self._config["rms_norm_eps"])
        return normed @ self._tensors["head.weight"].T

    def _project(self, streams: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        flat = streams.reshape(streams.shape[0], -1)
        rms = (flat.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
        return flat / rms @ matrix.T

    def _connect(
        self, streams: torch.Tensor, prefix: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return pre ``[T, n]``, post ``[T, n]`` and the mixing matrix ``[T, n, n]``."""
        n, eps = streams.shape[1], self._config["hc_eps"]
        raw = self._project(streams, self[prefix + "fn"])
        base, (s0, s1, s2) = self[prefix + "base"], self[prefix + "scale"]
        pre = torch.sigmoid(raw[:, :n] * s0 + base[:n]) + eps
        post = 2 * torch.sigmoid(raw[:, n : 2 * n] * s1 + base[n : 2 * n])
        mix = (raw[:, 2 * n :] * s2 + base[2 * n :]).reshape(-1, n, n)
        mix = torch.softmax(mix, dim=2) + eps
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        for _ in range(self._config["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return pre, post, mix

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        config, eps = self._config, self._config["rms_norm_eps"]
        num_tokens, heads, d = x.shape[0], config["num_attention_heads"], config["head_dim"]
        latent = _norm(x @ self["attn.wq_a.weight"].T, self["attn.q_norm.weight"], eps)
        queries = (latent @ self["attn.wq_b.weight"].T).reshape(num_tokens, heads, d)
        queries = queries / (queries.square().mean(-1, keepdim=True) + eps).sqrt()
        rows = _norm(x @ self["attn.wkv.weight"].T, self["attn.kv_norm.weight"], eps)
        queries, rows = self._turn(queries, 1), self._turn(rows[:, None], 1)[:, 0]
        scores = torch.einsum("thd,sd->hts", queries, rows) / math.sqrt(d)
        distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None]
        hidden = (distance < 0) | (distance >= config["sliding_window"])
        scores = scores.masked_fill(hidden, -math.inf)
        sinks = self["attn.attn_sink"][:, None, None].expand(-1, num_tokens, 1)
        shares = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        heads_out = self._turn(torch.einsum("hts,sd->thd", shares, rows), -1)
        groups = config["o_groups"]
        grouped = heads_out.reshape(num_tokens, groups, -1)
        lowered = torch.einsum(
            "tgi,gri->tgr",
            grouped,
            self["attn.wo_a.weight"].reshape(groups, config["o_lora_rank"], -1),
        )
        return lowered.reshape(num_tokens, -1) @ self["attn.wo_b.weight"].T

    def _turn(self, values: torch.Tensor, sign: int) -> torch.Tensor:
        """Rotate interleaved pairs of the last dims of ``[T, H, d]`` by each row's position."""
        width = self._config["qk_rope_head_dim"]
        theta = self._config.get("rope_theta", 10000.0)
        turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(values.shape[0], dtype=torch.float64)[:, None] * turns * sign
        unit = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
        kept, turned = values[..., :-width], values[..., -width:].contiguous()
        pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], -1, 2)) * unit
        return torch.cat([kept, torch.view_as_real(pairs).flatten(-2)], -1)

    def _mix_experts(self, x: torch.Tensor) -> torch.Tensor:
        config = self._config
        scores = torch.nn.functional.softplus(x @ self["ffn.gate.weight"].T).sqrt()
        ranked = scores + self["ffn.gate.bias"]
        k = config["num_experts_per_tok"]
        best = ranked.topk(k + 1, -1)
        self._margin = min(self._margin, float(best.values[-1, k - 1] - best.values[-1, k]))
        shares = torch.zeros_like(scores)
        for t, chosen in enumerate(best.indices[:, :k].tolist()):
            shares[t, chosen] = scores[t, chosen] / (scores[t, chosen].sum() + 1e-20)
        output = self._expert("ffn.shared_experts", x)
        for e in range(scores.shape[1]):
            share = shares[:, e : e + 1] * config["routed_scaling_factor"]
            output += share * self._expert(f"ffn.experts.{e}", x)
        return output

    def _expert(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        limit = self._config["swiglu_limit"]
        gate = (x @ self[f"{prefix}.w1.weight"].T).clamp(max=limit)
        up = (x @ self[f"{prefix}.w3.weight"].T).clamp(-limit, limit)
        return (gate * torch.sigmoid(gate) * up) @ self[f"{prefix}.w2.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
