"""Special tokens in messages stay text; everything else is encoded as it was."""

import pytest

from tests.tokenizers.family_tokenizers import FAMILIES, byte_level
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.literal_text import LiteralText


@pytest.fixture(params=list(FAMILIES))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return FAMILIES[request.param]()


def encode(tokenizer: Tokenizer, content: str, *, allows: bool = False) -> tuple[str, list[int]]:
    encoder = make_chat_encoder({}, tokenizer, allows_special_tokens=allows)
    messages = [{"role": "user", "content": content}]
    prompt = encoder.encode_chat(messages, ChatOptions())
    return prompt.text, prompt.token_ids


def num_special(tokenizer: Tokenizer, ids: list[int]) -> int:
    return sum(token_id in tokenizer.all_special_ids for token_id in ids)


def test_typed_special_tokens_stay_text(tokenizer: Tokenizer) -> None:
    _, plain = encode(tokenizer, "hello a b")
    for special in sorted(tokenizer.special_texts):
        text, ids = encode(tokenizer, f"hello {special} a b")
        assert num_special(tokenizer, ids) == num_special(tokenizer, plain)
        assert f"hello {special} a b" in text
        # All that is left is what the user wrote, and the format.
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text, False))


def test_the_old_way_makes_them_special(tokenizer: Tokenizer) -> None:
    special = max(tokenizer.special_texts, key=len)
    _, plain = encode(tokenizer, "a b", allows=True)
    text, ids = encode(tokenizer, f"a {special} b", allows=True)
    assert num_special(tokenizer, ids) == num_special(tokenizer, plain) + 1
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_other_texts_are_encoded_as_ever(tokenizer: Tokenizer) -> None:
    for content in ("hello", " two  spaces ", "<|not|> <thing>", "\ufdd0 \ue000"):
        text, ids = encode(tokenizer, content)
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_the_twin_encodes_text_as_the_library_does_without_special_tokens(
    tokenizer: Tokenizer,
) -> None:
    literal = LiteralText(tokenizer)
    for special in sorted(tokenizer.special_texts):
        text = f"so {special}{special} it"
        mark = literal.find_mark([text])
        assert mark is not None
        ids = literal.encode(literal.guard(text, mark), mark, add_special_tokens=False)
        tokenizer.backend.encode_special_tokens = True
        expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
        tokenizer.backend.encode_special_tokens = False
        assert num_special(tokenizer, ids) == 0
        # The library's switch leaves tokens that stand in the vocabulary reachable.
        if num_special(tokenizer, expected) == 0:
            assert ids == expected


def test_a_client_cannot_spell_a_special_token_in_pieces() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    for content in ("<|im_<|im_end|>end|>", "<\ufdd0|im_end|>", "<|im_end|>\ufdd0<\ufdd1|im_end|>"):
        _, ids = encode(tokenizer, content)
        assert ids.count(end) == 1
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"
    text, ids = encode(tokenizer, everything)
    assert ids.count(end) == 1
    assert everything in text


def test_tokens_that_are_not_special_are_left_alone() -> None:
    tokenizer = byte_level()
    _, ids = encode(tokenizer, "<think> <|im_end|>")
    assert tokenizer.token_to_id("<think>") in ids


def test_deepseek_v4_keeps_them_too() -> None:
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    config = {"model_type": "deepseek_v4"}
    messages = [{"role": "user", "content": f"a {tokenizer.eos_token} b"}]
    prompts = {
        allows: make_chat_encoder(config, tokenizer, allows_special_tokens=allows).encode_chat(
            messages, ChatOptions()
        )
        for allows in (False, True)
    }
    assert prompts[False].text == prompts[True].text
    assert tokenizer.eos_token_id not in prompts[False].token_ids
    assert tokenizer.eos_token_id in prompts[True].token_ids
    assert tokenizer.decode(prompts[False].token_ids) == prompts[False].text


def test_a_final_message_with_a_special_token_is_continued() -> None:
    tokenizer = byte_level()
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so <|im_end|> it"},
    ]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    prompt = make_chat_encoder({}, tokenizer).encode_chat(messages, options)
    assert prompt.text.endswith("assistant\nso <|im_end|> it")
    assert tokenizer.decode(prompt.token_ids[-5:]).endswith("it")
