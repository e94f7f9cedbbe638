"""A step that was handed to the device and whose tokens nobody has read yet."""

import numpy as np
import torch

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.sample.logprobs import TokenLogprobs
from vllm.v1.sample.sampler import DeviceSample, SamplerOutput
from vllm.v1.worker.step_input import StepInput
from vllm.v1.worker.step_output import find_outputs


class TokenCopy:
    """Tokens on their way to the host.

    Args:
        token_ids: int64 ``[R]`` on any device.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self._host, self._event = token_ids, None
        if token_ids.is_cuda:
            # Never run on a device.
            self._host = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> torch.Tensor:
        """Return the tokens on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.cpu()


class StepInFlight:
    """A ``PendingStep`` whose tokens are on the device.

    Until it is waited for, its requests know that they have one token more, but not which.

    Args:
        number: Of the step.
        step: Its requests.
        sampled: Its tokens; None: it sampled none.
        prompt_logprobs: Of its requests.
        pooled: Vectors of its requests, by place in the batch.
        connector_output: What the connector did.
        made_pictures, tower_s: See ``ModelRunnerOutput``.
    """

    def __init__(
        self,
        number: int,
        step: StepInput,
        sampled: DeviceSample | None,
        prompt_logprobs: dict[str, TokenLogprobs],
        pooled: list[np.ndarray | None] | None,
        connector_output: KVConnectorOutput | None,
        made_pictures: list[tuple[str, bool]] | None = None,
        tower_s: dict[str, float] | None = None,
    ) -> None:
        self._number, self._step, self._sampled = number, step, sampled
        self._prompt_logprobs, self._connector_output = prompt_logprobs, connector_output
        self._pooled = pooled
        self._made_pictures, self._tower_s = made_pictures, tower_s
        self._copy = None if sampled is None else TokenCopy(sampled.token_ids)
        for state, count in zip(step.requests, step.sampled_counts, strict=True):
            if count:
                state.expect_token(number)

    def wait(self) -> ModelRunnerOutput:
        """See ``PendingStep``.

        Mutates: the requests' known tokens.
        """
        sampled, step = None, self._step
        if self._sampled is not None and self._copy is not None:
            sampled = SamplerOutput(self._copy.wait().numpy(), self._sampled.logprobs)
        token_ids = [] if sampled is None else sampled.token_ids.tolist()
        accepted: list[list[int]] = []
        row = 0
        for state, count in zip(step.requests, step.sampled_counts, strict=True):
            accepted.append(token_ids[row : row + count])
            if count:
                state.receive_token(self._number, token_ids[row])
            row += count
        output = find_outputs(step, sampled, accepted)
        output.prompt_logprobs_dict = self._prompt_logprobs
        output.pooler_output = self._pooled
        output.kv_connector_output = self._connector_output
        output.made_pictures, output.tower_s = self._made_pictures, self._tower_s or {}
        return output
