"""outlines: choices, patterns, types and grammars, as OpenAI's server and as vLLM's; streams."""

import enum
from typing import Any, Literal

import openai
import outlines
from client import MODEL, V1, Row, run
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

client = openai.OpenAI(base_url=V1, api_key="none", max_retries=0)


class Reply(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")
    ok: Literal[True]
    kind: Literal["lamp", "chair"]


class Kind(enum.Enum):
    """Words that may be said."""

    LAMP = "lamp"
    CHAIR = "chair"


def _vllm() -> Any:
    return outlines.from_vllm(client, MODEL)


def by_type(row: Row) -> None:
    said = _vllm()("Are you there?", Reply)
    row.shown = said
    assert Reply.model_validate_json(said).ok


def as_openai(row: Row) -> None:
    said = outlines.from_openai(client, MODEL)("Are you there?", Reply)
    row.shown = said
    assert Reply.model_validate_json(said).ok


def choice(row: Row) -> None:
    said = _vllm()("Which?", Kind)
    row.shown = said
    assert said in ("lamp", "chair"), said


def regex(row: Row) -> None:
    said = _vllm()("Which?", Regex("[0-9]{3}-é"))
    row.shown = said
    assert len(said) == 5
    assert said.endswith("-é")


def grammar(row: Row) -> None:
    said = _vllm()("Which?", CFG('start: "a" ("b" | "c")'))
    row.shown = said
    assert said in ("ab", "ac"), said


def streamed(row: Row) -> None:
    parts = list(_vllm().stream("Are you there?", Reply))
    row.shown = "".join(parts)
    assert len(parts) > 1
    assert Reply.model_validate_json("".join(parts)).ok


run(
    {
        "vllm, type": by_type,
        "openai, type": as_openai,
        "vllm, choice": choice,
        "vllm, regex": regex,
        "vllm, grammar": grammar,
        "vllm, type, streamed": streamed,
    },
    "outlines",
)
