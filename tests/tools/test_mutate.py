"""Which faults the mutation run plants, and which tests it runs for one."""

import ast
from pathlib import Path

from tools.mutate import ROOT, TARGETS, Mutant, choose_tests, draw, find_mutants

SOURCE = '''"""Doc."""

from typing import Protocol

LIMIT = 3


class Stub(Protocol):
    def size(self, n: int = 3) -> int:
        """Nothing to mutate."""
        ...


def first(values: list[int], flag: bool = True) -> int:
    """Return "é", 1 + 1 in words."""
    assert len(values) > 2, "more than 2"
    if not values or flag:
        raise ValueError(f"{len(values) + 1} is none")
    values.append(len(values) + 1)
    return values[0] if values[1] <= 5 else -1


class Client:
    """Doc."""

    def __repr__(self) -> str:
        return "Client" * 2

    def ask(self, n: int) -> None:
        if n > 3:
            logger.info("%d", n + 1)
        self.socket.poll(timeout=5, limit_s=n + 1, flags=2)
        zip(range(n), range(n), strict=True)
'''


def mutants_of(tmp_path: Path, source: str) -> list[Mutant]:
    (tmp_path / "code.py").write_text(source, encoding="utf-8")
    return find_mutants(tmp_path, ["code.py"])


def test_each_kind_of_fault_is_found_and_texts_checks_and_annotations_are_left_alone(
    tmp_path: Path,
) -> None:
    changed = set()
    for mutant in mutants_of(tmp_path, SOURCE):
        planted = mutant.apply(SOURCE)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(SOURCE))
        (line,) = [
            new.strip()
            for new, old in zip(planted.splitlines(), SOURCE.splitlines(), strict=True)
            if new != old
        ]
        changed.add(line)
    assert changed == {
        "def first(values: list[int], flag: bool = (False)) -> int:",
        "if not (not values or flag):",
        "if (not values and flag):",
        "if (values) or flag:",
        "pass",
        "values.append((len(values) - 1))",
        "values.append(len(values) + (2))",
        "return (-1 if values[1] <= 5 else values[0])",
        "return values[(1)] if values[1] <= 5 else -1",
        "return values[0] if (values[1] < 5) else -1",
        "return values[0] if values[(2)] <= 5 else -1",
        "return values[0] if values[1] <= (6) else -1",
        "return values[0] if values[1] <= 5 else -(2)",
        "self.socket.poll(timeout=5, limit_s=n + 1, flags=(3))",
    }


def test_every_fault_in_the_product_leaves_a_file_that_parses() -> None:
    mutants = find_mutants(ROOT, TARGETS[:1])
    assert len(mutants) > 1000
    for mutant in draw(mutants, 60, seed=0):
        ast.parse(mutant.apply((ROOT / mutant.path).read_text(encoding="utf-8")))


def test_a_draw_stays_when_code_moves_or_changes_elsewhere(tmp_path: Path) -> None:
    before = mutants_of(tmp_path, SOURCE)
    moved = SOURCE.replace("LIMIT = 3", "LIMIT = 3\n\n\ndef more() -> int:\n    return 1\n")
    after = mutants_of(tmp_path, moved)
    assert len(after) == len(before) + 1
    drawn = [mutant.identity for mutant in draw(before, 8, seed=24)]
    assert len(set(drawn) - {mutant.identity for mutant in draw(after, 8, seed=24)}) <= 1
    assert [mutant.identity for mutant in draw(before, 8, seed=25)] != drawn


def fault(line: int, last_line: int) -> Mutant:
    return Mutant("a.py", 7, 0, 0, "", line, last_line, "f", "")


def test_tests_that_run_the_line_are_chosen_those_of_the_module_first_within_the_time() -> None:
    calls = {
        "slow": (5.0, ["a.py:7", "a.py:9"]),
        "quick": (0.1, ["a.py:7", "a.py:9"]),
        "tests/test_a.py::own": (1.0, ["a.py:7", "a.py:10"]),
        "other lines": (0.1, ["a.py:7", "a.py:8"]),
        "other files": (0.1, ["a.py:1", "b.py:9"]),
    }
    assert list(choose_tests(fault(9, 10), calls, 10.0)) == [
        *("tests/test_a.py::own", "quick", "slow"),
    ]
    assert choose_tests(fault(9, 9), calls, 2.0) == {"quick": 0.1}
    assert sum(choose_tests(fault(9, 10), calls, 5.2).values()) == 1.1


def test_where_no_line_is_seen_to_run_the_functions_callers_are_chosen() -> None:
    calls = {"caller": (0.1, ["a.py:7"]), "other": (0.1, ["a.py:1"])}
    assert choose_tests(fault(11, 11), calls, 10.0) == {"caller": 0.1}
