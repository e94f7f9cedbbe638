"""This engine against llama.cpp on the same files: ``python -m benchmarks.race --node DIR``.

Random weights of a shape people run are written as GGUF files, one for each format, and each
engine gets its own process over the same file. Rounds alternate between them; a figure is the best
round's tokens per second of processor time (``--threads 1``: that of one core, whatever else the
machine does). llama.cpp comes compiled with the npm package node-llama-cpp; DIR is a folder in
which ``npm install --ignore-scripts node-llama-cpp`` was run. It is run, never read.

What was measured is kept in ``--results FILE``: a run that is stopped goes on where it was, and the
files of weights stay in ``--files DIR`` where it is named. ``--only-write`` ends when they are
written. At the end a table is printed, which ``python -m benchmarks.figures record`` keeps.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.model_executor.model_loader.gguf_files import (
    PARTS,
    random_blocks,
    write_keys,
    write_tokenizer,
)
from tests.tokenizers.family_tokenizers import byte_level
from vllm import LLM, SamplingParams

Type = gguf.GGMLQuantizationType
HERE = Path(__file__).resolve().parent
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128),
}
# Of the matrices, and of the output head.
FORMATS = {
    "BF16": (Type.BF16, Type.BF16),
    "Q8_0": (Type.Q8_0, Type.Q8_0),
    "Q4_0": (Type.Q4_0, Type.Q6_K),
    "Q4_K": (Type.Q4_K, Type.Q6_K),
}
SHORT_PROMPT = 16
_CACHE_BYTES = 1 << 30
SEED = 5


@dataclass(frozen=True, slots=True)
class Engine:
    """One of those that race: how its process is started."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed: a prompt's prefill, or so many tokens for each of some requests."""

    kind: str
    prompt: int
    together: int
    count: int

    @property
    def name(self) -> str:
        """Of its column."""
        if self.kind == "prefill":
            return f"prefill of {self.prompt}"
        return f"decode, {self.together} at a time"

    @property
    def tokens(self) -> int:
        """How many were computed in its time."""
        return self.prompt if self.kind == "prefill" else self.together * self.count

    def to_message(self, vocab: int) -> dict[str, Any]:
        """What an engine's process is told."""
        rng = random.Random(SEED)
        tokens = [rng.randrange(300, vocab) for _ in range(self.prompt)]
        return {
            "kind": self.kind,
            "tokens": tokens,
            "together": self.together,
            "count": self.count,
        }


def describe(shape: str, layers: int, vocab: int) -> dict[str, Any]:
    """Returns the config of a shape, perhaps of fewer layers."""
    hidden, inner, own_layers, heads, kv_heads, head_dim = SHAPES[shape]
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers or own_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
    }


def _sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the matrices of a layer: name, rows and columns."""
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    yield "self_attn.q_proj", queries, hidden
    yield "self_attn.k_proj", keys, hidden
    yield "self_attn.v_proj", keys, hidden
    yield "self_attn.o_proj", hidden, queries
    yield "mlp.gate_proj", inner, hidden
    yield "mlp.up_proj", inner, hidden
    yield "mlp.down_proj", hidden, inner


def _draw(kind: Any, rows: int, columns: int, seed: int) -> np.ndarray:
    size = columns**-0.5
    if kind == Type.BF16:
        values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
        return gguf.quants.quantize(values * size, kind)
    return random_blocks(kind, rows, columns, seed, size)


def write_model(raw: Mapping[str, Any], form: str, path: Path) -> None:
    """Writes random weights of a shape; the output head is the embedding."""
    kind, head_kind = FORMATS[form]
    writer = gguf.GGUFWriter(path, "qwen3")
    write_keys(writer, "qwen3", dict(raw))
    write_tokenizer(writer, byte_level(), raw["vocab_size"])
    embedding = _draw(head_kind, raw["vocab_size"], raw["hidden_size"], 1)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=head_kind)
    writer.add_tensor("output_norm.weight", np.ones(raw["hidden_size"], np.float32))
    for layer in range(raw["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            ones = np.ones(raw["hidden_size"], np.float32)
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for norm in ("attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(raw["head_dim"], np.float32))
        for i, (name, rows, columns) in enumerate(_sizes(raw)):
            matrix = _draw(kind, rows, columns, 100 * layer + i)
            writer.add_tensor(f"blk.{layer}.{PARTS[name]}.weight", matrix, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find_model(form: str, args: argparse.Namespace, scratch: Path) -> Path:
    """Returns a format's file of weights, written unless it is kept from an earlier run."""
    folder = args.files or scratch
    path: Path = folder / f"{args.shape}-{args.layers}-{args.vocab}-{form}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        write_model(describe(args.shape, args.layers, args.vocab), form, fresh)
        fresh.replace(path)
    return path


def serve(path: str, max_model_len: int) -> None:
    """This engine's process: answers tasks, a line each, until its input ends."""
    dtype = "bfloat16" if "BF16" in Path(path).name else "float32"
    llm = LLM(
        model=path,
        dtype=dtype,
        enable_prefix_caching=False,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        kv_cache_memory_bytes=_CACHE_BYTES,
        disable_log_stats=True,
    )

    def spend(task: Mapping[str, Any], num_tokens: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": task["tokens"]}] * task["together"]
        used, start = time.process_time(), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - used, time.perf_counter() - start

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if task["kind"] == "prefill":
            cpu, wall = spend(task, 1)
        else:
            first, last = spend(task, 1), spend(task, task["count"] + 1)
            cpu, wall = last[0] - first[0], last[1] - first[1]
        print(json.dumps({"cpu_s": cpu, "wall_s": wall}), flush=True)


class Runner:
    """An engine's process over one file."""

    def __init__(self, engine: Engine, path: Path, threads: int, length: int) -> None:
        names = {"path": path, "threads": threads, "length": length}
        command = [part.format(**names) for part in engine.command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **engine.environment},
        )
        self._read()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def run(self, message: Mapping[str, Any]) -> float:
        """Returns the seconds of processor time that a task took."""
        seconds: float = self.ask(message)["cpu_s"]
        return seconds

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a message."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def list_engines(node: Path | None) -> list[Engine]:
    """Returns those that race: this one in two ways, llama.cpp if its folder is named."""
    own = (sys.executable, "-m", "benchmarks.race", "--serve", "{path}", "--prompts", "{length}")
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    engines = [Engine("ours", own, quiet)]
    engines.append(Engine("ours, int8 inputs", own, {**quiet, "VLLM_CPU_INT4_W4A8": "1"}))
    if node is not None:
        engines.append(llama_cpp(node))
    return engines


def llama_cpp(node: Path) -> Engine:
    """Returns llama.cpp of a folder with node-llama-cpp."""
    script = str(HERE / "race_llama_cpp.mjs")
    command = ("node", script, str(node.resolve()), "{path}", "{threads}")
    return Engine("llama.cpp", command, {})


def race(
    form: str,
    engines: Sequence[Engine],
    tasks: Sequence[Task],
    args: argparse.Namespace,
    kept: dict[str, float],
) -> None:
    """Measures what is not kept yet of one format."""
    missing = [
        (task, engine)
        for task in tasks
        for engine in engines
        if f"{form}/{task.name}/{engine.name}" not in kept
    ]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = find_model(form, args, Path(folder))
        length = max(task.prompt + task.count for task in tasks) + 8
        runners = {e.name: Runner(e, path, args.threads, length) for e in engines}
        for task in tasks:
            message = task.to_message(args.vocab)
            own = [engine.name for other, engine in missing if other == task]
            spent: dict[str, list[float]] = {name: [] for name in own}
            for _ in range(args.repeats):
                for name in own:
                    spent[name].append(runners[name].run(message))
            for name, seconds in spent.items():
                kept[f"{form}/{task.name}/{name}"] = task.tokens / min(seconds)
            args.results.write_text(json.dumps(kept, indent=1))
        for runner in runners.values():
            runner.close()


def main() -> None:
    """Prints one table: formats and engines by tasks, and the ratio to llama.cpp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--node", type=Path)
    parser.add_argument("--results", type=Path, default=Path("/tmp/race.json"))
    parser.add_argument("--files", type=Path)
    parser.add_argument("--only-write", action="store_true")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the shape")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 8192])
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, max(args.prompts))
        return
    if args.only_write:
        for form in args.formats:
            find_model(form, args, args.files)
        return
    tasks = [Task("decode", SHORT_PROMPT, together, args.count) for together in args.together]
    tasks += [Task("prefill", prompt, 1, 1) for prompt in args.prompts]
    engines = list_engines(args.node)
    kept = json.loads(args.results.read_text()) if args.results.exists() else {}
    for form in args.formats:
        race(form, engines, tasks, args, kept)
    print("| format | engine | " + " | ".join(task.name for task in tasks) + " |")
    print("| --- | --- |" + " --: |" * len(tasks))
    for form in args.formats:
        for engine in engines:
            cells = []
            for task in tasks:
                own = kept[f"{form}/{task.name}/{engine.name}"]
                other = kept.get(f"{form}/{task.name}/llama.cpp")
                is_other = other is None or engine.name == "llama.cpp"
                cells.append(f"{own:.1f}" + ("" if is_other else f" ({own / other:.2f}x)"))
            print(f"| {form} | {engine.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
