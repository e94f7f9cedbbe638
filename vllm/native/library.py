"""Calling ``libvllm_native.so`` on tensors, with checked results."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from vllm.exceptions import EngineError, InvariantError
from vllm.native.structs import (
    DecoderDrafter,
    DecoderModel,
    DeltaScan,
    Draws,
    Matrix,
    Step,
    TowerLayer,
    TowerMatrix,
    TowerShape,
    V4Model,
)
from vllm.native.tensors import address_of

_NO_MEMORY = 2
# In place of an address, which it is none of: as in csrc/deepseek_v41.cpp.
_NO_ROWS = 1


class NativeContext:
    """The library's threads and scratch memory.

    Args:
        library: A loaded library.
        num_threads: Threads that compute, the caller's among them.
        build: "amx", "vbmi", "vnni", "avx512", "avx2" or "portable"; None: the best here; or
            "amx-int8", which is never chosen by itself.

    Raises:
        EngineError: The build does not run on this processor.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int, build: str | None = None) -> None:
        self._library = library
        self._handle = library.vn_create(num_threads, build.encode() if build else None)
        if not self._handle:
            raise EngineError(
                f"the native kernels' build {build or 'portable'!r} does not run on this processor "
                "or its memory is short; VLLM_NATIVE=0 serves without them"
            )

    def __del__(self) -> None:
        """Ends the threads."""
        if handle := getattr(self, "_handle", None):
            self._library.vn_destroy(handle)

    @property
    def vector_build(self) -> str:
        """Which vector build is in use."""
        name: bytes = self._library.vn_vector_build(self._handle)
        return name.decode()

    def v4_forward(self, model: V4Model, step: Step, streams: torch.Tensor) -> None:
        """Runs all layers; streams: fp32 [T, n, D], written.

        Raises:
            InvariantError: The step's tables lack a row that is read, or a tensor is misshapen.
        """
        self._call(self._library.vn_v4_forward, model, step, _address(streams, *_rows(model, step)))

    def v4_forward_mtp(
        self, model: V4Model, step: Step, streams: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Runs the MTP block over streams [T, n, D] into output; raises as ``v4_forward``."""
        shape = _rows(model, step)
        self._call(
            self._library.vn_v4_forward_mtp,
            model,
            step,
            _address(streams, *shape),
            _address(output, *shape),
        )

    def v4_logits(
        self, model: V4Model, streams: torch.Tensor, logits: torch.Tensor, *, is_mtp: bool
    ) -> None:
        """Maps streams [M, n, D] to logits [M, V], written."""
        self._call(
            self._library.vn_v4_logits,
            model,
            _address(streams, len(streams), model.num_streams, model.hidden_size),
            len(streams),
            is_mtp,
            _address(logits, len(streams), model.vocab_size),
        )

    def v41_forward(
        self,
        model: V4Model,
        step: Step,
        tables: Sequence[Future[torch.Tensor]],
        stream: torch.Tensor,
    ) -> None:
        """Runs all layers of a DeepSeek-V4.1; stream: fp32 [T, D], written; raises as the above.

        Args:
            model: The model.
            step: The step.
            tables: Of each table the rows fp32 [T, columns] of the tokens' n-grams; a layer waits
                for those that it needs.
            stream: Takes the collapsed streams.
        """
        rows = (ctypes.c_void_p * len(tables))()
        for index, table in enumerate(tables):
            table.add_done_callback(partial(_place_rows, rows, index))
        address = _address(stream, step.num_tokens, model.hidden_size)
        try:
            self._call(self._library.vn_v41_forward, model, step, rows, address)
        finally:
            # Before the next step asks for others; what went wrong there is the cause.
            for table in tables:
                table.result()

    def v41_logits(self, model: V4Model, stream: torch.Tensor, logits: torch.Tensor) -> None:
        """Maps collapsed rows [M, D] of a DeepSeek-V4.1 to logits [M, V], written."""
        self._call(
            self._library.vn_v41_logits,
            model,
            _address(stream, len(stream), model.hidden_size),
            len(stream),
            _address(logits, len(stream), model.vocab_size),
        )

    def decoder_forward(self, model: DecoderModel, step: Step, stream: torch.Tensor) -> None:
        """Runs all layers of a decoder; stream: fp32 [T, D], written; raises as the above."""
        address = _address(stream, step.num_tokens, model.hidden_size)
        self._call(self._library.vn_decoder_forward, model, step, address)

    def decoder_settle(self, model: DecoderModel, step: Step) -> None:
        """Stores the recurrent states behind accepted drafts; raises as the above."""
        self._call(self._library.vn_decoder_settle, model, step)

    def decoder_logits(
        self, model: DecoderModel, stream: torch.Tensor, logits: torch.Tensor, *, is_normed: bool
    ) -> None:
        """Maps rows [M, D] of a decoder's stream, or behind its norm, to logits [M, V], written."""
        self._call(
            self._library.vn_decoder_logits,
            model,
            _address(stream, len(stream), model.hidden_size),
            len(stream),
            is_normed,
            _address(logits, len(stream), model.vocab_size),
        )

    def decoder_norm(self, model: DecoderModel, stream: torch.Tensor, normed: torch.Tensor) -> None:
        """Maps rows [M, D] of a decoder's stream to what its head reads [M, D], written."""
        shape = len(stream), model.hidden_size
        self._call(
            self._library.vn_decoder_norm,
            model,
            _address(stream, *shape),
            len(stream),
            _address(normed, *shape),
        )

    def decoder_draft(
        self, drafter: DecoderDrafter, step: Step, streams: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Runs a block that drafts over normed streams [T, D] into output; raises as the above."""
        shape = step.num_tokens, drafter.block.hidden_size
        self._call(
            self._library.vn_decoder_draft,
            drafter,
            step,
            _address(streams, *shape),
            _address(output, *shape),
        )

    def sample(self, logits: torch.Tensor, draws: Draws, token_ids: torch.Tensor) -> None:
        """Draws from rows of fp32 logits [R, V], which it overwrites, into token_ids int64 [N].

        Raises:
            InvariantError: A draw's row or parameter is out of range.
        """
        rows, vocab_size = logits.shape
        self._call(
            self._library.vn_sample,
            _address(logits, rows, vocab_size),
            rows,
            vocab_size,
            draws,
            address_of(token_ids, torch.int64, draws.num_draws),
        )

    def forbid(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Sets to -infinity what masks int32 [N, ceil(V / 32)] forbid in rows of logits [R, V].

        Raises:
            InvariantError: ``rows``, int64 [N], are out of range or do not rise.
        """
        num_rows, vocab_size = logits.shape
        num_masks = len(rows)
        self._call(
            self._library.vn_forbid,
            _address(logits, num_rows, vocab_size),
            num_rows,
            vocab_size,
            address_of(rows, torch.int64, num_masks),
            address_of(masks, torch.int32, num_masks, -(-vocab_size // 32)),
            num_masks,
        )

    def gated_delta(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decays: torch.Tensor,
        betas: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Takes a state through tokens; as ``ops.recurrent.gated_delta_scan``, fp32 throughout."""
        (count, num_heads, value_dim), (_, num_key_heads, key_dim) = values.shape, keys.shape
        outputs = torch.empty(values.shape)
        by_channel = decays.dim() == 3
        gates = (count, num_heads)
        scan = DeltaScan(
            _address(queries, *keys.shape),
            _address(keys, *keys.shape),
            _address(values, *values.shape),
            _address(decays, *gates, *([key_dim] if by_channel else [])),
            _address(betas, *gates),
            _address(state, num_heads, key_dim, value_dim),
            _address(outputs, *values.shape),
            count,
            num_key_heads,
            num_heads,
            key_dim,
            value_dim,
            by_channel,
        )
        self._call(self._library.vn_gated_delta, scan)
        return outputs

    def matmul(self, matrix: Matrix, x: torch.Tensor, output: torch.Tensor) -> None:
        """Maps fp32 x [T, in] by a matrix [out, in] to output [T, out]."""
        self._call(
            self._library.vn_matmul,
            matrix,
            _address(x, len(x), matrix.cols),
            len(x),
            _address(output, len(x), matrix.rows),
        )

    def run_tower_layer(
        self,
        tower: TowerShape,
        layer: TowerLayer,
        turns: torch.Tensor | None,
        stream: torch.Tensor,
    ) -> None:
        """Takes rows [N, D] of a picture through a tower's layer; stream is overwritten.

        Args:
            tower: What its layers have in common.
            layer: The layer.
            turns: fp32 [N, 2, d / 2], or None.
            stream: The rows.

        Raises:
            InvariantError: The layer's sizes are not the tower's.
        """
        count = len(stream)
        self._call(
            self._library.vn_tower_layer_run,
            tower,
            layer,
            None if turns is None else _address(turns, count, 2, tower.head_dim // 2),
            count,
            _address(stream, count, tower.width),
        )

    def map_tower_rows(self, matrix: TowerMatrix, x: torch.Tensor, output: torch.Tensor) -> None:
        """Maps fp32 x [N, in] by a tower's matrix to output [N, out], with its bias."""
        self._call(
            self._library.vn_tower_map,
            matrix,
            _address(x, len(x), matrix.cols),
            len(x),
            _address(output, len(x), matrix.rows),
        )

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        status = function(self._handle, *arguments)
        if status:
            message: str = self._library.vn_error(self._handle).decode()
            raise (EngineError if status == _NO_MEMORY else InvariantError)(message)


def _place_rows(rows: "ctypes.Array[ctypes.c_void_p]", index: int, table: Future[Any]) -> None:
    """Tells layers that run where a table's rows lie, or that there are none."""
    failed = table.cancelled() or table.exception() is not None
    rows[index] = _NO_ROWS if failed else table.result().data_ptr()


def _address(tensor: torch.Tensor, *shape: int) -> int:
    return address_of(tensor, torch.float32, *shape)


def _rows(model: V4Model, step: Step) -> tuple[int, int, int]:
    return step.num_tokens, model.num_streams, model.hidden_size
