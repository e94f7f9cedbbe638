"""llama-index: agents on OpenAI's chats and on Messages, streams, structured output."""

import asyncio
from typing import Any, Literal

from client import (
    MODEL,
    SAID,
    URL_WORKER,
    V1,
    WORKER,
    WORKER_CALLS,
    WORKER_KEY,
    WORKER_V1,
    Row,
    run,
)
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

CHAT: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True}


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _worker() -> OpenAILike:
    return OpenAILike(
        model=WORKER, api_base=WORKER_V1, api_key=WORKER_KEY, context_window=131072, **CHAT
    )


def _run_agent(row: Row, llm: Any) -> None:
    def look_up(key: str, days: int) -> str:
        """Look a record up."""
        return row.look_up(key, days)

    async def work() -> str:
        agent = FunctionAgent(tools=[look_up], llm=llm)
        return str(await agent.run("Find the records."))

    said = asyncio.run(work())
    assert said == SAID, said
    assert row.calls == WORKER_CALLS, row.calls
    row.shown = said


def chat_agent(row: Row) -> None:
    _run_agent(row, _worker())


def messages_agent(row: Row) -> None:
    llm = Anthropic(model=WORKER, base_url=URL_WORKER, api_key=WORKER_KEY, max_tokens=500)
    # The client looks the context's size up in a list of names that it knows.
    type(llm).metadata = property(lambda _: _worker().metadata)
    _run_agent(row, llm)


def streamed(row: Row) -> None:
    parts = [part.delta for part in _worker().stream_complete("Find the records.")]
    assert "".join(parts).strip() == SAID, parts
    row.shown = f"{len(parts)} parts"
    assert len(parts) > 1


def structured(row: Row) -> None:
    llm = OpenAILike(
        model=MODEL, api_base=V1, api_key="none", should_use_structured_outputs=True, **CHAT
    )
    reply = llm.as_structured_llm(Reply).complete("Are you there?").raw
    assert reply == Reply(ok=True)
    row.shown = repr(reply)


run(
    {
        "chat, agent": chat_agent,
        "messages, agent": messages_agent,
        "completion, streamed": streamed,
        "structured output": structured,
    },
    "llama-index-core",
)
