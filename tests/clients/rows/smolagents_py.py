"""smolagents: agents whose every step must be a call, one that writes code, streams."""

from client import SAID, WORKER, WORKER_CALLS, WORKER_KEY, WORKER_TURNS, WORKER_V1, Row, run
from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.monitoring import LogLevel


def _model() -> OpenAIServerModel:
    return OpenAIServerModel(model_id=WORKER, api_base=WORKER_V1, api_key=WORKER_KEY)


def _tool(row: Row) -> Tool:
    class LookUp(Tool):
        name = "look_up"
        description = "Looks a record up."
        inputs = {  # noqa: RUF012 (the base class says so)
            "key": {"type": "string", "description": "Its key."},
            "days": {"type": "integer", "description": "How old it may be."},
        }
        output_type = "string"

        def forward(self, key: str, days: int) -> str:
            return row.look_up(key, days)

    return LookUp()


def _check(row: Row, agent: ToolCallingAgent, said: str) -> None:
    assert said.strip() == SAID, said
    assert row.calls == WORKER_CALLS, row.calls
    row.tokens = agent.monitor.total_output_token_count
    row.shown = said.strip()


def tools(row: Row) -> None:
    agent = ToolCallingAgent(
        tools=[_tool(row)],
        model=_model(),
        max_steps=WORKER_TURNS,
        verbosity_level=LogLevel.OFF,
    )
    _check(row, agent, agent.run("Find the records."))


def streamed(row: Row) -> None:
    agent = ToolCallingAgent(
        tools=[_tool(row)],
        model=_model(),
        max_steps=WORKER_TURNS,
        verbosity_level=LogLevel.OFF,
        stream_outputs=True,
    )
    *_, last = agent.run("Find the records.", stream=True)
    _check(row, agent, last.output)


def code(row: Row) -> None:
    agent = CodeAgent(tools=[_tool(row)], model=_model(), verbosity_level=LogLevel.OFF)
    said = agent.run("Find the records.")
    assert said == SAID, said
    assert len(row.calls) == WORKER_TURNS, row.calls
    row.shown = said


run(
    {"required calls": tools, "required calls, streamed": streamed, "code": code},
    "smolagents",
)
