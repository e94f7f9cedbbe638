"""Random weights for ``--load-format dummy``."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm.model_executor.model_loader.shards import ShardFinder, find_whole

_STD = 0.02


@torch.no_grad()
def fill_with_dummy_weights(
    slots: Mapping[str, Tensor], seed: int, find_shard: ShardFinder = find_whole
) -> None:
    """Fill every slot with small values that depend on the seed, its name and its shape only.

    Ranks that hold parts of a tensor draw the whole of it, so that together they hold one model.

    Norm weights are one, routing tables name different experts, all else is normal with deviation
    0.02.

    Mutates: the tensors of ``slots``, on whatever device they are.
    """
    for name, slot in slots.items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
            continue
        shard = find_shard(name)
        if shard is not None:
            whole = slot.new_empty(shard.whole_shape(slot.shape))
            fill_with_dummy_weights({name: whole}, seed)
            slot.copy_(whole.narrow(shard.axis, *shard.find_range(whole.shape[shard.axis])))
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device=slot.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if slot.is_floating_point():
            slot.normal_(0.0, _STD, generator=generator)
            continue
        if slot.dtype == torch.uint8:
            _fill_bytes(name, slot, generator)
            continue
        num_experts = slots[name.removesuffix("tid2eid") + "weight"].shape[0]
        num_rows, top_k = slot.shape
        first = torch.empty(num_rows, 1, dtype=slot.dtype, device=slot.device)
        first.random_(0, num_experts, generator=generator)
        step = torch.arange(top_k, dtype=slot.dtype, device=slot.device)
        slot.copy_((first + step) % num_experts)


def _fill_bytes(name: str, slot: Tensor, generator: torch.Generator) -> None:
    """Fill a slot of a quantised matrix: any codes, and e8m0 scales of about the deviation."""
    if name.endswith("_scales"):
        slot.fill_(127 - 7)
    else:
        slot.random_(0, 256, generator=generator)
