"""What went on in JSON that was cut off."""

import json
import sys

import pytest

from vllm.utils.open_json import KINDS, find_open_part

_LONG = "so on and " * 40


@pytest.mark.parametrize(
    ("text", "kind", "path", "size"),
    [
        (f'{{"a": 1, "b": "{_LONG}', "text", "$.b", len(_LONG) + 1),
        (f'{{"a": [{{"b c": "x"}}, {{"b c": "{_LONG}', "text", '$.a[1]["b c"]', len(_LONG) + 1),
        (f'["{_LONG}\\', "text", "$[0]", len(_LONG) + 2),
        (f'"{_LONG}', "text", "$", len(_LONG) + 1),
        ('{"a": ' + "9" * 40, "number", "$.a", 40),
        ('{"a": [' + '"x", ' * 50, "list", "$.a", 50),
        ('{"a": [' + '{"b": "x"}, ' * 50 + '{"b": "', "list", "$.a", 51),
        ("[" * 3 + "1, " * 50, "list", "$[0][0]", 50),
        ('{"a": {' + "".join(f'"k{i}": 1, ' for i in range(50)) + '"k', "object", "$.a", 51),
        ('{"a": ' * 20, "nesting", "$" + ".a" * 20, 20),
        ('{"a": 1, "' + "k" * 50, "object", "$", 2),
        ("", "nothing", "", 0),
        ("\n ", "nothing", "", 0),
        ('{"a', "object", "$", 1),
        ("{", "object", "$", 0),
        ('{"a": "x", "b"', "object", "$", 2),
        ('{"\\u0061\\"": [' + "1," * 20, "list", '$["a\\""]', 20),
    ],
)
def test_the_part_that_went_on(text: str, kind: str, path: str, size: int) -> None:
    part = find_open_part(text)
    assert part is not None
    assert (part.kind, part.path, part.size) == (kind, path, size)
    assert part.kind in KINDS
    assert path in part.short


@pytest.mark.parametrize("value", [{}, [], {"a": [1, {"b": "}"}]}, "x", 12, "a\\", None])
def test_whole_json_has_no_open_part(value: object) -> None:
    assert find_open_part(json.dumps(value)) is None
    assert find_open_part(json.dumps(value, indent=2) + "\n") is None


def test_every_cut_of_json_is_named() -> None:
    text = json.dumps({"a": [1, {"b": 'é\\"x'}, [True, None]], "c": {"d": {}}})
    for length in range(1, len(text)):
        part = find_open_part(text[:length])
        assert part is not None, text[:length]
        assert str(part)


@pytest.mark.parametrize("part", ["[", "[1,", '{"a":', '"x",', "[],", "1 "])
def test_a_long_answer_is_not_gone_through_in_steps_of_python(part: str) -> None:
    """The front end serves nobody else while it looks."""
    num_steps = 0

    def count(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1

    sys.setprofile(count)
    try:
        find_open_part("[" + part * 30_000)
    finally:
        sys.setprofile(None)
    assert num_steps < 10_000


def test_a_long_path_is_cut() -> None:
    part = find_open_part(json.dumps({"k" * 900: 1})[:-2] + f'"{_LONG * 9}')
    assert part is not None
    assert len(part.short) < 200
