"""What ``make clients`` runs is pinned, listed and told; the clients themselves run elsewhere."""

import json
import re

import pytest

from tests.clients.run import (
    BEGIN,
    END,
    HERE,
    MANIFESTS,
    NODE,
    PAGE,
    PROMETHEUS,
    ROWS,
    Result,
    checked,
    make_page,
    parse_line,
    read_pins,
)

NODE_PACKAGES = ("openai", "ai", "@openai/codex", "@anthropic-ai/claude-code", "opencode-ai")
NOTHING = dict.fromkeys(("cached", "tokens", "2xx", "4xx", "5xx"), 0)


def test_every_environment_is_pinned_and_every_row_runs() -> None:
    pins = read_pins()
    assert set(pins) == set(ROWS) - {*MANIFESTS, PROMETHEUS}
    assert all("==" in requirement for listed in pins.values() for requirement in listed)
    for manifest in MANIFESTS.values():
        node = json.loads(manifest.read_text("utf-8"))["dependencies"]
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in node.values())
    files = {path.name for path in (HERE / "rows").glob("*.*") if path.stem != "client"}
    assert files == {file for listed in ROWS.values() for file in listed}


def test_the_page_tells_of_every_environment() -> None:
    table = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
    for name in ROWS:
        packages = name.split(", ") if name != NODE else list(NODE_PACKAGES)
        for package in packages:
            assert f"| {package}" in table, f"run make clients: {package} is missing"


@pytest.mark.parametrize(
    ("row", "delta", "ok"),
    [
        ("chat", {"2xx": 10, "tokens": 140, "cached": 64}, True),
        ("chat", {"2xx": 9, "4xx": 1, "tokens": 140, "cached": 64}, False),
        ("context overflow", {"4xx": 1, "tokens": 140, "cached": 64}, True),
        ("context overflow", {"5xx": 1, "tokens": 140, "cached": 64}, False),
        ("chat", {"2xx": 10, "tokens": 139, "cached": 64}, False),
        ("chat", {"2xx": 10, "tokens": 140, "cached": 63}, False),
    ],
)
def test_a_row_fails_where_the_server_saw_otherwise(
    row: str, delta: dict[str, int], ok: bool
) -> None:
    result = Result("p", "1", row, True, tokens=140, cached=64)
    assert checked(result, NOTHING, {**NOTHING, **delta}).ok == ok


def test_lines_of_clients_are_no_results() -> None:
    assert parse_line("hello") == parse_line("[1]") == {}
    assert parse_line('{"row": "x"}') == {"row": "x"}
    page = make_page([Result("p", "1", "r", False, "a|b")], {"q": "no registry"})
    assert "**fails**" in page
    assert "| q | | skipped | | | | no registry |" in page


def test_rows_that_did_not_run_stay_on_the_page() -> None:
    old = make_page([Result("p", "1", "r", True), Result("o", "2", "r", True)], {"q": "none"})
    page = make_page([Result("p", "3", "s", True)], {}, old)
    assert [line.split(" |")[0] for line in page.splitlines()[2:]] == ["| o 2", "| q", "| p 3"]
