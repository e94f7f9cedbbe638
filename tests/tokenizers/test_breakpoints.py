import pytest

from tests.tokenizers.family_tokenizers import FAMILIES
from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.breakpoints import Breakpoint, find_breakpoints, read_cache_control
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder

CHAT = [
    {
        "role": "system",
        "content": [
            {"type": "text", "text": "You help."},
            {"type": "text", "text": "Today is Sunday."},
        ],
    },
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello", "reasoning": "greet"},
    {"role": "user", "content": "Again"},
]


def encoders():
    for name, make in FAMILIES.items():
        tokenizer = make()
        yield name, tokenizer, JinjaChatEncoder(tokenizer, tokenizer.chat_template)
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    yield "deepseek-v4", tokenizer, DeepseekV4ChatEncoder(tokenizer)


@pytest.fixture(params=encoders(), ids=lambda case: case[0])
def case(request):
    return request.param


def test_a_place_is_where_prompts_that_go_on_otherwise_part(case):
    _, tokenizer, encoder = case
    prompt = encoder.encode_chat(CHAT, ChatOptions())
    places = [Breakpoint(0, 0), Breakpoint(0, 1), Breakpoint(0), Breakpoint(1, ttl_s=300.0)]
    found = find_breakpoints(encoder, CHAT, ChatOptions(), prompt, places)
    shown = {tokenizer.decode(prompt.token_ids[:offset]): ttl for offset, ttl in found.items()}
    assert list(shown.values()) == [None, None, 300.0]
    first, system, user = shown
    assert first.rstrip().endswith("You help.")
    assert "Sunday." in system
    assert "Hi" not in system
    assert "Hi there" in user
    assert "Hello" not in user
    other = [CHAT[0], {"role": "user", "content": "Quite another question."}]
    shared = encoder.encode_chat(other, ChatOptions()).token_ids
    offset = list(found)[1]
    assert shared[:offset] == prompt.token_ids[:offset]
    assert shared[offset] != prompt.token_ids[offset]


def test_the_last_message_ends_with_the_prompt(case):
    _, _, encoder = case
    prompt = encoder.encode_chat(CHAT, ChatOptions())
    found = find_breakpoints(encoder, CHAT, ChatOptions(), prompt, [Breakpoint(3, ttl_s=1.0)])
    assert found == {len(prompt.token_ids): 1.0}


def test_of_two_marks_at_one_place_the_longer_holds():
    tokenizer = FAMILIES["byte-level"]()
    encoder = JinjaChatEncoder(tokenizer, tokenizer.chat_template)
    prompt = encoder.encode_chat(CHAT, ChatOptions())
    places = [Breakpoint(1, ttl_s=3600.0), Breakpoint(1), Breakpoint(1, ttl_s=300.0)]
    found = find_breakpoints(encoder, CHAT, ChatOptions(), prompt, places)
    assert list(found.values()) == [3600.0]


def test_a_format_that_refuses_the_altered_chat_gives_no_place():
    tokenizer = FAMILIES["byte-level"]()
    picky = "{% for m in messages %}{{ m.content if m.content != '\u241e' else 1 / 0 }}{% endfor %}"
    encoder = JinjaChatEncoder(tokenizer, picky)
    prompt = encoder.encode_chat(CHAT, ChatOptions())
    assert find_breakpoints(encoder, CHAT, ChatOptions(), prompt, [Breakpoint(0)]) == {}


def test_cache_control():
    assert read_cache_control({"type": "ephemeral"}, "x") is None
    assert read_cache_control({"type": "ephemeral", "ttl": "5m"}, "x") == 300.0
    assert read_cache_control({"type": "ephemeral", "ttl": "1h"}, "x") == 3600.0


@pytest.mark.parametrize(
    "value", [True, {}, {"type": "eternal"}, {"type": "ephemeral", "ttl": "2h"}, {"ttl": 5}]
)
def test_other_cache_controls_are_refused(value):
    with pytest.raises(UserInputError, match="cache_control") as error:
        read_cache_control(value, "messages[0].cache_control")
    assert error.value.param == "messages[0].cache_control"
