"""Runs one step: caches, flat batch, model, sampler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from vllm.model_executor.towers.plans import BothWays
from vllm.utils.uploads import upload
from vllm.v1.attention.metadata import RequestSlice
from vllm.v1.attention.step_model import SettlesDrafts
from vllm.v1.attention.step_pictures import StepPictures
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    DraftTokenIds,
    FinishedStep,
    KVConnectorOutput,
    ModelRunnerOutput,
    PendingStep,
)
from vllm.v1.sample.edits import ForbidTokens
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import DeviceSample, DrawTokens, SamplerOutput, sample_on_device
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.structured_output.masks import GrammarMasks
from vllm.v1.worker.connector_steps import ConnectorSteps
from vllm.v1.worker.known_requests import KnownRequests
from vllm.v1.worker.kv_cache_tensors import KVCachePool
from vllm.v1.worker.pictures import PictureRows
from vllm.v1.worker.pooling import gather_pooled
from vllm.v1.worker.prompt_logprobs import gather_prompt_logprobs
from vllm.v1.worker.step_edits import build_step_edits
from vllm.v1.worker.step_in_flight import StepInFlight
from vllm.v1.worker.step_input import StepInput, StepInputBuilder
from vllm.v1.worker.step_output import accept_tokens

# Makes what the model reads a step's block tables from.
MetadataBuilder = Callable[[Sequence[RequestSlice]], Any]


class CausalLM(Protocol):
    """What the runner asks of a model. T flat rows, n residual streams of width D, V tokens."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: Any,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures | None = None,
    ) -> torch.Tensor:
        """Return the residual streams ``[T, n, D]``; reads and writes the caches.

        Rows below their slice's ``wanted_from`` may hold anything.
        """

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any M rows of streams."""

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Return what the output matrix reads of any M rows of streams: ``[M, D]``."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that the runner's buffers are made for.

    Attributes:
        num_groups: KV groups, each with its own block tables.
        max_num_tokens: Tokens of the largest step.
        max_model_len: Tokens of the longest request.
        vocab_size: V.
        seed: Of requests without their own.
        num_previous_tokens: How many tokens before a step's own the model reads the ids of.
        keeps_all: Whether what a step stores is read by others than its own request's later steps:
            a prefix cache, or another engine.
        both_ways: In which layers the rows of one picture see each other both ways.
    """

    num_groups: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    seed: int = 0
    num_previous_tokens: int = 0
    keeps_all: bool = True
    both_ways: BothWays = "nowhere"


class ModelRunner:
    """One worker's steps.

    Owns: the KV cache tensors, the requests' states and the step buffers.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVCachePool,
        build_metadata: MetadataBuilder,
        limits: RunnerLimits,
        connector: ConnectorSteps | None = None,
        proposer: Proposer | None = None,
        draw_tokens: DrawTokens | None = None,
        settle_drafts: SettlesDrafts | None = None,
        forbid_tokens: ForbidTokens | None = None,
        pictures: PictureRows | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._build_metadata = build_metadata
        self._limits = limits
        self._connector = connector
        self._states = KnownRequests(limits.num_groups, limits.seed)
        self._builder = StepInputBuilder(
            limits.max_num_tokens,
            limits.max_model_len,
            reads_all=proposer is not None and proposer.reads_all_rows,
            num_previous=limits.num_previous_tokens,
            keeps_all=limits.keeps_all,
            both_ways=limits.both_ways,
        )
        self._pictures = pictures
        self._sampled: list[RowSampling] = []
        self._sampling_metadata: SamplingMetadata | None = None
        self._proposer = proposer
        self._draw_tokens = draw_tokens
        self._settle_drafts = settle_drafts
        self._forbid_tokens = forbid_tokens
        self._drafts: DraftTokenIds | None = None
        # Of the step begun last: its number, its tokens on the device, and whose they are.
        self._num_begun = 0
        self._last_sampled: torch.Tensor | None = None
        self._carried: dict[str, int] = {}

    @property
    def num_requests(self) -> int:
        """Requests the runner remembers."""
        return len(self._states)

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        The order is that of SchedulerOutput: zeroing, copies, loads, forward pass; a step without
        tokens runs the first three.

        Raises:
            InvariantError: The step asks for rows or tokens that this worker does not have.
        """
        self._drafts = None
        self._states.update(output)
        if self._pictures is not None:
            self._pictures.update(output, self._states.get)
        self._prepare_blocks(output)
        made, tower_s = self._take_made()
        if output.total_num_scheduled_tokens == 0:
            saved = self._save_blocks(output)
            return ModelRunnerOutput(
                [], {}, kv_connector_output=saved, made_pictures=made, tower_s=tower_s
            )
        step = self._builder.build(
            [self._states.get(req_id) for req_id in output.num_scheduled_tokens],
            list(output.num_scheduled_tokens.values()),
            output.scheduled_spec_decode_tokens,
            output.row_bounds,
        )
        streams = self._forward(step)
        drawn = self._sample(step, streams, output.grammar_masks)
        sampled = None
        if drawn is not None:
            sampled = SamplerOutput(drawn.token_ids.cpu().numpy(), drawn.logprobs)
        result = accept_tokens(step, sampled)
        result.made_pictures, result.tower_s = made, tower_s
        if self._settle_drafts is not None and any(step.drafts):
            # Before anybody hears of the tokens: what they complete is published then.
            stand = [max(0, len(tokens) - 1) for tokens in result.sampled_token_ids]
            self._settle_drafts(step.slices, stand)
        result.prompt_logprobs_dict = gather_prompt_logprobs(
            step, streams, self._model.compute_logits, self._limits.vocab_size
        )
        result.pooler_output = gather_pooled(step, streams, self._model)
        if self._proposer is not None:
            # Before the connector saves: the drafter's rows belong to the step's blocks.
            drafts = self._proposer.propose(step, streams, output.drafter_rebuilds)
            self._drafts = DraftTokenIds(result.req_ids, drafts)
        result.kv_connector_output = self._save_blocks(output)
        return result

    @torch.inference_mode()
    def begin_model(self, output: SchedulerOutput) -> PendingStep:
        """Hand one step to the device without waiting for its tokens.

        The next step may begin before this one is waited for, and no other: tokens of the step
        before are taken from where they were sampled. Without drafts; requests whose own tokens
        decide about their next one must have all of them on the host.

        Raises:
            InvariantError: The step asks for rows or tokens that this worker does not have.
        """
        self._states.update(output)
        if self._pictures is not None:
            self._pictures.update(output, self._states.get)
        self._prepare_blocks(output)
        made, tower_s = self._take_made()
        if output.total_num_scheduled_tokens == 0:
            saved = self._save_blocks(output)
            return FinishedStep(
                ModelRunnerOutput(
                    [], {}, kv_connector_output=saved, made_pictures=made, tower_s=tower_s
                )
            )
        step = self._builder.build(
            [self._states.get(req_id) for req_id in output.num_scheduled_tokens],
            list(output.num_scheduled_tokens.values()),
            output.scheduled_spec_decode_tokens,
            output.row_bounds,
            self._carried,
        )
        streams = self._forward(step)
        sampled = self._sample(step, streams, output.grammar_masks)
        prompt_logprobs = gather_prompt_logprobs(
            step, streams, self._model.compute_logits, self._limits.vocab_size
        )
        self._num_begun += 1
        pooled = gather_pooled(step, streams, self._model)
        pending = StepInFlight(
            self._num_begun,
            step,
            sampled,
            prompt_logprobs,
            pooled,
            self._save_blocks(output),
            made,
            tower_s,
        )
        self._last_sampled = None if sampled is None else sampled.token_ids
        rows = np.cumsum([0, *step.sampled_counts]).tolist()
        self._carried = {
            state.req_id: row
            for state, count, row in zip(step.requests, step.sampled_counts, rows, strict=False)
            if count
        }
        return pending

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted for the next one, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand on what rouses the engine core; returns whether it is called when need be."""
        if self._pictures is not None:
            self._pictures.bind_wake(wake)
        return self._connector is None or self._connector.bind_wake(wake)

    def shutdown(self) -> None:
        """Release what the connector holds, and end the tower's thread."""
        if self._pictures is not None:
            self._pictures.close()
        if self._connector is not None:
            self._connector.shutdown()

    def _prepare_blocks(self, output: SchedulerOutput) -> None:
        if output.new_block_ids_to_zero:
            self._pool.zero_blocks(output.new_block_ids_to_zero)
            if self._proposer is not None:
                self._proposer.forget(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            self._pool.copy_blocks(output.kv_cache_block_copies)
        if self._connector is not None:
            self._connector.load(output)

    def _take_made(self) -> tuple[list[tuple[str, bool]] | None, dict[str, float]]:
        """Drain what was made beside the steps, and the seconds that towers ran."""
        if self._pictures is None:
            return None, {}
        return self._pictures.take_made(), self._pictures.take_seconds()

    def _save_blocks(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        return None if self._connector is None else self._connector.save(output)

    def _forward(self, step: StepInput) -> torch.Tensor:
        meta = self._build_metadata(step.slices)
        token_ids = upload(step.token_ids, self._pool.device)
        if len(step.carried_rows):
            assert self._last_sampled is not None, "a token in flight was sampled"
            rows, sources = upload(
                np.stack([step.carried_rows, step.carried_from]), self._pool.device
            )
            token_ids[rows] = self._last_sampled[sources]
        positions = upload(step.positions, self._pool.device)
        pictures = None
        if self._pictures is not None:
            runs = list(zip(step.requests, step.slices, strict=True))
            pictures = self._pictures.build(runs)
        if pictures is None:
            return self._model(token_ids, positions, meta, self._pool.layers)
        return self._model(token_ids, positions, meta, self._pool.layers, pictures)

    def _sample(
        self, step: StepInput, streams: torch.Tensor, masks: GrammarMasks | None
    ) -> DeviceSample | None:
        num_sampled = len(step.sampled_rows)
        if num_sampled == 0:
            return None
        if num_sampled < step.num_tokens:
            streams = streams[upload(step.sampled_rows, self._pool.device)]
        logits = self._model.compute_logits(streams)
        # A sampled token comes one position after the row that predicts it.
        positions = step.positions[step.sampled_rows] + 1
        edits = build_step_edits(
            step, masks, self._limits.vocab_size, logits.device, self._forbid_tokens
        )
        metadata = self._find_sampling_metadata(step)
        return sample_on_device(logits, metadata, positions, edits, self._draw_tokens)

    def _find_sampling_metadata(self, step: StepInput) -> SamplingMetadata:
        """Return the metadata of the sampled rows, the last step's while the batch is the same."""
        rows = [
            state.sampling
            for state, count in zip(step.requests, step.sampled_counts, strict=True)
            for _ in range(count)
        ]
        # List equality compares by identity first: cheap for the same requests.
        if self._sampling_metadata is None or rows != self._sampled:
            self._sampled = rows
            self._sampling_metadata = SamplingMetadata.build(
                rows, self._limits.vocab_size, self._pool.device
            )
        return self._sampling_metadata
