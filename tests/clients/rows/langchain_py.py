"""langchain-openai, langchain-anthropic and langgraph."""

from typing import Any, Literal

from client import ASK, MODEL, TOO_LONG, TURNS, URL, V1, Row, run
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _openai(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, **fields)


def _anthropic() -> ChatAnthropic:
    return ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=500)


def _agent(row: Row, model: Any) -> None:
    @tool
    def look_up(key: str, days: int) -> str:
        """Look a record up."""
        return row.look_up(key, days)

    graph = create_react_agent(model, [look_up])
    try:
        for state in graph.stream(
            {"messages": [("user", ASK)]}, {"recursion_limit": 2 * TURNS}, stream_mode="values"
        ):
            last = state["messages"][-1]
            usage = getattr(last, "usage_metadata", None)
            if usage:
                row.cached.append((usage.get("input_token_details") or {}).get("cache_read", 0))
                row.tokens += usage["output_tokens"]
    except GraphRecursionError:
        pass  # the model never stops calling
    row.check_agent(len(row.calls))
    assert len(row.calls) >= TURNS - 1


def _overflow(row: Row, model: Any) -> None:
    try:
        model.invoke(TOO_LONG)
    except ContextOverflowError as error:
        row.shown = type(error).__name__
        return
    raise AssertionError("no error")


def _structured(row: Row) -> None:
    made = _openai().with_structured_output(Reply, method="json_schema").invoke("Is it?")
    assert made == Reply(ok=True)
    row.shown = repr(made)


def _embeddings(row: Row) -> None:
    # It would else cut texts into tokens of OpenAI's own models.
    model = OpenAIEmbeddings(
        model=MODEL, base_url=V1, api_key="none", check_embedding_ctx_length=False
    )
    one, two = model.embed_documents(["One two", "three"])
    # The rows' model says what its script has, whatever was read: its vectors may be equal.
    assert model.embed_query("One two") == one
    assert len(two) == len(one)
    row.shown = f"{len(one)} dimensions"


def _decisions(row: Row) -> None:
    model = OpenAIDecisions(model=MODEL, base_url=V1, api_key="none", max_retries=0)
    asked = {
        "red": Predicate(instructions="Is it red?"),
        "which": Choice(instructions="Which?", choices={"lamp": None, "chair": "to sit on"}),
        "bright": Score(instructions="How bright?", levels=["dark", "bright"]),
    }
    told = model.invoke({"input": "A red lamp. " * 40, "questions": asked})
    assert set(told.answers) == set(asked), told
    chosen = told.choices["which"]
    assert chosen.choice in ("lamp", "chair")
    assert abs(sum(chosen.probabilities.values()) - 1) < 0.01
    assert 0 <= told.scores["bright"].score <= 1
    row.shown = f"red {told.predicates['red'].probability:.2f}, {told.usage.input_tokens} tokens"


run(
    {
        "ChatOpenAI, langgraph agent": lambda row: _agent(row, _openai()),
        "ChatOpenAI, responses": lambda row: _agent(row, _openai(use_responses_api=True)),
        "ChatAnthropic, langgraph agent": lambda row: _agent(row, _anthropic()),
        "OpenAIEmbeddings": _embeddings,
        "OpenAIDecisions": _decisions,
        "structured output": _structured,
        "context overflow": lambda row: _overflow(row, _openai()),
        "context overflow, messages": lambda row: _overflow(row, _anthropic()),
    },
    "langchain-core",
)
