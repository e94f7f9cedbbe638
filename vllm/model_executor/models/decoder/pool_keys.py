"""What an indexer keeps of tokens: their keys, or one key for each pool of consecutive tokens.

    open pool   a token's [ index key | gate + bias of its place ]   kept until its pool is complete
    pool key    sum over its tokens of softmax(gate + bias) * index key, by channel: kept for ever

Of a pool of one token that sum is the token's key: there is no gate then, and nothing is open.
"""

import torch
from torch import nn

from vllm.model_executor.models.decoder.config import IndexerPlan
from vllm.model_executor.models.decoder.kv_cache import pool_keys_name, pool_state_name
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import PageRows


class TokenKeys(nn.Module):
    """Keeps each token's key.

    Letters: T rows, I values of a key.

    Args:
        index: The layer.
        plan: What it keeps.
        parts: What to build from, within the layer's ``self_attn.indexer``.
    """

    def __init__(self, index: int, plan: IndexerPlan, parts: ModelParts) -> None:
        super().__init__()
        self._plan = plan
        self._keys_name = pool_keys_name(index)
        self._write_rows, self._read_rows = parts.ops("write_rows"), parts.ops("read_rows")

    def forward(self, keys: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """Keeps the keys of a step's tokens.

        Args:
            keys: fp32 [T, I].
            x: The layer's input [T, D].
            step: The step.

        Mutates:
            The layer's caches.
        """
        del x
        entries = step.meta.entries[step.meta.group_of[self._keys_name]]
        kept = keys if entries.sources is None else keys[entries.sources]
        target = entries.target
        self._write_rows(step.kv_caches[self._keys_name], target.blocks, target.rows, kept)

    def read(self, source: PageRows, step: Step) -> torch.Tensor:
        """Returns kept keys, fp32 [..., C, I]."""
        cache = step.kv_caches[self._keys_name]
        keys: torch.Tensor = self._read_rows(cache, source.blocks, source.rows, torch.float32)
        return keys

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {}


class PoolKeys(TokenKeys):
    """Keeps a key of each pool that is complete; see ``TokenKeys``."""

    def __init__(self, index: int, plan: IndexerPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        make, ops = parts.make, parts.ops
        self.gate = make.parameter(plan.head_dim, parts.config.hidden_size)
        self.place_bias = make.parameter(plan.pool_size, plan.head_dim, dtype=torch.float32)
        self._state_name = pool_state_name(index)
        self._linear, self._compress = ops("linear"), ops("compress_windows")
        self._round_rows = ops("round_rows")

    def forward(self, keys: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """Keeps rows of open pools, then the keys of those that are complete."""
        meta = step.meta
        state = meta.states[meta.group_of[self._state_name]]
        cache = step.kv_caches[self._state_name]
        rows = torch.cat([keys, self._linear(x, self.gate).float()], -1)
        rows[:, self._plan.head_dim :] += self.place_bias[state.phases]
        # Rounding here too keeps the result independent of where chunks end.
        rows = self._round_rows(cache, rows)
        writes = state.writes
        kept = rows if writes.sources is None else rows[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        if not state.num_completed:
            return
        prior = self._read_rows(cache, state.prior.blocks, state.prior.rows, torch.float32)
        pools = self._compress(torch.cat([prior, rows])[state.windows], None, None)
        target = meta.entries[meta.group_of[self._keys_name]].target
        self._write_rows(step.kv_caches[self._keys_name], target.blocks, target.rows, pools)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {
            f"{prefix}.index_kpool_compress_ape": self.place_bias.data,
            f"{prefix}.index_kpool_compress_gate": self.gate.data,
        }
