"""Figures of the documentation: what a page shows is what a result file has."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.figures import (
    ROOT,
    FiguresError,
    Result,
    fill_in,
    find_pages,
    find_unused,
    read_results,
    read_table,
    read_values,
    record,
    write_result,
)

ROTATION = Result(
    *("python -m benchmarks.rotation", "abc1234", "2026-11-22", "2 cores"),
    *(["prompts", "hit"], [True, True], [["18", "100%"], ["45", "91.5%"]], {"best": "100%"}),
)
PAGE = """Before.

<!-- figures: rotation -->
| stale |
<!-- end -->

At 45: <!-- figure: rotation 2.2 -->90.9%<!-- end -->,
best <!-- figure: rotation best --><!-- end -->.
"""


def test_every_page_shows_what_its_results_have() -> None:
    results = read_results()
    stale = [
        str(page.relative_to(ROOT))
        for page in find_pages()
        if fill_in(text := page.read_text("utf-8"), results) != text
    ]
    assert not stale, "run make figures"


def test_every_result_is_shown_somewhere_and_names_its_origin() -> None:
    results = read_results()
    assert find_unused(results, [page.read_text("utf-8") for page in find_pages()]) == set()
    for name, result in results.items():
        assert all((result.command, result.commit, result.date, result.machine)), name


def test_tables_and_single_figures_are_filled_in() -> None:
    filled = fill_in(PAGE, {"rotation": ROTATION})
    assert "| prompts | hit |\n| --: | --: |\n| 18 | 100% |\n| 45 | 91.5% |\n<!-- end -->" in filled
    assert "stale" not in filled
    assert "-->91.5%<!-- end -->,\nbest <!-- figure: rotation best -->100%<!-- end -->." in filled
    assert fill_in(filled, {"rotation": ROTATION}) == filled


@pytest.mark.parametrize(
    "mark",
    [
        "<!-- figures: gone -->\n<!-- end -->",
        "<!-- figure: gone 1.1 --><!-- end -->",
        "<!-- figure: rotation 3.1 --><!-- end -->",
        "<!-- figure: rotation 0.1 --><!-- end -->",
        "<!-- figure: rotation 1.3 --><!-- end -->",
        "<!-- figure: rotation worst --><!-- end -->",
    ],
)
def test_a_mark_that_names_nothing_is_an_error(mark: str) -> None:
    with pytest.raises(FiguresError, match=r"rotation|gone"):
        fill_in(mark, {"rotation": ROTATION})


def test_results_are_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.figures.RESULTS", tmp_path)
    write_result("rotation", ROTATION)
    assert read_results(tmp_path) == {"rotation": ROTATION}
    broken = json.loads((tmp_path / "rotation.json").read_text())
    broken["rows"][0].append("one too many")
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(FiguresError, match=r"broken\.json has 2 columns"):
        read_results(tmp_path)


def test_a_result_that_no_page_shows_is_named() -> None:
    assert find_unused({"rotation": ROTATION, "spare": ROTATION}, [PAGE]) == {"spare"}


def test_the_last_table_and_the_numbers_of_json_lines_are_read() -> None:
    text = "| a |\n|---|\n| 1 |\n\n| b | c |\n|---|--:|\n| 2 | 3 |\nend\n"
    assert read_table(text) == (["b", "c"], [False, True], [["2", "3"]])
    assert read_table("nothing here") is None
    line = json.dumps({"benchmark": "x", "values": {"step": {"p50": 0.25}, "unit": "ms"}})
    assert read_values(f"log\n{line}\n") == {"step.p50": "0.25"}


def test_a_command_is_recorded_with_what_it_printed() -> None:
    table = "print('| a |'); print('|--:|'); print('| 1 |')"
    made = record("x", [sys.executable, "-c", table])
    assert (made.columns, made.right, made.rows) == (["a"], [True], [["1"]])
    assert made.command.startswith("python -c")
    with pytest.raises(FiguresError, match="no table"):
        record("x", [sys.executable, "-c", "pass"])
    with pytest.raises(FiguresError, match="ended with 3"):
        record("x", [sys.executable, "-c", "raise SystemExit(3)"])
