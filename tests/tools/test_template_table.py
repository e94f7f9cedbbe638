"""What templates take, as a table; that of real templates is checked by ``make clients``."""

from pathlib import Path

import pytest

from tests.tokenizers.order_templates import ORDERS
from tools.template_table import BEGIN, END, PAGE, describe, make_table, replace_table


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("anything", "anywhere | apart | apart | not shown | not shown | exact"),
        ("first system", "one in front | apart | apart | not shown | not shown | exact"),
        ("by turns", "one in front | joined | joined | not shown | not shown | trimmed"),
        ("no system", "into the question | joined | joined | not shown | not shown | trimmed"),
        ("parts only", "anywhere | apart | apart | not shown | not shown | exact"),
    ],
)
def test_a_row_says_what_a_template_takes(name: str, row: str) -> None:
    assert describe(ORDERS[name]) == row


def test_the_table_has_a_row_for_each_template(tmp_path: Path) -> None:
    for name in ("b", "a", "a_training", "smolvlm"):
        (tmp_path / f"{name}.jinja").write_text(ORDERS["anything"], "utf-8")
    rows = make_table(tmp_path).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:4]] == ["| a", "| b"]
    assert len(rows) == 2 + 2 + 4  # with Mistral's four formats


def test_the_page_has_a_place_for_it() -> None:
    page = PAGE.read_text("utf-8")
    table = page.split(BEGIN)[1].split(END)[0]
    assert table.count("\n") == 2 + 38 + 4
    assert replace_table(page, table) == page
