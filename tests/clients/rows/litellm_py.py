"""litellm: OpenAI's and Anthropic's routes, a full context."""

import json
from typing import Any

import litellm
from client import ASK, MODEL, SCHEMA, TOO_LONG, TURNS, URL, V1, Row, run

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]


def agent(row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        answer = litellm.completion(
            model=f"openai/{MODEL}", api_base=V1, api_key="none", messages=messages, tools=TOOLS
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        row.cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        row.tokens += answer.usage.completion_tokens
        result = row.look_up(**json.loads(call.function.arguments))
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
    row.check_agent()


def _overflow(row: Row, **fields: Any) -> None:
    try:
        litellm.completion(
            api_key="none",
            messages=[{"role": "user", "content": TOO_LONG}],
            max_tokens=20,
            **fields,
        )
    except litellm.ContextWindowExceededError:
        row.shown = "ContextWindowExceededError"
        return
    raise AssertionError("no error")


def embeddings(row: Row) -> None:
    made = litellm.embedding(
        model=f"openai/{MODEL}", api_base=V1, api_key="none", input=["One two", "three"]
    )
    assert len(made.data) == 2
    row.shown = f"{len(made.data[0]['embedding'])} dimensions"


def rerank(row: Row) -> None:
    """By the shapes of Cohere's API and of Jina's."""
    for provider, base in (("cohere", URL), ("jina_ai", V1)):
        ranked = litellm.rerank(
            model=f"{provider}/{MODEL}",
            api_base=f"{base}/rerank" if provider == "jina_ai" else base,
            api_key="none",
            query="One?",
            documents=["One two", "three"],
            top_n=1,
        )
        assert len(ranked.results) == 1
        row.shown = f"{ranked.results[0]['relevance_score']:.3f}"


run(
    {
        "chat, 10 turns": agent,
        "embeddings": embeddings,
        "rerank, as Cohere's and Jina's": rerank,
        "context overflow": lambda row: _overflow(row, model=f"openai/{MODEL}", api_base=V1),
        "context overflow, messages": lambda row: _overflow(
            row, model=f"anthropic/{MODEL}", api_base=URL
        ),
    },
    "litellm",
)
