"""How many planted faults do the tests notice? A mutation run over the cache's own code.

    python tools/mutate.py [--mutants 200] [--seed 24] [--seconds 60] [--map map.json]
        [--tests tests/v1/core ...] [--only vllm/v1/core/prefix] [--out run.json]
        [--again run.json]

First it runs the tests once and notes which lines each of them runs (``--map`` keeps that for the
next run). Then it draws faults with a fixed seed: a comparison turned, a bound off by one, a
condition negated, a call left out. Each is planted in a copy of the tree, and the tests that run
its line are run, those of the module's own test file first, then the quickest, until one fails;
the chosen tests took ``--seconds`` of processor time at most, without a fault. Prints each survivor
as a diff and the share that was killed; exits 1 if a twentieth or more survived. Only the tests are
trusted: the tree this runs in is never written to.

The draw goes by what a fault is and in which function it stands, not by its line: code that
moves, or changes elsewhere, leaves the other faults of a draw as they were.

What is not mutated, because no test could or should tell: docstrings and other strings,
annotations, decorators (a class's slots), assertions (``zip``'s ``strict`` is one), log messages
and conditions that only decide on one, ``__repr__``, code for type checkers, and how long something
waits (a keyword whose name ends in ``timeout``, ``_s`` or ``_ms``): tests do not depend on the
machine's speed. A fault counts as hung, which is noticed, when its tests took three times their
processor time and 30 s more, or ten times that on the clock, for a machine with other work.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("vllm/v1/core", "vllm_ascend/core", "vllm/distributed/kv_transfer/handover")
TESTS = (
    *("tests/v1/core", "tests/ascend/core", "tests/distributed", "tests/contract"),
    *("tests/v1/engine", "tests/v1/kv_offload", "tests/v1/metrics", "tests/v1/spec_decode"),
    *("tests/v1/test_kv_cache_interface.py", "tests/v1/test_kv_cache_spec_registry.py"),
    *("tests/v1/test_recurrent_spec.py", "tests/ascend/test_block_size.py"),
    *("tests/ascend/test_plugin.py", "tests/ascend/test_reference_mode.py"),
)
_COPIED = ("vllm", "vllm_ascend", "tests", "benchmarks", "docs", "pyproject.toml")
_PACKAGES = ("vllm", "vllm_ascend", "tests", "benchmarks", "tools")
_LIBRARIES = (
    *("torch", "hypothesis", "hypothesis.stateful", "safetensors.torch", "transformers"),
    *("msgspec", "pydantic", "zmq", "numpy", "fastapi", "httpx"),
)
_MAX_SURVIVORS = 0.05
HUNG = 124
_SLACK = 3.0
_PATIENCE = 30.0
_CLOCK = 10.0
_FIRST = 40
_REPORTED = ("outcome", "path", "line", "scope", "replaced", "text")

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

# Notes which lines a test runs. Runs inside pytest, in the copied tree. A function that a test
# calls thousands of times is not watched to the end.
_RECORDER = """
import json, os, sys, threading, time
import pytest

ROOT, TARGETS, OUT = json.loads(os.environ["MUTATE_RECORD"])
_CALLS = 3000
_paths, _found = {}, {}


def _path(code):
    relative = os.path.relpath(os.path.realpath(code.co_filename), ROOT)
    inside = any(relative.startswith(target + os.sep) for target in TARGETS)
    return relative if inside else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    calls, lines = {}, set()

    def line_tracer(frame, event, arg):
        if event == "line":
            lines.add((frame.f_code, frame.f_lineno))
        return line_tracer

    def tracer(frame, event, arg):
        code = frame.f_code
        if code not in _paths:
            _paths[code] = _path(code)
        if _paths[code] is None:
            return None
        calls[code] = calls.get(code, 0) + 1
        return line_tracer if calls[code] <= _CALLS else None

    begin = time.process_time()
    threading.settrace(tracer)
    sys.settrace(tracer)
    yield
    sys.settrace(None)
    threading.settrace(None)
    places = {f"{_paths[code]}:{code.co_firstlineno}" for code in calls}
    places |= {f"{_paths[code]}:{line}" for code, line in lines}
    _found[item.nodeid] = [time.process_time() - begin, sorted(places)]


def pytest_sessionfinish():
    with open(OUT, "w") as file:
        json.dump(_found, file)
"""

_WAITS = ("timeout", "_s", "_ms")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        path: The file, relative to the tree.
        function: First line of the innermost function around it, decorators included.
        start: Where the replaced text begins, as an offset into the file.
        end: Where it ends.
        text: What stands there instead.
        line: First line of the replaced text.
        last_line: Its last line.
        scope: Names of the classes and functions around it.
        replaced: The text that is replaced.
    """

    path: str
    function: int
    start: int
    end: int
    text: str
    line: int
    last_line: int
    scope: str
    replaced: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What the fault is, wherever its line stands."""
        return self.path, self.scope, self.replaced, self.text

    def apply(self, source: str) -> str:
        """Return the file with the fault."""
        return source[: self.start] + self.text + source[self.end :]


def _is_log(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return ast.unparse(node.value.func).startswith("logger.")


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
        self._scope: list[str] = []

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        if not self._functions:
            return
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno, node.end_col_offset)
        self.found.append(
            Mutant(
                path=self._path,
                function=self._functions[-1],
                start=start,
                end=end,
                text=text,
                line=node.lineno,
                last_line=node.end_lineno,
                scope=".".join(self._scope),
                replaced=" ".join(self._source[start:end].split()),
            )
        )

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
        if is_stub or node.name == "__repr__":
            return
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self._functions.append(first)
        self._scope.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Look into the body, not at decorators and bases."""
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

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

    def visit_keyword(self, node: ast.keyword) -> None:
        """Leave alone how long something waits, and the check of ``zip``."""
        if node.arg is None or not (node.arg == "strict" or node.arg.endswith(_WAITS)):
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone; that an error is raised at all is its condition's matter."""

    # ---- what is mutated ---------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave calls out that are statements of their own, log messages excepted."""
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if _is_log(node) or name.startswith(("super().__init__", "_require")):
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Negate conditions."""
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not node.orelse and all(_is_log(statement) for statement in node.body):
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


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return so many of them, in the order of a hash of the seed and of what each fault is."""
    keys, seen = [], dict[tuple[str, ...], int]()
    for mutant in mutants:
        repeat = seen.get(mutant.identity, 0)
        seen[mutant.identity] = repeat + 1
        text = json.dumps([seed, *mutant.identity, repeat])
        keys.append(hashlib.sha256(text.encode()).hexdigest())
    ranked = sorted(zip(keys, mutants, strict=True), key=lambda pair: pair[0])
    return [mutant for _, mutant in ranked[:count]]


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


def _pytest(tree: Path, *args: str, cpu_s: float | None = None, **environment: str) -> int:
    """Run pytest in a tree, in a fork; returns its status, or HUNG after ``cpu_s``.

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
            if cpu_s is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), math.ceil(cpu_s)))
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
    deadline = None if cpu_s is None else time.monotonic() + _CLOCK * cpu_s
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if deadline is not None and time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return HUNG
        time.sleep(0.02)
    status = os.waitstatus_to_exitcode(found[1])
    return HUNG if status in (-signal.SIGXCPU, -signal.SIGKILL) else status


def record_calls(
    tree: Path, tests: Sequence[str], targets: Sequence[str]
) -> dict[str, tuple[float, list[str]]]:
    """Run the tests and return, by test, its seconds and the lines it runs.

    Raises:
        SystemExit: A test fails without any fault.
    """
    plugin, out = tree / "mutate_recorder.py", tree / "calls.json"
    plugin.write_text(_RECORDER, encoding="utf-8")
    record = json.dumps([os.path.realpath(tree), list(targets), str(out)])
    marks = ("-m", "not e2e", "-p", "mutate_recorder")
    if _pytest(tree, *marks, *tests, MUTATE_RECORD=record):
        raise SystemExit("The tests fail without any fault: run them first.")
    found: dict[str, tuple[float, list[str]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _own_tests(mutant: Mutant) -> str:
    return f"test_{Path(mutant.path).name}::"


def choose_tests(
    mutant: Mutant, calls: dict[str, tuple[float, list[str]]], seconds: float
) -> dict[str, float]:
    """Return the tests to run and the seconds of each, in order and for ``seconds`` at most.

    These are tests that run a line of the fault (or, where none is seen to, call its function):
    those in a file named after the module first, then the quickest.
    """
    places = {f"{mutant.path}:{line}" for line in range(mutant.line, mutant.last_line + 1)}
    running = [test for test in calls if not places.isdisjoint(calls[test][1])]
    if not running:
        place = f"{mutant.path}:{mutant.function}"
        running = [test for test in calls if place in calls[test][1]]
    own = _own_tests(mutant)
    chosen, spent = {}, 0.0
    for test in sorted(running, key=lambda test: (own not in test, calls[test][0])):
        took = calls[test][0]
        if spent + took <= seconds:
            chosen[test] = took
            spent += took
    return chosen


def _as_diff(mutant: Mutant) -> Iterator[str]:
    yield f"{mutant.path}:{mutant.line} {mutant.scope}"
    yield f"  - {mutant.replaced}"
    yield f"  + {mutant.text}"


def _try(tree: Path, mutant: Mutant, chosen: dict[str, float]) -> str:
    """Plant a fault, run the tests, take it back; returns ``killed``, ``hung`` or ``survived``.

    Raises:
        SystemExit: The tests cannot be run without the fault either.
    """
    path = tree / mutant.path
    source = path.read_text(encoding="utf-8")
    # Collecting many files costs more than most tests.
    own = [test for test in chosen if _own_tests(mutant) in test]
    first = own or list(chosen)[:_FIRST]
    status = 0
    path.write_text(mutant.apply(source), encoding="utf-8")
    for tests in (first, [test for test in chosen if test not in first]):
        if tests and status == 0:
            took = sum(chosen[test] for test in tests)
            status = _pytest(tree, *tests, cpu_s=_PATIENCE + _SLACK * took)
    path.write_text(source, encoding="utf-8")
    if status == pytest.ExitCode.USAGE_ERROR and _pytest(tree, "--collect-only", *chosen):
        raise SystemExit("The map names tests that are gone: delete it, and run again.")
    return {0: "survived", HUNG: "hung"}.get(status, "killed")


def _read_killed(path: Path | None) -> dict[tuple[str, ...], str]:
    """Return what an earlier run noticed, and how."""
    if path is None:
        return {}
    faults = json.loads(path.read_text(encoding="utf-8"))["faults"]
    return {
        (f["path"], f["scope"], f["replaced"], f["text"]): f["outcome"]
        for f in faults
        if f["outcome"] != "survived"
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the survivors and one JSON line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, per fault")
    parser.add_argument("--map", type=Path, help="what each test runs: read if there, else kept")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--only", nargs="+", default=list(TARGETS), help="where to plant")
    parser.add_argument("--out", type=Path, help="a JSON file of every fault and what became of it")
    parser.add_argument(
        "--again", type=Path, help="such a file: do not plant what it says was killed"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        _load_libraries()
        if args.map is not None and args.map.exists():
            calls = json.loads(args.map.read_text(encoding="utf-8"))
        else:
            print("Running the tests once, to see what each of them runs.", file=sys.stderr)
            calls = record_calls(tree, args.tests, TARGETS)
            if args.map is not None:
                args.map.write_text(json.dumps(calls), encoding="utf-8")
        mutants = find_mutants(tree, args.only)
        drawn, known = draw(mutants, args.mutants, args.seed), _read_killed(args.again)
        faults, num_untested, begin = [], 0, time.perf_counter()
        for mutant in tqdm(drawn, disable=None):
            outcome, chosen = known.get(mutant.identity), {}
            if outcome is None:
                chosen = choose_tests(mutant, calls, args.seconds)
                outcome = _try(tree, mutant, chosen) if chosen else "survived"
                num_untested += not chosen
            fault = {"outcome": outcome, **asdict(mutant)}
            faults.append({name: fault[name] for name in _REPORTED})
            if outcome == "survived":
                lines = [*_as_diff(mutant), f"  {len(chosen)} tests run it"]
                tqdm.write("\n".join(lines), file=sys.stdout)
                sys.stdout.flush()
    outcomes = Counter(fault["outcome"] for fault in faults)
    share = outcomes["survived"] / max(1, len(faults))
    result = {
        "mutants": len(faults),
        "of": len(mutants),
        "killed": outcomes["killed"] + outcomes["hung"],
        "hung": outcomes["hung"],
        "without_a_test": num_untested,
        "killed_share": round(1 - share, 4),
        "seed": args.seed,
        "seconds": round(time.perf_counter() - begin),
    }
    if args.out is not None:
        text = json.dumps({**result, "faults": faults}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(result))
    return int(share >= _MAX_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
