"""The layers of pyproject.toml, written into the pages that show them: ``make figures`` runs it.

    python -m tools.layers_doc

Each list stands between two marks, which name the contract that it comes from.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md")
_LIST = re.compile(r"(<!-- layers: (.+?) -->\n).*?(<!-- end of layers -->)", re.DOTALL)


def read_layers(name: str) -> list[str]:
    """Return the layers of a contract, the highest first.

    Raises:
        KeyError: There is no such contract.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    found = {contract["name"]: contract for contract in contracts}[name]
    return list(found["layers"])


def write_lists(text: str) -> str:
    """Return a page's text with its lists as they are in pyproject.toml."""

    def write(match: re.Match[str]) -> str:
        lines = "\n".join(read_layers(match[2]))
        return f"{match[1]}```text\n{lines}\n```\n{match[3]}"

    return _LIST.sub(write, text)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(write_lists(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
