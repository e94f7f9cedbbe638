"""How many planted faults do the tests notice? A mutation run over the cache's own code.

    python tools/mutate.py [--mutants 200] [--seed 0] [--seconds 60] [--map map.json]
        [--tests tests/v1/core tests/ascend/core tests/distributed/kv_transfer/handover]
        [--only vllm/v1/core/prefix]

First it runs the tests once and notes which functions each of them calls (``--map`` keeps that for
the next run). Then it draws faults with a fixed seed: a comparison turned, a bound off by one, a
condition negated, a call left out. Each is planted in a copy of the tree, and the tests that call
the function are run, quickest first, until one fails or ``--seconds`` are over: a fault that hangs
is noticed, too. Prints each survivor as a diff and the share that was killed; exits 1 if a
twentieth or more survived. Only the tests are trusted: the tree this runs in is never written to.

What is not mutated, because no test could or should tell: docstrings and other strings,
annotations, assertions, log messages, and code for type checkers.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("vllm/v1/core", "vllm_ascend/core", "vllm/distributed/kv_transfer/handover")
TESTS = ("tests/v1/core", "tests/ascend/core", "tests/distributed/kv_transfer/handover")
_COPIED = ("vllm", "vllm_ascend", "tests", "benchmarks", "docs", "pyproject.toml")
_PACKAGES = ("vllm", "vllm_ascend", "tests", "benchmarks", "tools")
_LIBRARIES = (
    *("torch", "hypothesis", "hypothesis.stateful", "safetensors.torch", "transformers"),
    *("msgspec", "pydantic", "zmq", "numpy", "fastapi", "httpx"),
)
_MAX_SURVIVORS = 0.05

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}

# Notes which functions a test calls. Runs inside pytest, in the copied tree.
_RECORDER = """
import json, os, sys, time
import pytest

ROOT, TARGETS, OUT = json.loads(os.environ["MUTATE_RECORD"])
_names, _found = {}, {}


def _name(code):
    path = os.path.realpath(code.co_filename)
    relative = os.path.relpath(path, ROOT)
    inside = any(relative.startswith(target + os.sep) for target in TARGETS)
    return f"{relative}:{code.co_firstlineno}" if inside else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    seen, called = set(), set()

    def tracer(frame, event, arg):
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            if code not in _names:
                _names[code] = _name(code)
            if _names[code]:
                called.add(_names[code])

    begin = time.perf_counter()
    sys.settrace(tracer)
    yield
    sys.settrace(None)
    _found[item.nodeid] = [time.perf_counter() - begin, sorted(called)]


def pytest_sessionfinish():
    with open(OUT, "w") as file:
        json.dump(_found, file)
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        path: The file, relative to the tree.
        function: First line of the innermost function around it, decorators included.
        start: Where the replaced text begins, as an offset into the file.
        end: Where it ends.
        text: What stands there instead.
        line: Line of the fault.
    """

    path: str
    function: int
    start: int
    end: int
    text: str
    line: int

    def apply(self, source: str) -> str:
        """Return the file with the fault."""
        return source[: self.start] + self.text + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Finds all faults that can be planted in a file."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._offsets = [0]
        for line in source.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
        self._functions: list[int] = []

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        if not self._functions:
            return
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno, node.end_col_offset)
        self.found.append(Mutant(self._path, self._functions[-1], start, end, text, node.lineno))

    def _offset(self, line: int, column: int) -> int:
        # Columns count bytes of UTF-8.
        begin = self._offsets[line - 1]
        text = self._source[begin : self._offsets[line]].encode()[:column].decode()
        return begin + len(text)

    def _replace(self, node: ast.expr, new: ast.expr) -> None:
        self._add(node, f"({ast.unparse(new)})")

    # ---- what is left alone ------------------------------------------------------------------

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        is_stub = all(
            isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in node.body
        )
        if is_stub:
            return
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self._functions.append(first)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Look into the body and the defaults, not at annotations and decorators."""
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """As of other functions."""
        self._visit_function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value, not at the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they are checks themselves."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone; that an error is raised at all is its condition's matter."""

    # ---- what is mutated ---------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave calls out that are statements of their own, log messages excepted."""
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name.startswith(("logger.", "super().__init__", "_require")):
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Negate conditions."""
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self._add(node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Swap the two values."""
        self._replace(node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Turn the first comparison."""
        turned = _COMPARISONS[type(node.ops[0])]()
        self._replace(node, ast.Compare(node.left, [turned, *node.ops[1:]], node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap and, or."""
        op: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, ast.BoolOp(op, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a negation."""
        if isinstance(node.op, ast.Not):
            self._replace(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Turn arithmetic."""
        turned = _ARITHMETIC.get(type(node.op))
        if turned is not None:
            self._replace(node, ast.BinOp(node.left, turned(), node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Turn arithmetic in place."""
        turned = _ARITHMETIC.get(type(node.op))
        if turned is not None:
            self._add(node, ast.unparse(ast.AugAssign(node.target, turned(), node.value)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Put numbers off by one, and truths upside down."""
        if isinstance(node.value, bool):
            self._replace(node, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, ast.Constant(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""


def find_mutants(root: Path, targets: Sequence[str]) -> list[Mutant]:
    """Return all faults that can be planted below some folders, in the order of the files."""
    found: list[Mutant] = []
    for target in targets:
        top = root / target
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            finder = _Finder(str(path.relative_to(root)), source)
            finder.visit(ast.parse(source))
            found += finder.found
    return found


def copy_tree(to: Path) -> None:
    """Copy what the tests need."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
            shutil.copytree(source, to / name, ignore=ignored)
        else:
            shutil.copy(source, to / name)


def _load_libraries() -> None:
    """Import what nearly every test does and no fault is planted in; children need not again."""
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _pytest(tree: Path, *args: str, timeout: float | None = None, **environment: str) -> int:
    """Run pytest in a tree, in a fork; returns its exit status, or 1 after ``timeout`` seconds.

    A fork has the libraries loaded; it imports the packages from the tree, as this process never
    does.
    """
    command = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:schemathesis", *args]
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of libraries that are loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries may have threads, which rest
        child = os.fork()
    if not child:
        status = 1
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.chdir(tree)
            os.environ.update(environment, PYTHONPATH=str(tree))
            sys.dont_write_bytecode = True
            own = {str(ROOT), str(Path(__file__).parent), ""}
            sys.path[:] = [str(tree), *(p for p in sys.path if p not in own)]
            for name in [n for n in sys.modules if n.partition(".")[0] in _PACKAGES]:
                del sys.modules[name]
            status = int(pytest.main(command))
        finally:
            os._exit(status)
    deadline = None if timeout is None else time.monotonic() + timeout
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if deadline is not None and time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 1
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])


def record_calls(
    tree: Path, tests: Sequence[str], targets: Sequence[str]
) -> dict[str, tuple[float, list[str]]]:
    """Run the tests and return, by test, its seconds and the functions it calls.

    Raises:
        SystemExit: A test fails without any fault.
    """
    plugin, out = tree / "mutate_recorder.py", tree / "calls.json"
    plugin.write_text(_RECORDER, encoding="utf-8")
    record = json.dumps([os.path.realpath(tree), list(targets), str(out)])
    marks = ("-m", "not slow and not e2e", "-p", "mutate_recorder")
    if _pytest(tree, *marks, *tests, MUTATE_RECORD=record):
        raise SystemExit("The tests fail without any fault: run them first.")
    found: dict[str, tuple[float, list[str]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def choose_tests(
    mutant: Mutant, calls: dict[str, tuple[float, list[str]]], seconds: float
) -> list[str]:
    """Return the tests that call the mutant's function, quickest first, for so many seconds."""
    place = f"{mutant.path}:{mutant.function}"
    chosen, spent = [], 0.0
    for test, (took, called) in sorted(calls.items(), key=lambda item: item[1][0]):
        if place in called and spent + took <= seconds:
            chosen.append(test)
            spent += took
    return chosen


def _as_diff(mutant: Mutant, source: str) -> Iterator[str]:
    yield f"{mutant.path}:{mutant.line}"
    yield f"  - {' '.join(source[mutant.start : mutant.end].split())}"
    yield f"  + {mutant.text}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the survivors and one JSON line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, per fault")
    parser.add_argument("--map", type=Path, help="what each test calls: read if there, else kept")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--only", nargs="+", default=list(TARGETS), help="where to plant")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        _load_libraries()
        if args.map is not None and args.map.exists():
            calls = json.loads(args.map.read_text(encoding="utf-8"))
        else:
            print("Running the tests once, to see what each of them calls.", file=sys.stderr)
            calls = record_calls(tree, args.tests, TARGETS)
            if args.map is not None:
                args.map.write_text(json.dumps(calls), encoding="utf-8")
        mutants = find_mutants(tree, args.only)
        drawn = random.Random(args.seed).sample(mutants, min(args.mutants, len(mutants)))
        survivors, num_untested, begin = [], 0, time.perf_counter()
        for mutant in tqdm(drawn, disable=None):
            path = tree / mutant.path
            source = path.read_text(encoding="utf-8")
            chosen = choose_tests(mutant, calls, args.seconds)
            status = 0
            if chosen:
                path.write_text(mutant.apply(source), encoding="utf-8")
                status = _pytest(tree, *chosen, timeout=args.seconds)
                path.write_text(source, encoding="utf-8")
            if status == 0:
                num_untested += not chosen
                survivors.append(mutant)
                lines = [*_as_diff(mutant, source), f"  {len(chosen)} tests call the function"]
                tqdm.write("\n".join(lines), file=sys.stdout)
                sys.stdout.flush()
    share = len(survivors) / max(1, len(drawn))
    result = {
        "mutants": len(drawn),
        "of": len(mutants),
        "killed": len(drawn) - len(survivors),
        "without_a_test": num_untested,
        "killed_share": round(1 - share, 4),
        "seed": args.seed,
        "seconds": round(time.perf_counter() - begin),
    }
    print(json.dumps(result))
    return int(share >= _MAX_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
