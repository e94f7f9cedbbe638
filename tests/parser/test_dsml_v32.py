"""DeepSeek-V3.2's calls: DeepSeek-V4's with another outer tag."""

import json

import pytest

from tests.parser.reading import TOOLS, D, calls_of, read
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.registry import ParserChoice, choose_parsers
from vllm.parser.written_calls import CALL_WRITERS
from vllm.tokenizers.tool_calls import MessageCall

CHOICE = ParserChoice("deepseek_v32", "deepseek_v32")
V31_TEMPLATE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜></think>"


def test_calls_are_written_and_forced_as_they_are_read() -> None:
    call = MessageCall("c", "find", '{"text": "a < b", "limit": 2}')
    written = CALL_WRITERS["deepseek_v32"]([call])
    assert written.startswith(f"<{D}function_calls>\n<{D}invoke")
    answer = read(CHOICE, f"hm</think>So:\n\n{written}", in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("hm", "So:")
    assert calls_of(answer) == [("find", call.arguments)]
    forced = answer_tag("deepseek_v32", AnswerGrammar(TOOLS))
    shown = json.dumps(json.loads(forced), ensure_ascii=False)
    assert f"<{D}function_calls>" in shown
    assert "tool_calls" not in shown


@pytest.mark.parametrize(
    ("model_type", "template", "choice"),
    [
        ("deepseek_v32", "", CHOICE),
        ("deepseek_v3", f"{{{{ '<{D}function_calls>' }}}}</think>", CHOICE),
        ("deepseek_v32", f"{{{{ '<' + '{D}' + 'function_calls>' }}}}</think>", CHOICE),
        ("deepseek_v4", "", ParserChoice("deepseek_v4", "deepseek_v4")),
        # V3.2-Exp's and V3.1's, whose calls are of another kind, and R1's.
        ("deepseek_v32", V31_TEMPLATE, ParserChoice("deepseek_v4", "deepseek_v31")),
        ("deepseek_v3", V31_TEMPLATE, ParserChoice("deepseek_v4", "deepseek_v31")),
        ("deepseek_v3", f"{V31_TEMPLATE}```json", ParserChoice("deepseek_v4", "deepseek_v3")),
        # Of R1's distills, which were not trained to call.
        ("qwen2", f"{V31_TEMPLATE}```json", ParserChoice("qwen3", "none")),
    ],
)
def test_the_model_or_its_template_chooses(
    model_type: str, template: str, choice: ParserChoice
) -> None:
    assert choose_parsers(model_type, template) == choice
