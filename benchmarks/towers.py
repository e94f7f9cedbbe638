"""How many seconds does a tower take for a picture, and how many in transformers?

    python -m benchmarks.towers --family gemma4e [--threads 1] [--rounds 3] [--layers 4]
    python -m benchmarks.towers --family gemma3 --torch

Towers of published sizes with random weights read one picture: by transformers, by our torch path
with ``--torch``, and natively, by floats and by 16-bit products (``VLLM_CPU_TOWER_INT16``), in
turns; the least of the rounds counts. The text model around
them is tiny. One JSON line: seconds on the wall and of all threads, their ratio, and how far apart
the rows are. ``--layers`` runs fewer layers, of which the time is a part.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.result import print_result
from tests.model_executor.towers import checkpoints
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files, read_headers
from vllm.model_executor.models.registry import resolve_model
from vllm.model_executor.towers.kernels import KernelMaker, TorchKernels
from vllm.model_executor.towers.tower import Tower
from vllm.native.towers import find_tower_kernels

_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
}
_GEMMA4_SMALL = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "position_embedding_size": 10_240,
}
_GEMMA4_LARGE = {
    **_SIGLIP,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "position_embedding_size": 10_240,
}

_GEMMA4_12B = {"mm_embed_dim": 3840, "output_proj_dims": 3840, "mm_posemb_size": 1120}


def _qwen(depth: int, width: int, inner: int, num_heads: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": num_heads,
        "num_position_embeddings": 2304,
    }


# Name -> the tiny family that it is made of, its tower's sizes, and a picture's soft tokens.
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "gemma3": ("gemma3", _SIGLIP, (32, 32)),
    "gemma4e": ("gemma4e", _GEMMA4_SMALL, (14, 19)),
    "gemma4": ("gemma4v", _GEMMA4_LARGE, (14, 19)),
    "gemma4-12b": ("gemma4unified", _GEMMA4_12B, (14, 19)),
    "qwen-0.8b": ("qwen35", _qwen(12, 768, 3072, 12), (15, 20)),
    "qwen-4b": ("qwen35", _qwen(24, 1024, 4096, 16), (15, 20)),
    "qwen-9b": ("qwen35", _qwen(27, 1152, 4304, 16), (15, 20)),
}


def make_tower(folder: Path, make_kernels: KernelMaker) -> Tower:
    """Return the tower of a checkpoint."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plan = resolve_model(raw["architectures"]).parse_config(raw).images
    return Tower(
        plan.tower, read_headers(find_weight_files(folder)), torch.float32, 0, make_kernels
    )


def time_once(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, float]:
    """Return what comes out, seconds on the wall and of all threads."""
    wall, own = time.perf_counter(), time.process_time()
    made = run()
    return made, time.perf_counter() - wall, time.process_time() - own


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(SHAPES), required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--torch", action="store_true", help="Our torch path as well.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind, vision, grid = SHAPES[args.family]
    name = "depth" if "depth" in vision else "num_hidden_layers"
    if args.layers and name in vision:
        vision = {**vision, name: args.layers}
    picture = checkpoints.draw_picture(kind, *grid, seed=1)
    if kind == "gemma3":
        picture = checkpoints.draw_picture(kind, 32, 32, seed=1)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reference = checkpoints.write_checkpoint(kind, folder, vision)
        # What transformers chooses where nobody asks for another one.
        reference.set_attn_implementation("sdpa")
        runs: dict[str, Callable[[], torch.Tensor]] = {
            "transformers": partial(checkpoints.reference_rows, kind, reference, picture)
        }
        for what, rounds in (("native", "0"), ("int16", "1")):
            os.environ["VLLM_CPU_TOWER_INT16"] = rounds
            native = find_tower_kernels(args.threads)
            if native is None:
                raise SystemExit("no native kernels for this processor: make native")
            tower = make_tower(folder, native)
            runs[what] = partial(tower.encode, torch.from_numpy(picture))
        if args.torch:
            own = make_tower(folder, TorchKernels)
            runs["torch"] = partial(own.encode, torch.from_numpy(picture))
        least: dict[str, list[float]] = {}
        rows: dict[str, torch.Tensor] = {}
        first: dict[str, float] = {}
        for _ in range(args.rounds + 1):
            for what, run in runs.items():
                rows[what], *seconds = time_once(run)
                if what not in first:
                    first[what] = seconds[0]
                else:
                    before = least.get(what, seconds)
                    least[what] = [min(pair) for pair in zip(before, seconds, strict=True)]
    values: dict[str, Any] = {}
    for what, (wall, own_s) in least.items():
        values |= {f"{what}_s": round(wall, 3), f"{what}_processor_s": round(own_s, 3)}
        values[f"{what}_first_s"] = round(first[what], 3)
    deviation = rows["transformers"].float().std()
    for what in least.keys() - {"transformers"}:
        for number, kind_of_s in enumerate(("wall", "processor")):
            times = least["transformers"][number] / least[what][number]
            values[f"{what}_{kind_of_s}_times"] = round(times, 2)
        apart = (rows[what] - rows["transformers"].float()).std() / deviation
        values[f"{what}_apart"] = float(f"{apart:.2g}")
    config = {"family": args.family, "threads": args.threads, "soft_tokens": len(rows["native"])}
    print_result("towers", {**config, "layers": vision.get(name, 0)}, values)


if __name__ == "__main__":
    main()
