import pytest

from tests.tokenizers.family_tokenizers import FAMILIES
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.part_openers import find_openers

OPENERS = {
    "byte-level": "<|im_start|>",
    "bpe": "<start_of_turn>",
    "unigram": "<start_of_turn>",
}
CHAT = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Hi <|im_start|> <start_of_turn>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Again"},
]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_messages_end_where_the_next_begins(family: str) -> None:
    tokenizer = FAMILIES[family]()
    encoder = JinjaChatEncoder(tokenizer, tokenizer.chat_template)
    plain = [{**m, "content": m["content"].split("<")[0]} for m in CHAT]
    prompt = encoder.encode_chat(plain, ChatOptions())
    opener = tokenizer.token_to_id(OPENERS[family])
    begins = [i for i, token_id in enumerate(prompt.token_ids) if token_id == opener]
    # The first message's own, and the answer's, are no ends of a message that others share first.
    assert sorted(prompt.part_ends) == begins[1:]
    assert prompt.part_ends[:2] == (begins[1], begins[2])
    # Another conversation with the same system prompt has it in common up to the first.
    other = encoder.encode_chat([plain[0], {"role": "user", "content": "Else"}], ChatOptions())
    end = prompt.part_ends[0]
    assert other.token_ids[:end] == prompt.token_ids[:end]


def test_a_format_that_marks_no_messages_tells_none() -> None:
    tokenizer = FAMILIES["byte-level"]()
    for template in (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{{ messages[0].content if messages | length == 1 else raise_exception('one only') }}",
    ):
        encoder = JinjaChatEncoder(tokenizer, template)
        assert encoder.encode_chat(CHAT[:1], ChatOptions()).part_ends == ()


def test_the_first_of_those_that_stand_in_every_message() -> None:
    def encode(messages: object) -> list[int]:
        return [1, 7, 50, 8, 60, 9, 7, 51, 8, 61, 9, 7, 50, 8, 62, 9]

    assert find_openers(encode, {1, 7, 8, 9}) == {7}
    assert find_openers(encode, {1}) == frozenset()
