"""The progress bar of ``LLM.generate`` and ``LLM.chat``, with the speed so far."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import tqdm

from vllm.outputs import RequestOutput

# True: the usual bar; False: none; or what makes one, called as tqdm.tqdm is.
UseTqdm = bool | Callable[..., Any]


class PromptProgress:
    """Counts requests that ended and tokens a second.

    Owns: the bar.

    Args:
        total: Requests.
        use_tqdm: Whether to show a bar, or what makes it.
        clock: Monotonic seconds.
    """

    def __init__(
        self, total: int, use_tqdm: UseTqdm, clock: Callable[[], float] = time.monotonic
    ) -> None:
        make = tqdm.tqdm if isinstance(use_tqdm, bool) else use_tqdm
        self._bar = make(
            total=total, desc="Processed prompts", disable=use_tqdm is False, unit="req"
        )
        self._clock = clock
        self._began = clock()
        self._num_input = 0
        self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count a request that ended; its prompt counts once, whatever ``n``."""
        self._num_input += len(output.prompt_token_ids or ())
        self._num_output += sum(len(answer.token_ids) for answer in output.outputs)
        elapsed = max(self._clock() - self._began, 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)
