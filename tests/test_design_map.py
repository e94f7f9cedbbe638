"""docs/design_map.md: every item has a row, what it names exists, and what is said to run runs."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design_map.md"
COUNTS = {"A": 26, "B": 76, "C": 57, "D": 35, "E": 20, "X": 5}
RUNS = ("serves", "pins", "Ascend", "start", "outside", "figure", "differs", "-")


class Row(NamedTuple):
    """One item."""

    item: str
    runs: str
    where: str
    test: str


def rows() -> list[Row]:
    """The rows of the page."""
    found = []
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[A-EX]\d+", cells[0]):
            found.append(Row(cells[0], cells[2], cells[3].strip("`"), cells[4].strip("`")))
    return found


def find_place(where: str) -> Path:
    """The file of a place; places of the cache are named from v1/core."""
    name = where.partition("::")[0]
    for folder in ("vllm/v1/core", "vllm", ""):
        if (path := ROOT / folder / name).exists():
            return path
    raise AssertionError(f"{where} is not there")


@functools.cache
def qualified_names(path: Path) -> frozenset[str]:
    """The classes, functions and methods of a module."""

    def names(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name
                yield from names(child, f"{prefix}{child.name}.")

    return frozenset(names(ast.parse(path.read_text("utf-8")), ""))


def test_every_item_has_one_row() -> None:
    items = [row.item for row in rows()]
    wanted = {f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)}
    assert set(items) == wanted
    assert len(items) == len(wanted)
    assert {row.runs for row in rows()} <= set(RUNS)


def test_every_place_exists() -> None:
    for row in rows():
        if row.where:
            path, _, name = find_place(row.where), *row.where.partition("::")[1:]
            assert not name or name in qualified_names(path), row
        else:
            assert row.runs == "-", row


def test_every_test_exists() -> None:
    for row in rows():
        name, _, function = row.test.partition("::")
        if row.runs in ("serves", "pins", "Ascend", "outside") and row.item != "A3":
            assert name, row
        if name:
            path = ROOT / "tests" / name
            assert path.exists(), row
            assert not function or function in qualified_names(path), row


def profiled(**variables: str) -> dict[str, set[str]]:
    """What runs at a server's start, and when it serves."""
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.served_functions"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: set(ran) for name, ran in json.loads(done.stdout.splitlines()[-1]).items()}


def runs_in(row: Row, ran: set[str]) -> bool:
    """Whether a row's place ran; of a class or a folder, any part of it."""
    path = str(find_place(row.where).relative_to(ROOT))
    name = row.where.partition("::")[2]
    if not name:
        return any(place.startswith(path) for place in ran)
    return any(place == f"{path}::{name}" or place.startswith(f"{path}::{name}.") for place in ran)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "Ascend"])
def test_what_is_said_to_run_runs(platform: str) -> None:
    ran = profiled(**({"VLLM_ASCEND_REFERENCE": "1"} if platform == "Ascend" else {}))
    serving = ("serves", "pins", "Ascend") if platform == "Ascend" else ("serves", "pins")
    missing = [
        row
        for row in rows()
        if (row.runs in serving and not runs_in(row, ran["serve"] | ran["start"]))
        or (row.runs == "serves" and not runs_in(row, ran["serve"]))
    ]
    assert missing == []


@pytest.mark.slow
def test_a_row_that_does_not_run_is_found() -> None:
    row = Row("D5", "serves", "whole_block/coordinator.py", "")
    assert not runs_in(row, {"vllm/v1/core/block_pool.py::BlockPool.free_blocks"})
    assert runs_in(
        row._replace(where="block_pool.py::BlockPool"),
        {"vllm/v1/core/block_pool.py::BlockPool.free_blocks"},
    )
