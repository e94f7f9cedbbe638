from typing import Any

import pytest

from vllm.utils.json_references import follow_reference

DOCUMENT: dict[str, Any] = {
    "$defs": {"a/b": {"type": "string"}, "c~d": 1, "e f": 2},
    "anyOf": [{"const": 1}, {"const": 2}],
    "anchor": 3,
}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", DOCUMENT),
        ("#/", DOCUMENT),
        ("#/$defs/a~1b", {"type": "string"}),
        ("#/%24defs/c~0d", 1),
        ("#/$defs/e%20f", 2),
        ("#/anyOf/1", {"const": 2}),
        ("#/anyOf/2", None),
        ("#/anyOf/x", None),
        ("#/$defs/none", None),
        ("#/anchor/more", None),
        ("#anchor", None),
        ("other.json#/anchor", None),
    ],
)
def test_what_a_reference_points_to(reference: str, found: Any) -> None:
    assert follow_reference(DOCUMENT, reference) == found
