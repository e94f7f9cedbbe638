"""DeepSeek-V4.1 for generation on a CPU: text alone, without its drafter."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v4.latent_model import LatentModel
from vllm.model_executor.models.deepseek_v4.step import Step
from vllm.model_executor.models.deepseek_v41.block import DeepseekV41Block
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.engram import Engram
from vllm.model_executor.models.deepseek_v41.lazy_rows import LazyRows
from vllm.model_executor.models.deepseek_v41.ngram_plan import NgramPlan
from vllm.model_executor.models.deepseek_v41.ngram_rows import NgramRows
from vllm.model_executor.models.deepseek_v41.ngram_table import NgramTable, PendingRows
from vllm.model_executor.models.deepseek_v41.token_folding import fold_tokens
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.attention.step_tables import PreviousTokens, StepMetadata

# So many reads of a table's file wait for the disk at a time.
_NUM_READERS = 16
_SCALE_GROUP = 32


class DeepseekV41ForCausalLM(LatentModel[DeepseekV41Config]):
    """The main model.

    Owns: the threads that read the tables.
    """

    def _build(self, parts: PartsOf[DeepseekV41Config]) -> None:
        config = parts.config
        if parts.make.device.type != "cpu":
            raise UnsupportedFeatureError(
                f"DeepSeek-V4.1 is served on a CPU, not on {parts.make.device}: use the CPU "
                "platform, or serve DeepSeek-V4."
            )
        self._build_ends(parts)
        self.layers = nn.ModuleList(
            DeepseekV41Block(index, parts) for index in range(len(config.layers))
        )
        self._collapse = parts.ops("hc_collapse")
        self.engrams = nn.ModuleDict()
        self.tables: dict[int, NgramTable] = {}
        self._ngram_rows: NgramRows | None = None
        if config.ngrams is not None:
            self._build_tables(config.ngrams, parts)

    def _build_tables(self, plan: NgramPlan, parts: PartsOf[DeepseekV41Config]) -> None:
        self._readers = readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="engram")
        quantization = parts.make.quantization
        for index, layer in enumerate(plan.layer_ids):
            prefix = f"layers.{layer}.engram"
            self.engrams[str(layer)] = Engram(prefix, parts)
            is_coded = quantization is not None and quantization.has_part(f"{prefix}.embed.scale")
            self.tables[layer] = NgramTable(
                f"{prefix}.embed",
                plan.count_rows(index),
                plan.row_width,
                plan.row_width // _SCALE_GROUP if is_coded else 0,
                parts.make.dtype,
                readers,
            )

    @property
    @override
    def num_previous_tokens(self) -> int:
        ngrams = self.config.ngrams
        return 0 if ngrams is None else ngrams.longest - 1

    def bind_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Takes the tokenizer, by whose texts ids are folded.

        Raises:
            CheckpointError: It is not the one that the weights were trained with.
        """
        plan, vocab_size = self.config.ngrams, self.config.vocab_size
        if plan is None:
            return
        if tokenizer is None:
            self.bind_folding(np.arange(vocab_size, dtype=np.int64) % plan.num_folded)
        else:
            self.bind_folding(fold_tokens(tokenizer, vocab_size, plan.num_folded))

    def bind_folding(self, folded: np.ndarray) -> None:
        """Takes the folded id of every token id, int64 [V]."""
        assert self.config.ngrams is not None, "the model has tables"
        self._ngram_rows = NgramRows(self.config.ngrams, folded, self.config.image_token_id)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Returns the collapsed streams [T, D] after the last layer, before the last norm.

        Rows that nobody reads are zeros where they were left out; see ``lazy_rows``.
        """
        embedded: torch.Tensor = self.embed(token_ids)
        if not meta.num_tokens:
            return embedded
        # Which rows are read follows from the ids alone: the disk is asked before layers run.
        pending = self.begin_reads(token_ids, meta.previous)
        images = None if self._ngram_rows is None else self._ngram_rows.find_images(token_ids)
        step: Step = self.frequencies(token_ids, positions, meta, kv_caches)
        num_streams = self.config.hc_mult
        streams = embedded.unsqueeze(1).expand(-1, num_streams, -1)
        weights = torch.zeros(len(token_ids), num_streams, dtype=torch.float32)
        weights[:, 0] = 1.0
        lazy = LazyRows(meta, len(self.layers), self.config.sliding_window)
        whole, cut = step, self.config.cut
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DeepseekV41Block)
            if index in pending:
                rows = self.tables[index].finish(pending[index]).view(meta.num_tokens, -1)
                own_images = images
                if step.kept is not None:
                    rows = rows[step.kept]
                    own_images = None if images is None else images[step.kept]
                if len(streams):
                    streams = self.engrams[str(index)](streams, rows, own_images)
            if 0 <= cut <= index and any(dropped := lazy.count_dropped(index)):
                if index == cut:
                    layer.store_entries(streams, weights, step)
                step, streams, weights = _narrow(
                    step, whole.narrow(lazy.find_rows(dropped), dropped), streams, weights
                )
            if len(streams):
                streams, weights = layer(streams, weights, step)
            else:
                layer.blank_window(whole)
        collapsed: torch.Tensor = self._collapse(streams, weights)
        return step.spread(collapsed)

    def begin_reads(
        self, token_ids: torch.Tensor, previous: PreviousTokens | None
    ) -> dict[int, PendingRows]:
        """Asks for the rows of a step's n-grams; returns by layer what its table has to finish."""
        if not self.tables:
            return {}
        assert self._ngram_rows is not None, "bind_tokenizer comes first"
        assert previous is not None, "the runner asks how many tokens are read"
        found = self._ngram_rows.find(token_ids, previous)
        return {
            layer: table.begin(rows)
            for (layer, table), rows in zip(self.tables.items(), found, strict=True)
        }

    def finish_reads(
        self, pending: Mapping[int, PendingRows], num_tokens: int
    ) -> list[Future[torch.Tensor]]:
        """Returns what will be the rows of each table, fp32 [T, columns], in order.

        Those that wait for the disk are made ready by other threads, so that layers may begin.
        """
        made: list[Future[torch.Tensor]] = []
        for layer, own in pending.items():
            finish = partial(self._finish, layer, own, num_tokens)
            if own.reads:
                made.append(self._readers.submit(finish))
            else:
                made.append(Future())
                made[-1].set_result(finish())
        return made

    def _finish(self, layer: int, pending: PendingRows, num_tokens: int) -> torch.Tensor:
        return self.tables[layer].finish(pending).view(num_tokens, -1)

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps collapsed streams [M, D] of any chosen rows to fp32 logits [M, V]."""
        return self._map_to_logits(streams)

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps collapsed streams [M, D] to what the output matrix reads [M, D]."""
        return self._norm_collapsed(streams)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination view; tables are on no device."""
        slots = self._end_slots()
        for layer in self.layers:
            assert isinstance(layer, DeepseekV41Block)
            slots.update(layer.weight_slots())
        for index, table in self.tables.items():
            engram = self.engrams[str(index)]
            assert isinstance(engram, Engram)
            slots |= {**table.weight_slots(), **engram.weight_slots()}
        return slots

    def map_weight(self, name: str, values: torch.Tensor) -> None:
        """Takes a table, or its scales, as they lie in their file."""
        taken = any(table.take(name, values) for table in self.tables.values())
        assert taken, f"{name} has a slot of its own"

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent."""
        return ()

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of checkpoint tensors that have no slot on purpose: the drafter, and images."""
        biases = (f"layers.{index}.ffn.gate.bias_vl" for index in range(len(self.layers)))
        return ("mtp.", "vision.", "aligner.", "image_", *biases, *self._ignored_head)


def _narrow(
    before: Step, step: Step, streams: torch.Tensor, weights: torch.Tensor
) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """Returns a step of fewer rows, and what the layers before gave of these."""
    assert step.kept is not None
    places = step.kept
    if before.kept is not None:
        # Both ascend: where each row stands among those that there were.
        places = torch.searchsorted(before.kept, step.kept)
    return step, streams[places], weights[places]
