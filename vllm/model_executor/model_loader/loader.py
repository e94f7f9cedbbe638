"""Fills a model's weights: from a checkpoint's files, or with random numbers."""

from __future__ import annotations  # tqdm is generic for the type checker only

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from vllm.exceptions import CheckpointError, ConfigError
from vllm.logger import init_logger
from vllm.model_executor.model_loader.checkpoint_files import (
    find_weight_files,
    name_some,
    read_headers,
)
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights
from vllm.model_executor.model_loader.gguf_weights import read_gguf_tensors
from vllm.model_executor.model_loader.load_plan import Copy, LoadPlan, part_bytes, plan_load
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import Shard, ShardFinder, find_whole
from vllm.model_executor.model_loader.weight_names import TensorPart
from vllm.utils.gguf_file import is_gguf

logger = init_logger(__name__)

_FILE_FORMATS = ("auto", "safetensors")
# Files read at a time: two hide each other's waits for the disk; more gain nothing measurable.
_MAX_PARALLEL_FILES = 2


class HasWeightSlots(Protocol):
    """A model that says where each of its tensors belongs."""

    def weight_slots(self) -> dict[str, Tensor]:
        """Return the destination of every tensor by its published name."""

    def map_weight(self, name: str, values: Tensor) -> None:
        """Take a tensor whose slot is on the meta device, as it lies in its file."""

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """Return which slots a stored tensor of some name and shape fills."""

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent from a checkpoint."""

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of a checkpoint's tensors that have no slot on purpose."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        num_tensors: Published tensors filled.
        num_bytes: Bytes read from files.
        num_files: Files read; 0 with dummy weights.
        mtp_present: Whether the multi-token-prediction block has weights.
        ignored: Published names left out on purpose.
        duration_s: Wall time.
    """

    num_tensors: int
    num_bytes: int
    num_files: int
    mtp_present: bool
    ignored: tuple[str, ...]
    duration_s: float


def load_model_weights(
    model: HasWeightSlots,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    *,
    use_tqdm: bool = True,
    stored: Sequence[StoredTensor] | None = None,
    find_shard: ShardFinder = find_whole,
    filled: Sequence[Tensor] = (),
) -> LoadReport:
    """Fill every weight slot of ``model``.

    Args:
        model: Its slots are written in place, each in its own dtype and on its own device. A slot
            on the meta device is not: the model is handed the tensor as it lies in the file.
        path: The checkpoint folder; not looked at for "dummy".
        load_format: "auto" or "safetensors" read files, "dummy" draws random weights.
        seed: Of the dummy weights.
        use_tqdm: Whether a terminal gets a progress bar.
        stored: What ``read_stored_tensors`` returned for the path; None: it is asked here.
        find_shard: Tells which part of a tensor the model holds; only that part is read.
        filled: Memory of slots that need no values from files.

    Raises:
        CheckpointError: A file or a tensor is missing, broken, unexpected or of the wrong shape.
        UnsupportedFeatureError: The checkpoint quantises what the model keeps plain.
        ConfigError: The format is unknown.
    """
    start_s = time.perf_counter()
    slots = model.weight_slots()
    if load_format == "dummy":
        drawn = {name: _make_real(name, slot, model) for name, slot in slots.items()}
        fill_with_dummy_weights(drawn, seed, find_shard)
        logger.warning("The weights are random (--load-format dummy): the answers mean nothing")
        mtp_present = any(name.startswith("mtp.") for name in slots)
        return LoadReport(len(slots), 0, 0, mtp_present, (), time.perf_counter() - start_s)
    if load_format not in _FILE_FORMATS:
        raise ConfigError(
            f"load_format={load_format!r} is unknown: use one of {', '.join(_FILE_FORMATS)}, dummy."
        )
    if stored is None:
        stored = read_stored_tensors(path)
    plan = plan_load(
        stored,
        slots,
        str(path),
        optional_prefixes=model.optional_weight_prefixes,
        ignored_prefixes=model.ignored_weight_prefixes,
        find_parts=model.tensor_parts,
        find_shard=find_shard,
    )
    _log_plan(plan, may_have_mtp=bool(model.optional_weight_prefixes))
    done = {tensor.untyped_storage().data_ptr() for tensor in filled}
    copies = [
        copy
        for copy in plan.copies
        if not (slot := slots[copy.part.name]).is_meta
        # Asked only then: a tensor that wraps another has no address of its own.
        and not (done and slot.untyped_storage().data_ptr() in done)
    ]
    for copy in plan.copies:
        if slots[copy.part.name].is_meta:
            _map(copy.stored, copy.part.name, model)
    num_bytes = _copy_all(copies, slots, use_tqdm)
    report = LoadReport(
        num_tensors=len(plan.copies),
        num_bytes=num_bytes,
        num_files=len({tensor.file for tensor in stored}),
        mtp_present=plan.mtp_present,
        ignored=plan.ignored,
        duration_s=time.perf_counter() - start_s,
    )
    _log_report(report, path)
    return report


def read_stored_tensors(path: str | Path, drafts: str | Path | None = None) -> list[StoredTensor]:
    """Return what the headers of a checkpoint folder's weight files, or of a GGUF file, say.

    Args:
        path: The folder, or the file.
        drafts: The GGUF file of a block that drafts, if it has one of its own.

    Raises:
        CheckpointError: A file is missing or broken.
        UnsupportedFeatureError: A GGUF file holds a type that is not served.
    """
    if is_gguf(path):
        return read_gguf_tensors(path, drafts)
    return read_headers(find_weight_files(Path(path)))


def _make_real(name: str, slot: Tensor, model: HasWeightSlots) -> Tensor:
    """Return a slot that holds values; one on the meta device is given memory."""
    if not slot.is_meta:
        return slot
    values = torch.empty(slot.shape, dtype=slot.dtype)
    model.map_weight(name, values)
    return values


def _map(stored: StoredTensor, name: str, model: HasWeightSlots) -> None:
    """Let the model read a tensor from its file, for as long as it lives."""
    try:
        values = MappedFile(stored.file).read_rows_at_random(stored)
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be mapped: {error}.") from error
    model.map_weight(name, values)
    logger.info(
        "%s (%.1f MB) stays in its file: memory holds the rows that occur",
        name,
        values.nbytes / 1e6,
    )


def _log_report(report: LoadReport, path: str | Path) -> None:
    logger.info(
        "Loaded %d tensors (%.1f MB) from %d file(s) of %s in %.2f s",
        report.num_tensors,
        report.num_bytes / 1e6,
        report.num_files,
        path,
        report.duration_s,
    )


def _log_plan(plan: LoadPlan, *, may_have_mtp: bool) -> None:
    if plan.ignored:
        logger.warning(
            "Ignoring %d tensors (%s): %s",
            len(plan.ignored),
            name_some(plan.ignored),
            plan.ignored_reason,
        )
    elif may_have_mtp and not plan.mtp_present:
        logger.info("The checkpoint has no mtp.* tensors: multi-token prediction is not available")


def _copy_all(copies: Iterable[Copy], slots: Mapping[str, Tensor], use_tqdm: bool) -> int:
    """Copy part by part, each file once and in its own order; return the bytes read."""
    in_file_order = sorted(copies, key=lambda copy: (copy.stored.file, copy.stored.offset))
    num_bytes = sum(part_bytes(copy) for copy in in_file_order)
    by_file = [
        (file, list(in_file))
        for file, in_file in groupby(in_file_order, key=lambda copy: copy.stored.file)
    ]
    bar: tqdm[NoReturn] = tqdm(
        total=num_bytes,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        # None: tqdm draws nothing where stderr is no terminal.
        disable=None if use_tqdm else True,
    )
    with bar, ThreadPoolExecutor(_MAX_PARALLEL_FILES) as pool:
        pending = [pool.submit(_copy_file, *entry, slots, bar) for entry in by_file]
        try:
            for future in pending:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return num_bytes


@torch.no_grad()
def _copy_file(
    file: Path, copies: Iterable[Copy], slots: Mapping[str, Tensor], bar: tqdm[NoReturn]
) -> None:
    """Copy one file's parts; ``copies`` come in the order of their values."""
    try:
        with MappedFile(file) as mapped:
            for stored, parts in groupby(copies, key=lambda copy: copy.stored):
                tensor = mapped.read(stored)
                for copy in parts:
                    source = take_shard(take_part(tensor, copy.part), copy.shard)
                    _check_table(copy.part.name, source, slots)
                    _copy_values(source, slots[copy.part.name])
                    bar.update(source.nbytes)
                del tensor, source
                mapped.release(stored)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _copy_values(source: Tensor, slot: Tensor) -> None:
    """Fill a slot, converting floats to floats and integers to integers; codes stay as they are."""
    if slot.itemsize == 1:
        slot.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        slot.copy_(source)


def take_part(tensor: Tensor, part: TensorPart) -> Tensor:
    """Return the part of a stored tensor that is one published tensor."""
    if part.expert is not None:
        tensor = tensor[part.expert]
    return tensor if part.rows is None else tensor[part.rows[0] : part.rows[1]]


def take_shard(tensor: Tensor, shard: Shard | None) -> Tensor:
    """Return a rank's part of a published tensor: a view, which touches no other bytes."""
    if shard is None:
        return tensor
    return tensor.narrow(shard.axis, *shard.find_range(tensor.shape[shard.axis]))


def _check_table(name: str, table: Tensor, slots: Mapping[str, Tensor]) -> None:
    """Refuse a hash-routing table that points beyond the experts: it would read foreign memory."""
    if not name.endswith(".gate.tid2eid") or table.numel() == 0:
        return
    num_experts = slots[name.removesuffix("tid2eid") + "weight"].shape[0]
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= num_experts:
        raise CheckpointError(
            f"{name} holds expert ids {low}..{high}, but the model's are 0..{num_experts - 1}."
        )
