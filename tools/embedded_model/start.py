"""Initial weights that already copy: what the recipe starts from instead of plain noise.

Random weights find the lookup circuit late, so the parts of one are laid out here and training
does the rest: the first layer's heads look at the tokens just before (by their rotary angle, on a
direction common to all embeddings), other layers carry what they look at by one projection and its
transpose, and the head starts as the embedding. Where to look is left to training.
"""

import math

import torch
from torch import Tensor

from tools.embedded_model.forward import Attention, TrainModel, rope_tables

_SPACE = "Ġ"  # how byte-level BPE spells it


@torch.no_grad()
def lay_out(model: TrainModel) -> None:
    """Set the model's initial weights.

    Mutates:
        ``model``.
    """
    d = model.config["hidden_size"]
    common = torch.nn.functional.normalize(torch.randn(d), dim=0)
    model.embed.add_(0.6 * math.sqrt(d) * common)
    centred = model.embed - model.embed @ common[:, None] * common
    model.head.copy_(0.05 * centred)
    for i, block in enumerate(model.blocks):
        if i == 0:
            _look_back(block.attn, common)
        else:
            _copy(block.attn, common)


@torch.no_grad()
def tie_spellings(model: TrainModel, vocabulary: dict[str, int], known: set[int]) -> None:
    """Give words without a space before them what the model knows of them with one.

    Names and words at a line's start or in a call have tokens of their own, of which a model that
    saw none of them knows nothing. Digits and the ``known`` ids are left as they are.

    Mutates:
        ``model``.
    """
    d = model.config["hidden_size"]
    lift = torch.nn.functional.normalize(torch.randn(2, d), dim=1)
    for spaced, source in vocabulary.items():
        bare = spaced.removeprefix(_SPACE)
        target = vocabulary.get(bare)
        if spaced == bare or target is None or not bare.isalpha() or target in known:
            continue
        model.embed[target] = model.embed[source] + 0.3 * model.embed[source].norm() * lift[0]
        model.head[target] = model.head[source] + 0.3 * model.head[source].norm() * lift[1]
        for block in model.blocks:
            if block.ffn.hashed:
                block.ffn.tid2eid[target] = block.ffn.tid2eid[source]


def _projection(rows: int, common: Tensor) -> Tensor:
    """Orthonormal rows [rows, D], at a right angle to the common direction."""
    noise = torch.randn(common.shape[0], rows)
    noise -= common[:, None] * (common @ noise)
    basis: Tensor = torch.linalg.qr(noise).Q
    return basis.T


def _look_back(attn: Attention, common: Tensor) -> None:
    """Head h looks at the token h + 1 places back."""
    config = attn.config
    heads, width, rope = (
        config["num_attention_heads"],
        config["head_dim"],
        config["qk_rope_head_dim"],
    )
    cos, sin = rope_tables(config, False, torch.arange(1, heads + 1))
    # Fast angles tell neighbours apart, slow ones far from near.
    strength = torch.linspace(1.0, 0.5, rope // 2)
    attn.wkv[width - rope :] *= 0.1
    attn.wkv[width - rope :: 2] += 1.2 * strength[:, None] * common
    attn.wq_a[0] = 2.0 * common
    q = attn.wq_b.view(heads, width, -1)
    q[:, : width - rope] *= 0.2
    q[:, width - rope :] *= 0.1
    q[:, width - rope :: 2, 0] = 3.0 * strength * cos
    # Its key at t - h stands h turns behind: the query is turned back by as much.
    q[:, width - rope + 1 :: 2, 0] = -3.0 * strength * sin


def _copy(attn: Attention, common: Tensor) -> None:
    """Copy contents through the channels that are not rotated."""
    config = attn.config
    heads, groups, width = config["num_attention_heads"], config["o_groups"], config["head_dim"]
    rank = config["o_lora_rank"]
    plain = width - config["qk_rope_head_dim"]
    share = _projection(plain, common)
    attn.wkv[:plain] = share
    a = attn.wo_a.view(groups, rank, heads // groups, width)
    a *= 0.2
    a[:, :plain, :, :plain] += torch.eye(plain)[:, None] / (heads // groups)
    b = attn.wo_b.view(-1, groups, rank)
    b *= 0.3
    b[:, :, :plain] += share.T[:, None] / groups
    if attn.ratio:
        for half in attn.compressor.wkv.view(-1, width, common.shape[0]):
            half[:plain] = share
