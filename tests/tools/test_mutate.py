"""Which faults the mutation run plants, and which tests it runs for one."""

import ast
import random
from pathlib import Path

from tools.mutate import ROOT, TARGETS, Mutant, choose_tests, find_mutants

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
    }


def test_every_fault_in_the_product_leaves_a_file_that_parses() -> None:
    mutants = find_mutants(ROOT, TARGETS[:1])
    assert len(mutants) > 1000
    for mutant in random.Random(0).sample(mutants, 60):
        ast.parse(mutant.apply((ROOT / mutant.path).read_text(encoding="utf-8")))


def test_tests_that_call_the_function_are_chosen_quickest_first_within_the_time() -> None:
    mutant = Mutant("a.py", 7, 0, 0, "", 9)
    calls = {
        "slow": (5.0, ["a.py:7"]),
        "quick": (0.1, ["a.py:7", "a.py:1"]),
        "other": (0.1, ["a.py:1", "b.py:7"]),
    }
    assert choose_tests(mutant, calls, 10.0) == ["quick", "slow"]
    assert choose_tests(mutant, calls, 2.0) == ["quick"]
