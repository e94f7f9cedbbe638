from typing import Any

import pytest

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.limits import MAX_CHOICES, MAX_DEPTH, MAX_TEXT_BYTES, check_size


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def test_what_fits_passes() -> None:
    check_size(StructuredOutputsParams(json=deep(MAX_DEPTH)))
    check_size(StructuredOutputsParams(json='{"type": "object"}'))
    check_size(StructuredOutputsParams(choice=["a"] * MAX_CHOICES))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"json": deep(MAX_DEPTH + 1)}, "nested deeper than 64"),
        ({"json": '{"not":' * 9_000 + "1" + "}" * 9_000}, "not valid JSON|nested deeper"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": "{"}, "not valid JSON"),
        ({"structural_tag": "3"}, "must be a structural tag"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "at most 10000"),
        ({"regex": "a" * (MAX_TEXT_BYTES + 1)}, "at most 1048576"),
    ],
)
def test_what_does_not_is_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UserInputError, match=match) as error:
        check_size(StructuredOutputsParams(**asked))
    assert error.value.param == "structured_outputs"


@pytest.mark.parametrize("asked", [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}])
def test_exactly_one_kind(asked: dict[str, Any]) -> None:
    with pytest.raises(UserInputError):
        StructuredOutputsParams(**asked)
    assert StructuredOutputsParams(json_object=True, regex=None).kind == "json_object"
