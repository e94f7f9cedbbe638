"""instructor: an answer of a type, by a tool, by a schema, by JSON."""

from typing import Literal

import instructor
import openai
from client import MODEL, V1, Row, run
from pydantic import BaseModel


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _made(row: Row, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key="none"), mode=mode)
    made = client.chat.completions.create(
        model=MODEL, response_model=Reply, messages=[{"role": "user", "content": "Is it?"}]
    )
    assert made.ok is True
    row.shown = repr(made)


run(
    {
        "tools": lambda row: _made(row, instructor.Mode.TOOLS),
        "json schema": lambda row: _made(row, instructor.Mode.JSON_SCHEMA),
    },
    "instructor",
)
