"""Figures of the documentation, written from the results that benchmarks left.

``benchmarks/results/NAME.json`` holds one result: the command that measured it, commit, date and
machine, a table (``columns``, ``rows``) and single ``values``. A page shows them between marks:

    <!-- figures: rotation -->                      the table of rotation.json
    | ... |
    <!-- end -->
    hits <!-- figure: rotation 5.8 -->91.5%<!-- end --> of it         row 5, column 8 of its table
    in <!-- figure: startup median_s -->1.9<!-- end --> s             one of its values

``python -m benchmarks.figures write`` writes every page anew, ``check`` names those that differ,
and ``record NAME COMMAND ...`` runs a benchmark and keeps the markdown table that it prints, or
the numbers of its JSON lines, as NAME.json.
"""

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.compare import flatten
from benchmarks.result import describe_machine, find_commit

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"<!-- figures: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
_INLINE = re.compile(r"<!-- figure: (\S+) (\S+) -->.*?<!-- end -->")
_RULE = re.compile(r"^\|[-:| ]+\|$")


class FiguresError(Exception):
    """A page names a result or a value that is not there, or a command printed none."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one command measured.

    Attributes:
        command: As it was typed.
        commit: Of the tree it ran in.
        date: ISO.
        machine: For people.
        columns: Heads of the table; empty where there is none.
        right: For each column, whether its cells stand at the right, as numbers do.
        rows: The table's cells, as shown.
        values: Single figures by name, as shown.
    """

    command: str
    commit: str
    date: str
    machine: str
    columns: Sequence[str] = ()
    right: Sequence[bool] = ()
    rows: Sequence[Sequence[str]] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    def render_table(self) -> str:
        """Return the table in markdown."""
        rule = ["--:" if is_right else "---" for is_right in self.right]
        lines = [self.columns, rule, *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    def find_figure(self, key: str) -> str | None:
        """Return one figure, by its name or as row.column, both counted from 1; None: not there."""
        if key in self.values:
            return self.values[key]
        row, _, column = key.partition(".")
        if not (row.isdecimal() and column.isdecimal()):
            return None
        cells = self.rows[int(row) - 1] if 0 < int(row) <= len(self.rows) else ()
        return cells[int(column) - 1] if 0 < int(column) <= len(cells) else None


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return all results by name.

    Raises:
        FiguresError: A file is no result, or a row has another number of cells than the head.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = Result(**json.loads(path.read_text("utf-8")))
        except (TypeError, ValueError) as error:
            raise FiguresError(f"{path.name} is no result: {error}") from error
        widths = {len(row) for row in result.rows} | {len(result.right)}
        if widths != {len(result.columns)}:
            raise FiguresError(
                f"{path.name} has {len(result.columns)} columns and rows of {sorted(widths)} cells"
            )
        results[path.stem] = result
    return results


def fill_in(text: str, results: Mapping[str, Result]) -> str:
    """Return a page with every marked table and value as its result has it.

    Raises:
        FiguresError: A mark names a result or a value that is not there.
    """

    def find(name: str) -> Result:
        if name not in results:
            raise FiguresError(f"there is no benchmarks/results/{name}.json")
        return results[name]

    def block(match: re.Match[str]) -> str:
        return f"<!-- figures: {match[1]} -->\n{find(match[1]).render_table()}\n<!-- end -->"

    def value(match: re.Match[str]) -> str:
        shown = find(match[1]).find_figure(match[2])
        if shown is None:
            raise FiguresError(f"benchmarks/results/{match[1]}.json has no figure {match[2]}")
        return f"<!-- figure: {match[1]} {match[2]} -->{shown}<!-- end -->"

    return _INLINE.sub(value, _BLOCK.sub(block, text))


def find_pages(root: Path = ROOT) -> Iterator[Path]:
    """Yield every page that may show figures."""
    yield root / "README.md"
    yield root / "benchmarks" / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def find_unused(results: Mapping[str, Result], pages: Sequence[str]) -> set[str]:
    """Return the names of results that no page shows."""
    shown = {name for text in pages for name in re.findall(r"<!-- figures?: (\S+) ", text)}
    return set(results) - shown


def read_table(text: str) -> tuple[list[str], list[bool], list[list[str]]] | None:
    """Return heads, sides and rows of the last markdown table in a text; None: there is none."""
    lines = text.splitlines()
    rules = [i for i, line in enumerate(lines) if i and _RULE.match(line.strip())]
    if not rules:
        return None
    start = rules[-1]
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append(_cells(line))
    right = [cell.endswith(":") for cell in _cells(lines[start])]
    return _cells(lines[start - 1]), right, rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_values(text: str) -> dict[str, str]:
    """Return the numbers of the JSON lines that a benchmark printed, by dotted names."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            values.update(
                {
                    name: f"{number:.10g}"
                    for name, number in flatten(json.loads(line)["values"]).items()
                }
            )
    return values


def record(name: str, command: Sequence[str]) -> Result:
    """Run a benchmark, showing what it prints, and return what it measured.

    Raises:
        FiguresError: It failed, or printed neither a table nor a JSON line.
    """
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            printed.append(line)
    if process.returncode:
        raise FiguresError(f"{shlex.join(command)} ended with {process.returncode}")
    text = "".join(printed)
    table, values = read_table(text), read_values(text)
    if table is None and not values:
        raise FiguresError(f"{name}: {shlex.join(command)} printed no table and no JSON line")
    columns, right, rows = table or ([], [], [])
    shown = shlex.join(command).replace(sys.executable, "python")
    return Result(
        *(shown, find_commit(), datetime.date.today().isoformat(), describe_machine()),
        *(columns, right, rows, values),
    )


def write_result(name: str, result: Result) -> None:
    """Write NAME.json; a table's rows stand one to a line, so that a change can be read."""
    parts = asdict(result)
    rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in parts.pop("rows"))
    head = json.dumps({**parts, "rows": []}, indent=2, ensure_ascii=False)
    RESULTS.mkdir(exist_ok=True)
    text = head.replace('"rows": []', f'"rows": [\n    {rows}\n  ]') if rows else head
    (RESULTS / f"{name}.json").write_text(text + "\n", "utf-8")


def main() -> None:
    """Write or check the pages, or record a result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("write", help="Write every page anew.")
    commands.add_parser("check", help="Name the pages that differ from their results.")
    recording = commands.add_parser("record", help="Run a benchmark and keep its result.")
    recording.add_argument("name")
    recording.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.what == "record":
        write_result(args.name, record(args.name, args.command))
        return
    results, stale = read_results(), []
    for page in find_pages():
        text = page.read_text("utf-8")
        filled = fill_in(text, results)
        if filled != text:
            stale.append(str(page.relative_to(ROOT)))
            if args.what == "write":
                page.write_text(filled, "utf-8")
    if stale:
        print(
            f"{'written' if args.what == 'write' else 'stale: run make figures'}: {' '.join(stale)}"
        )
    if stale and args.what == "check":
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except FiguresError as error:
        sys.exit(f"figures: {error}")
