"""Compare two files of benchmark lines: ``python -m benchmarks.compare A.jsonl B.jsonl``."""

import argparse
import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each benchmark in a file."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.startswith("{")]
    return {line["benchmark"]: line for line in lines}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested values under dotted names."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, int | float):
            flat[prefix + key] = float(value)
    return flat


def main() -> None:
    """Print each number of A beside that of B, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    args = parser.parse_args()
    before, after = read_lines(args.a), read_lines(args.b)
    for name in sorted(before.keys() & after.keys()):
        print(f"{name}: {before[name]['commit']} -> {after[name]['commit']}")
        left, right = flatten(before[name]["values"]), flatten(after[name]["values"])
        for key in sorted(left.keys() & right.keys()):
            ratio = right[key] / left[key] if left[key] else float("nan")
            print(f"  {key:40} {left[key]:12.3f} {right[key]:12.3f}  x{ratio:.3f}")


if __name__ == "__main__":
    main()
