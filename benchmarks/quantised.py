"""What a large quantised checkpoint costs to load and to keep, and whether it answers as it should.

    python -m benchmarks.quantised make FOLDER [--experts 208]   # 4.2 GB of random FP4 and FP8
    python -m benchmarks.quantised load FOLDER [--cold]          # time, peak memory, bytes read
    python -m benchmarks.quantised twin FOLDER TWIN_FOLDER       # needs 3.8 times the space

``make`` writes DeepSeek-V4's published spelling with random weights: sharded, FP4 experts, FP8
attention, MTP block. ``twin`` decodes every matrix with numpy into a BF16 checkpoint (which holds
all of them exactly), and compares logits and greedy answers of the two. The twin's matrices, 16 GB
of them, stay in its files and are read as they are used.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.result import print_result
from tests.model_executor.models.harness import PagedHarness
from tools.checkpoints.deepseek_v4_tensors import tensor_specs
from tools.checkpoints.make_deepseek_v4 import CONFIG
from tools.checkpoints.published_spelling import Spelling, write_config, write_shards
from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec
from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.layers.quantization.stored_matrix import (
    StoredExpert,
    StoredExperts,
    StoredMatrix,
)
from vllm.model_executor.model_loader.loader import load_model_weights, read_stored_tensors
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.stored_weights import StoredWeights
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.ops.registry import get_reference_op

ASSETS = Path(__file__).resolve().parents[1] / "vllm" / "assets" / "deepseek-v4"
SHAPE: dict[str, Any] = {
    "vllm_note": "Random weights from benchmarks/quantised.py.",
    "hidden_size": 2048,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "num_attention_heads": 16,
    "head_dim": 256,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 512,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024,
}
SHARD_BYTES = 700_000_000
GROUP = 32


def make(out: Path, num_experts: int, seed: int) -> dict[str, Any]:
    """Write the checkpoint."""
    config = CONFIG | SHAPE | {"n_routed_experts": num_experts}
    started = time.perf_counter()
    num_bytes = write_shards(_random_tensors(config, seed), out, SHARD_BYTES)
    write_config(config | Spelling().config_fields(), out)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(ASSETS / file, out / file)
    return {"num_bytes": num_bytes, "make_s": round(time.perf_counter() - started, 1)}


def _random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    spelling = Spelling()
    for name, spec in tensor_specs(config).items():
        if ".ffn.experts." in name:
            yield from _random_fp4(name, spec.shape, generator)
            continue
        if len(spec.shape) == 2 and spec.dtype == "BF16":
            std = 1.0 if name.startswith("embed") else spec.shape[1] ** -0.5
            values = torch.randn(spec.shape, generator=generator) * std
        else:
            drawn = spec.init(np.random.RandomState(seed), spec.shape)
            values = torch.from_numpy(np.ascontiguousarray(drawn))
            values = values if spec.dtype == "I64" else values.float()
        yield from spelling.spell(name, values).items()


def _random_fp4(
    name: str, shape: Sequence[int], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random codes; their deviation is 2.9, the scales bring it near that of a unit matrix."""
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    middle = 127 - round(np.log2(2.9 * columns**0.5))
    scales = torch.randint(
        middle - 1, middle + 2, (rows, columns // GROUP), generator=generator, dtype=torch.uint8
    )
    yield name, codes.view(torch.int8)
    yield name.removesuffix(".weight") + ".scale", scales.view(torch.float8_e8m0fnu)


def load(folder: Path, *, cold: bool) -> dict[str, Any]:
    """Load the checkpoint as the worker does and say what that took."""
    stored = read_stored_tensors(folder)
    file_bytes = sum(tensor.num_bytes for tensor in stored)
    if cold:
        for file in {tensor.file for tensor in stored}:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, read_before = _status("VmRSS"), _disk_bytes()
    started = time.perf_counter()
    model, report_s = _load_stored(folder)
    total_s = time.perf_counter() - started
    slots = model.weight_slots().values()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in slots}
    return {
        "file_bytes": file_bytes,
        "load_s": round(total_s, 2),
        "copy_s": round(report_s, 2),
        "resident_over_file": round(sum(held.values()) / file_bytes, 4),
        "anonymous_over_file": round((_status("RssAnon")) / file_bytes, 4),
        "peak_rss_over_file": round((_status("VmHWM") - before) / file_bytes, 4),
        "disk_bytes_over_file": round((_disk_bytes() - read_before) / file_bytes, 4),
        "threads": torch.get_num_threads(),
    }


def _load_stored(folder: Path) -> tuple[DeepseekV4ForCausalLM, float]:
    raw = json.loads((folder / "config.json").read_text())
    stored = read_stored_tensors(folder)
    weights = StoredWeights(stored, raw["quantization_config"])
    model = _build(raw, weights)
    report = load_model_weights(model, folder, stored=stored)
    weights.finish_loading()
    return model, report.duration_s


def _build(raw: dict[str, Any], quantization: Any) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM(
        DeepseekV4Config.from_dict(raw),
        ops=get_reference_op,
        dtype=torch.float32,
        device="cpu",
        quantization=quantization,
    )


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class MappedTwin:
    """A ``WeightQuantization`` whose matrices stay in the files of a BF16 checkpoint."""

    def __init__(self, folder: Path) -> None:
        stored = read_stored_tensors(folder)
        self._files = {file: MappedFile(file) for file in {tensor.file for tensor in stored}}
        self.tensors = {t.name: self._files[t.file].read(t) for t in stored}
        self.taken: set[str] = set()

    def _rows(self, name: str) -> PlainRows:
        self.taken.add(f"{name}.weight")
        return PlainRows(self.tensors[f"{name}.weight"])

    def make_matrix(self, spec: MatrixSpec) -> StoredMatrix:
        return StoredMatrix(spec.name, self._rows(spec.name), spec.num_groups, get_reference_op)

    def make_experts(self, spec: ExpertsSpec) -> StoredExperts:
        def expert(name: str) -> StoredExpert:
            return StoredExpert(*(self._rows(f"{name}.{leaf}") for leaf in ("w1", "w3", "w2")))

        prefix = spec.prefix
        routed = [expert(f"{prefix}experts.{index}") for index in range(spec.num_experts)]
        shared = expert(f"{prefix}shared_experts")
        return StoredExperts(prefix, routed, shared, spec.limit, get_reference_op)

    def has_part(self, prefix: str) -> bool:
        return True

    def plain_dtype(self, names: Sequence[str]) -> None:
        return None

    def finish_loading(self) -> None:
        pass


def write_twin(folder: Path, out: Path) -> None:
    """Decode a checkpoint of ``make`` with numpy, in BF16."""

    def decoded() -> Iterator[tuple[str, torch.Tensor]]:
        stored = read_stored_tensors(folder)
        entries = {tensor.name: tensor for tensor in stored}
        files = {file: MappedFile(file) for file in {tensor.file for tensor in stored}}

        def read(name: str) -> torch.Tensor:
            return files[entries[name].file].read(entries[name])

        for name in entries:
            scale_name = name.removesuffix(".weight") + ".scale"
            if name.endswith(".scale"):
                continue
            if scale_name not in entries:
                yield name, read(name).clone()
                continue
            yield name, _decode_by_numpy(read(name), read(scale_name))
            for used in (name, scale_name):
                files[entries[used].file].release(entries[used])

    write_shards(decoded(), out, 4 * SHARD_BYTES)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["expert_dtype"]
    write_config(config, out)


def _decode_by_numpy(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exponents = scale.view(torch.uint8).numpy().astype(np.int32) - 127
    factors = np.ldexp(np.float32(1), exponents)
    if codes.dtype == torch.float8_e4m3fn:
        values = codes.float().numpy()
        spread = np.repeat(np.repeat(factors, 128, 0), 128, 1)
        return torch.from_numpy(values * spread[: values.shape[0], : values.shape[1]]).bfloat16()
    raw = codes.view(torch.uint8).numpy()
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    values = np.empty((raw.shape[0], 2 * raw.shape[1]), np.float32)
    values[:, ::2], values[:, 1::2] = table[raw & 15], table[raw >> 4]
    return torch.from_numpy(values * np.repeat(factors, GROUP, 1)).bfloat16()


def compare(folder: Path, twin_folder: Path, num_prompt: int, num_answer: int) -> dict[str, Any]:
    """Answer a prompt with both, greedily."""
    ours, _ = _load_stored(folder)
    raw = json.loads((twin_folder / "config.json").read_text())
    mapped = MappedTwin(twin_folder)
    twin = _build(raw, mapped)
    with torch.no_grad():
        for name, slot in twin.weight_slots().items():
            if name not in mapped.taken:
                slot.copy_(mapped.tensors[name])
    prompt = torch.randint(
        3, raw["vocab_size"], (num_prompt,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    runs = [_answer(model, prompt, num_answer) for model in (ours, twin)]
    (tokens, logits, own_s), (twin_tokens, twin_logits, twin_s) = runs
    return {
        "prompt_tokens": num_prompt,
        "answer_tokens": num_answer,
        "answers_equal": tokens == twin_tokens,
        "max_logit_difference": float((logits - twin_logits).abs().max()),
        "logit_deviation": round(float(logits.std()), 3),
        "seconds_per_token": round(own_s, 3),
        "twin_seconds_per_token": round(twin_s, 3),
    }


def _answer(
    model: DeepseekV4ForCausalLM, prompt: list[int], num_answer: int
) -> tuple[list[int], torch.Tensor, float]:
    harness = PagedHarness(model)
    sequence = harness.add(list(prompt))
    logits = [harness.step([(sequence, len(prompt))])[0]]
    started = time.perf_counter()
    for _ in range(num_answer):
        sequence.token_ids.append(int(logits[-1][-1].argmax()))
        logits.append(harness.step([(sequence, 1)])[0])
    seconds = (time.perf_counter() - started) / num_answer
    return sequence.token_ids[len(prompt) :], torch.cat(logits), seconds


def main() -> None:
    """Run one command and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("make", "load", "twin"):
        commands.add_parser(command).add_argument("folder", type=Path)
    commands.choices["make"].add_argument("--experts", type=int, default=208)
    commands.choices["make"].add_argument("--seed", type=int, default=0)
    commands.choices["load"].add_argument("--cold", action="store_true", help="not from memory")
    commands.choices["twin"].add_argument("twin_folder", type=Path)
    commands.choices["twin"].add_argument("--prompt", type=int, default=160)
    commands.choices["twin"].add_argument("--answer", type=int, default=16)
    args = parser.parse_args()
    if args.command == "make":
        measured = make(args.folder, args.experts, args.seed)
    elif args.command == "load":
        measured = load(args.folder, cold=args.cold)
    else:
        if not args.twin_folder.exists():
            write_twin(args.folder, args.twin_folder)
        measured = compare(args.folder, args.twin_folder, args.prompt, args.answer)
    print_result(f"quantised {args.command}", {"folder": args.folder.name}, measured)


if __name__ == "__main__":
    main()
