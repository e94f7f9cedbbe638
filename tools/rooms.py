"""A reader's count of a package: rooms, who imports whom, what runs back up, lines by kind.

    python -m tools.rooms vllm/v1/core [--lines vllm]

A room is a folder or module right below the package. An arrow leads from a room to one that it
imports, whatever the number of imports. Rooms are put in the order in which the fewest arrows lead
from a later one to an earlier one; those lead back up. It needs nothing but the files, so it counts
any commit: ``git worktree add DIR COMMIT`` and then ``--root DIR``.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

Arrows = set[tuple[str, str]]


def find_arrows(root: Path, package: str) -> tuple[list[str], Arrows]:
    """Return a package's rooms and the arrows between them.

    Args:
        root: Of the checkout.
        package: A folder in it.
    """
    folder = root / package
    dotted = package.replace("/", ".")
    rooms = sorted(
        path.stem
        for path in folder.iterdir()
        if (path / "__init__.py").is_file() or (path.suffix == ".py" and path.stem != "__init__")
    )
    arrows: Arrows = set()
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.removeprefix(f"{dotted}.").split(".")
            if name.startswith(f"{dotted}.") and parts[0] in rooms and room in rooms:
                arrows.add((room, parts[0]))
    return rooms, {(a, b) for a, b in arrows if a != b}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def order_rooms(rooms: Sequence[str], arrows: Arrows) -> list[str]:
    """Return rooms, importers first: next comes the one that fewest of those left import."""
    left, ordered = set(rooms), list[str]()
    while left:
        spare = Counter[str]()
        for a, b in arrows:
            if a in left and b in left:
                spare[a] += 1
                spare[b] -= 1
        # Nothing that is left imports it, or as little as may be.
        incoming = Counter(b for a, b in arrows if a in left and b in left)
        first = min(left, key=lambda room: (incoming[room], -spare[room], room))
        ordered.append(first)
        left.remove(first)
    return ordered


def count_lines(root: Path, package: str) -> Counter[str]:
    """Return lines of a package's modules by kind: code, imports, docstrings, comments, blank."""
    lines: Counter[str] = Counter()
    for path in (root / package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        kinds = ["blank" if not line.strip() else "code" for line in text.split("\n")[:-1]]
        for number, line in enumerate(text.split("\n")[:-1]):
            if line.strip().startswith("#"):
                kinds[number] = "comments"
        for node in ast.walk(ast.parse(text)):
            kind = None
            if isinstance(node, ast.Import | ast.ImportFrom):
                kind = "imports"
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                kind = "docstrings" if isinstance(node.value.value, str) else None
            if kind is not None:
                assert isinstance(node, ast.stmt)
                end = node.end_lineno or node.lineno
                kinds[node.lineno - 1 : end] = [kind] * (end - node.lineno + 1)
        lines.update(kinds)
    return lines


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", help="Its folder, from the root on.")
    parser.add_argument("--root", type=Path, default=Path(), help="Of the checkout.")
    parser.add_argument("--lines", metavar="FOLDER", help="Counts its lines, too.")
    args = parser.parse_args()
    rooms, arrows = find_arrows(args.root, args.package)
    ordered = order_rooms(rooms, arrows)
    back = sorted((a, b) for a, b in arrows if ordered.index(a) > ordered.index(b))
    print(f"{len(rooms)} rooms, {len(arrows)} arrows, {len(back)} of them back up")
    for room in ordered:
        print(f"  {room}: {', '.join(sorted(b for a, b in arrows if a == room)) or '-'}")
    print("\n".join(f"back up: {a} -> {b}" for a, b in back))
    if args.lines is not None:
        counted = count_lines(args.root, args.lines)
        told = ", ".join(f"{count:,} {kind}" for kind, count in counted.most_common())
        print(f"{args.lines}: {counted.total():,} lines: {told}")


if __name__ == "__main__":
    main()
