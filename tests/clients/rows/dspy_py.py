"""dspy: its own format of fields, JSON, ReAct with a tool."""

from typing import Literal

import dspy
from client import SAID, WORKER, WORKER_KEY, WORKER_TURNS, WORKER_V1, Row, run


class Ask(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Judge(dspy.Signature):
    """Judge."""

    question: str = dspy.InputField()
    ok: Literal[True] = dspy.OutputField()


def _worker() -> dspy.LM:
    return dspy.LM(f"openai/{WORKER}", api_base=WORKER_V1, api_key=WORKER_KEY, cache=False)


def predict(row: Row) -> None:
    with dspy.context(lm=_worker(), adapter=dspy.ChatAdapter()):
        answer = dspy.Predict(Ask)(question="What is found?").answer
    assert answer == SAID, answer
    row.shown = answer


def by_json(row: Row) -> None:
    with dspy.context(lm=_worker(), adapter=dspy.JSONAdapter()):
        ok = dspy.Predict(Judge)(question="Are you there?").ok
    assert ok is True
    row.shown = "ok=True"


def react(row: Row) -> None:
    def look_up(key: str, days: int) -> str:
        """Look a record up."""
        return row.look_up(key, days)

    with dspy.context(lm=_worker(), adapter=dspy.ChatAdapter()):
        done = dspy.ReAct(Ask, tools=[look_up])(question="What is found?")
    assert done.answer == SAID, done
    assert len(row.calls) == WORKER_TURNS, row.calls
    row.shown = done.answer


run({"predict": predict, "json adapter": by_json, "react": react}, "dspy")
