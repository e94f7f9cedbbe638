"""Prompts end where the answer's first word stands, whatever the chat format is."""

from typing import Any

import pytest

from tests.tokenizers.family_tokenizers import byte_level, spaced
from vllm.entrypoints.decisions.input_items import read_input
from vllm.entrypoints.decisions.openai_body import read_questions
from vllm.entrypoints.decisions.prompts import PromptMaker, PromptSet
from vllm.entrypoints.decisions.question_format import QuestionFormat
from vllm.exceptions import ContextLengthError
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.literal_text import LiteralText

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}[assistant]"
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENS = "<think>\n"
THINKER = ParserChoice(reasoning="qwen3")
CASES = [
    (TURNS, ParserChoice(), ""),
    (TURNS + SWITCH, THINKER, "<think>\n\n</think>\n\n"),
    # It thinks whatever it is told: the thought is closed. Templates lose their last line break.
    (TURNS + OPENS, THINKER, "<think>\n</think>\n\n"),
    # Nothing says whether it will: an empty thought is written.
    (TURNS, THINKER, "<think>\n\n</think>\n\n"),
    (TURNS, ParserChoice("openai_gptoss", "openai"), "<|channel|>final<|message|>"),
]
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it red?"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": True}, {"value": "true"}]},
    {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
]


def make(
    given: Any,
    template: str = TURNS,
    parsers: ParserChoice = CASES[0][1],
    tokenizer: Tokenizer | None = None,
    questions: list[dict[str, Any]] | None = None,
    most: int = 10_000,
) -> tuple[PromptSet, list[str]]:
    tokenizer = tokenizer or byte_level()
    encoder = JinjaChatEncoder(tokenizer, template, LiteralText(tokenizer))
    maker = PromptMaker(read_input(given), QuestionFormat(encoder, tokenizer, parsers, {}, most))
    read, _ = read_questions(questions or QUESTIONS)
    found = maker.make(read, 1, lambda: True)
    texts = [tokenizer.decode(p.token_ids, skip_special_tokens=False) for p in found.prompts]
    return found, texts


@pytest.mark.parametrize(("template", "parsers", "end"), CASES)
def test_the_answer_is_next(template: str, parsers: ParserChoice, end: str) -> None:
    found, texts = make("A red lamp.", template, parsers)
    for text in texts:
        assert text.startswith("[user]A red lamp.\n\nQuestion about the above:\n")
        assert text.endswith(f"Reply with the letter of one option only.[end][assistant]{end}")
    assert 'A. true\nB. "true"\n' in texts[1]
    assert "Options, from the lowest to the highest:\nA. a\nB. b\n" in texts[2]
    tokenizer = byte_level()
    assert found.prompts[0].trie.paths == tuple((tokenizer.encode(x)[0],) for x in "AB")


def test_a_question_changes_no_token_of_the_input() -> None:
    """Whatever it begins with: a text that would join the input's last token otherwise."""
    questions = [{"type": "predicate", "instructions": text} for text in ("\n\nx", " x", ".", "é")]
    for tokenizer in (byte_level(), spaced()):
        alone = [
            make("It ends with a dot.", tokenizer=tokenizer, questions=[q])[0] for q in questions
        ]
        together, _ = make("It ends with a dot.", tokenizer=tokenizer, questions=questions)
        assert [p.token_ids for p in together.prompts] == [s.prompts[0].token_ids for s in alone]
        heads = {tuple(s.prompts[0].token_ids[: s.junctions[0]]) for s in alone}
        assert len(heads) == 1
        assert together.junctions[0] == len(next(iter(heads)))


def test_what_the_client_spells_stays_text() -> None:
    special = next(iter(byte_level().special_texts), None)
    assert special is not None
    mark = "\ufdd0"
    questions = [{"type": "predicate", "instructions": f"Is {special} or {mark} there?"}]
    found, (text,) = make(f"Look: {special} {mark} end", questions=questions)
    assert text.count(special) == 2
    assert text.count(mark) == 2
    ids = found.prompts[0].token_ids
    assert byte_level().token_to_id(special) not in ids[1:]


def test_an_input_that_ends_with_an_answer_gets_a_turn_behind_it() -> None:
    items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    _, texts = make(items)
    assert texts[0].startswith("[user]Hi[end][assistant]Ho[end][user]Question about the above:\n")


def test_labels_count_for_the_length() -> None:
    choices = [{"value": str(i)} for i in range(40)]
    questions = [{"type": "choice", "instructions": "Which?", "choices": choices}]
    found, _ = make("x", questions=questions)
    (prompt,) = found.prompts
    longest = len(prompt.token_ids) + prompt.trie.depth
    assert prompt.trie.depth == 1
    make("x", questions=questions, most=longest)
    with pytest.raises(ContextLengthError, match=r"^questions\[0\]: "):
        make("x", questions=questions, most=longest - 1)
