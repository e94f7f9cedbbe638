"""docs/limits.md: its numbers are those of the code, and it names whatever queues."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")
# What holds more than one thing for somebody who comes later, or remembers what was used last.
QUEUES = {"deque", "Queue", "SimpleQueue", "OrderedDict", "lru_cache"}
# Clients, and replays of records: no server runs them.
NOT_SERVED = ("vllm/benchmarks", "vllm/cachelab/twin", "vllm/cachelab/sim")


def rows() -> Iterator[tuple[str, str, str]]:
    """What is limited, its limit, and where."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and "`" in cells[3]:
            yield cells[0], cells[1], cells[3]


def find_module(name: str) -> Path:
    for folder in (ROOT / "vllm", ROOT):
        if (path := folder / name).is_file():
            return path
    raise AssertionError(f"{name} is not there")


def list_constants() -> list[tuple[str, str, str]]:
    """(limit as it is written, module, constant) of each row that names one."""
    found = []
    for _, limit, where in rows():
        name = re.search(r"`([\w/]+\.py)::(\w+)`", where)
        if name is not None:
            found.append((limit, name[1], name[2]))
    return found


@pytest.mark.parametrize(("limit", "module", "constant"), list_constants())
def test_the_number_is_that_of_the_code(limit: str, module: str, constant: str) -> None:
    path = find_module(module).relative_to(ROOT).with_suffix("")
    value = getattr(importlib.import_module(".".join(path.parts)), constant)
    assert re.match(r"`(\d+)`", limit), f"{constant} has a number"
    assert re.match(r"`(\d+)`", limit)[1] == str(value)


def test_every_module_that_is_named_exists() -> None:
    names = [name for *_, where in rows() for name in re.findall(r"`([\w/]+\.py)", where)]
    assert len(names) > 50
    for name in names:
        find_module(name)


def test_every_flag_and_variable_exists() -> None:
    known = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    named = re.findall(r"`(--[a-z-]+|VLLM_\w+)`", PAGE)
    assert len(named) > 8
    assert [name for name in named if f"`{name}`" not in known] == []


def _queues(path: Path) -> set[str]:
    """The queues and caches that a module makes."""
    made = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", None) or getattr(called, "id", None)
        if name is None and isinstance(node, ast.keyword) and node.arg == "default_factory":
            name = getattr(node.value, "id", None)
        if isinstance(called, ast.Subscript):
            name = getattr(called.value, "attr", None) or getattr(called.value, "id", None)
        if isinstance(node, ast.ClassDef):
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            made |= {getattr(base, "id", "") for base in bases} & QUEUES
        if name in QUEUES:
            made.add(name)
    return made


def test_every_queue_is_on_the_page() -> None:
    named = {
        find_module(name) for *_, where in rows() for name in re.findall(r"`([\w/]+\.py)", where)
    }
    missing = {
        str(path.relative_to(ROOT)): made
        for package in ("vllm", "vllm_ascend")
        for path in (ROOT / package).rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(NOT_SERVED)
        if (made := _queues(path)) and path not in named
    }
    assert missing == {}


def test_a_queue_is_seen(tmp_path: Path) -> None:
    for number, text in enumerate(
        (
            "x = deque()",
            "x: queue.Queue[int] = queue.Queue(5)",
            "@lru_cache(5)\ndef f(): ...",
            "class A(deque[int]): ...",
            "x = field(default_factory=OrderedDict)",
            "x = asyncio.Queue[int]()",
        )
    ):
        path = tmp_path / f"m{number}.py"
        path.write_text(text)
        assert _queues(path), text
