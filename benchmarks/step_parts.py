"""Where the time of a step goes: ``python -m benchmarks.step_parts --files DIR``.

The process of benchmarks.race that serves this engine runs prompts and decode steps over a file of
random weights while ``perf`` (Linux) samples its processor time, loading left out; every sample
belongs to the part that its function is of. Rates are the products' operations by the time that
they took, in billions a second. ``perf`` needs no privileges for the caller's own processes.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.race import Engine, Runner, Task, own_engines
from benchmarks.race_files import FORMATS, SHAPES, describe, find_model

_LIBRARY = "libvllm_native.so"
# Of the library's functions, the first that is found in a name; all others are norms, turns, gates,
# activations and copies.
_PARTS = {
    "attention": r"dot_tile<0,|mix_tile|mix_rows|attend|weigh",
    "rounding inputs": r"Rounding::|round_row",
    "products": r"dot_|decode_|multiply|widen|tiles",
    "sampling": r"sample|draw|forbid",
}
_OTHER = "norms, turns, gates"
_PYTHON = "Python, torch, system"
COLUMNS = ("products", "attention", "rounding inputs", _OTHER, "sampling", _PYTHON)
_LINE = re.compile(r"^\s*(\d+)\s+(\S+)\s+(.*)$")


def find_part(library: str, function: str) -> str:
    """Returns the part that a function is of."""
    if library != _LIBRARY:
        return _PYTHON
    return next((name for name, known in _PARTS.items() if re.search(known, function)), _OTHER)


def count_products(raw: dict[str, int]) -> float:
    """Returns the operations of a token's products, without those of the output head."""
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"] * raw["head_dim"]
    keys = raw["num_key_value_heads"] * raw["head_dim"]
    layer = hidden * (2 * heads + 2 * keys + 3 * raw["intermediate_size"])
    return 2.0 * layer * raw["num_hidden_layers"]


def read_samples(data: Path) -> Counter[str]:
    """Returns the samples of each part."""
    report = ("perf", "report", "-i", str(data), "--stdio", "--no-children", "-q")
    fields = ("--sort", "dso,sym", "-F", "sample,dso,sym", "--percent-limit", "0")
    text = subprocess.run([*report, *fields], check=True, capture_output=True, text=True).stdout
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _LINE.match(line):
            found[find_part(match[2], match[3])] += int(match[1])
    return found


def sample(runner: Runner, task: Task, vocab: int, repeats: int) -> tuple[Counter[str], float]:
    """Returns the samples of each part, and a run's seconds of processor time at best."""
    message = task.to_message(vocab)
    runner.run(message)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "perf.data")
        record = ("perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-o", str(data))
        perf = subprocess.Popen([*record, "-p", str(runner.pid)])
        spent = min(runner.run(message) for _ in range(repeats))
        perf.send_signal(signal.SIGINT)
        perf.wait()
        return read_samples(data), spent


def list_rows(engine: Engine, form: str, args: argparse.Namespace, scratch: Path) -> list[str]:
    """Returns a table's rows for one format."""
    raw = describe(args.shape, args.layers, args.vocab)
    path = find_model(args.shape, args.layers, args.vocab, form, scratch)
    runner = Runner(engine, path, 1, max(args.prompts) + args.count + 8)
    tasks = [Task("prefill", prompt, 1, 1) for prompt in args.prompts]
    tasks.append(Task("decode", 16, 1, args.count))
    rows = []
    for task in tasks:
        samples, spent = sample(runner, task, raw["vocab_size"], args.repeats)
        shares = {name: count / samples.total() for name, count in samples.items()}
        cells = [f"{shares.get(name, 0):.1%}" for name in COLUMNS]
        rate = task.tokens * count_products(raw) / (spent * shares["products"]) * 1e-9
        rated = f"{rate:.0f}" if task.kind == "prefill" else ""
        per_token = f"{spent / task.tokens * 1e3:.2f}"
        rows.append("| " + " | ".join([form, task.name, per_token, *cells, rated]) + " |")
    runner.close()
    return rows


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the shape")
    parser.add_argument("--vocab", type=int, default=0, help="0: the shape's")
    parser.add_argument(
        "--formats", nargs="+", choices=list(FORMATS), default=["Q4_0", "Q8_0", "BF16"]
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if shutil.which("perf") is None:
        sys.exit("perf is not installed: it is part of the package linux-perf or linux-tools")
    engine = own_engines()[1]
    heads = ["format", "step", "ms a token", *COLUMNS, "products, GF/s"]
    print("| " + " | ".join(heads) + " |")
    print("| --- | --- |" + " --: |" * (len(heads) - 2))
    with tempfile.TemporaryDirectory() as folder:
        for form in args.formats:
            for row in list_rows(engine, form, args, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
