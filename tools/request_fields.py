"""The tables of request fields in docs/apis.md: ``python -m tools.request_fields``.

They stand between two marks and are made from the routes' models and from
``vllm.entrypoints.openai.protocol.fields``.
"""

from pathlib import Path

from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.entrypoints.openai.protocol.fields import (
    CHAT,
    COMPLETIONS,
    KNOWN_FIELDS,
    MESSAGES,
    RESPONSES,
    Refused,
    WithoutEffect,
)
from vllm.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "apis.md"
_HEADER = "| field | | why, or what to do |\n|---|---|---|\n"
BEGIN, END = "<!-- request fields: begin -->\n", "<!-- request fields: end -->\n"
MODELS: dict[str, type[SamplingRequest]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
}


def make_tables() -> str:
    """Return the tables of all routes, as Markdown."""
    shared = sorted(set.intersection(*(set(model.model_fields) for model in MODELS.values())))
    sections = [f"Honoured on all four routes: {_names(shared)}.\n"]
    for route, model in MODELS.items():
        own = sorted(set(model.model_fields) - set(shared))
        known = sorted(KNOWN_FIELDS[route].items())
        rows = [
            f"| {_names([name])} | without effect | {field.why} |"
            for name, field in known
            if isinstance(field, WithoutEffect)
        ]
        rows += [
            f"| {_names([name])} | refused{_but(field)} | {field.advice} |"
            for name, field in known
            if isinstance(field, Refused)
        ]
        head = f"\n**`{route}`** honours also {_names(own)}.\n\n{_HEADER}"
        sections.append(head + "\n".join(rows) + "\n")
    return "".join(sections)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _but(field: Refused) -> str:
    return (
        f", but for {_names([str(v) or 'an empty text' for v in field.values])}"
        if field.values
        else ""
    )


def main() -> None:
    """Write the tables."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + make_tables() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
