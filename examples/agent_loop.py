"""An agent that calls a tool, with the ``openai`` client: ``make serve``, then run this.

Each step of the loop sends the whole chat again; what was sent before comes from the prefix cache.
"""

import json
import time
from typing import Any

from openai import OpenAI

CODES = {"Mira": "4827", "Oscar": "1930", "Lena": "7755"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_access_code",
        "description": "Find the access code of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


def find_access_code(name: str) -> str:
    """What the tool returns."""
    return CODES.get(name, "unknown")


def main() -> None:
    """Ask for every code; the model calls the tool and answers from its result."""
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    for name, code in CODES.items():
        messages.append({"role": "user", "content": f"What is the access code of {name}?"})
        for _ in range(3):
            start = time.perf_counter()
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=[TOOL],  # type: ignore[list-item]
                temperature=0,
                max_tokens=160,
                extra_body={"chat_template_kwargs": {"thinking": False}},
            )
            seconds = time.perf_counter() - start
            message, usage = answer.choices[0].message, answer.usage
            assert usage is not None
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens if details else 0) or 0
            messages.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls or []
            said = [call.function.arguments for call in calls if call.type == "function"]
            print(
                f"{said or message.content!r}: {usage.prompt_tokens} prompt tokens, "
                f"{cached} cached, {seconds:.2f} s"
            )
            if not calls:
                break
            for call in calls:
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)
                result = find_access_code(str(arguments.get("name")))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(f"  (the code is {code})")


if __name__ == "__main__":
    main()
