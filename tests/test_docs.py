"""The documentation: links lead somewhere, and every page can be reached."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def find_pages() -> list[Path]:
    """Every markdown page of the repository."""
    return sorted(
        path
        for folder in (ROOT, DOCS, ROOT / "benchmarks", ROOT / ".github", ROOT / "examples")
        for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
    )


def read_prose(page: Path) -> str:
    """A page without its code."""
    return _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))


def find_anchors(page: Path) -> Iterator[str]:
    """The anchors that a page's headings make."""
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", find_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(read_prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in set(find_anchors(target))):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", find_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_that_are_named_exist(page: Path) -> None:
    """Prose names pages as ``docs/x.md``; such a page is there."""
    named = set(re.findall(r"`((?:docs|benchmarks)/[\w./-]+\.md)`", page.read_text("utf-8")))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_commands_say_what_they_send() -> None:
    """A body without its type is refused."""
    commands = re.compile(r"curl (?:[^\n]|\\\n)*? -d ")
    silent = [
        f"{path.relative_to(ROOT)}: {command}"
        for path in (*find_pages(), *(ROOT / "examples").rglob("*.py"))
        for command in commands.findall(path.read_text("utf-8"))
        if "Content-Type: application/json" not in command
    ]
    assert silent == []


def test_every_page_is_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def leaves(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            for value in node.values():
                yield from leaves(value)
        elif isinstance(node, list):
            for value in node:
                yield from leaves(value)

    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "docs"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    ).stdout.split()
    pages = {name.removeprefix("docs/") for name in tracked if name.endswith(".md")}
    assert set(leaves(site["nav"])) == (
        pages or {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    )


def test_the_site_stops_at_dead_links() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert site["strict"] is True
    assert site["validation"]["links"] == dict.fromkeys(
        ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
    )


@pytest.mark.parametrize("page", find_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_marks_of_a_merge(page: Path) -> None:
    marked = re.findall(r"^(?:<{7} |={7}$|>{7} ).*", page.read_text("utf-8"), re.MULTILINE)
    assert marked == []
