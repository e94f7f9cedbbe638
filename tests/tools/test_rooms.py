"""A reader's count."""

from pathlib import Path

from tools.rooms import count_lines, find_arrows, order_rooms


def write(root: Path, name: str, text: str) -> None:
    path = root / "house" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_arrows_lead_between_rooms_and_some_back_up(tmp_path: Path) -> None:
    write(tmp_path, "roof.py", "from house.cellar.shelf import Wine\nfrom house import stairs\n")
    write(tmp_path, "cellar/__init__.py", "")
    write(tmp_path, "cellar/shelf.py", "import house.cellar.box\nimport house.stairs\n")
    write(tmp_path, "cellar/box.py", "import os\n")
    write(tmp_path, "stairs.py", "def climb():\n    from house.roof import view\n")
    write(tmp_path, "__init__.py", "")
    rooms, arrows = find_arrows(tmp_path, "house")
    assert rooms == ["cellar", "roof", "stairs"]
    # Imports of a room by itself are none, however they are written.
    assert arrows == {
        ("roof", "cellar"),
        ("roof", "stairs"),
        ("cellar", "stairs"),
        ("stairs", "roof"),
    }
    ordered = order_rooms(rooms, arrows)
    back = [(a, b) for a, b in arrows if ordered.index(a) > ordered.index(b)]
    assert back == [("stairs", "roof")]


def test_lines_are_counted_by_what_they_are(tmp_path: Path) -> None:
    text = '"""What it is.\n\nMore.\n"""\n\nimport os\n\n# Why.\nhere = """a\nb"""\n'
    write(tmp_path, "one.py", text)
    assert count_lines(tmp_path, "house") == {
        "docstrings": 4,
        "blank": 2,
        "imports": 1,
        "comments": 1,
        "code": 2,
    }
