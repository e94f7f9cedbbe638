"""A prompt's text and its answer's, joined where a character spans both."""

import pytest
import tokenizers
from tokenizers import decoders, models

from tests.tokenizers.family_tokenizers import byte_level, spaced
from vllm.entrypoints.openai.echoed_text import EchoedText
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.detokenizer import make_text_stream

TEXTS = [
    *(
        "a🏔b",
        "é",
        "漢字",
        "🏔",
        "x",
        "a é 漢 🏔 b",
        "e\u0301",
        "\ufffd",
        "🏔🏔",
        "naïve ½",
        "<|im_end|>é",
    ),
    *("👩‍👩‍👧", "\u07ff\u0800\uffff"),
]


def byte_fallback() -> Tokenizer:
    """Letters, and bytes for all else, as Llama 2 and Gemma."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    vocab = {piece: i for i, piece in enumerate([*pieces, "\u2581"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend)


def joined(tokenizer: Tokenizer, ids: list[int], cut: int, step: int) -> str:
    """What clients read of a prompt that ends at ``cut``, its answer in outputs of some tokens."""
    stream = make_text_stream(tokenizer, ids[:cut], skip_special_tokens=False)
    echoed = EchoedText(tokenizer, ids[:cut], None)
    read = ""
    answer = ids[cut:]
    for at in range(0, len(answer), step):
        part = answer[at : at + step]
        text = "".join(map(stream.push, part))
        is_last = at + step >= len(answer)
        read += echoed.push(part, text + (stream.finish() if is_last else ""), is_last=is_last)
    return read


@pytest.mark.parametrize("make", [byte_level, byte_fallback, spaced])
def test_together_it_is_the_text_of_all_tokens(make) -> None:
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text, False)
        for cut in range(1, len(ids)):
            for step in (1, 2, 99):
                assert joined(tokenizer, ids, cut, step) == tokenizer.decode(ids), (text, cut, step)


@pytest.mark.parametrize("tail", [b"\xf0\x9f", b"\xe6", b"\xc3", b"\xf0\x9f\x8f"])
@pytest.mark.parametrize(
    "head", [b"a", b"\x80a", b"\xc3\xa9", b"\xff", b"\x8f\x94\x94", b"\xf0\x9f\x8f\x94"]
)
def test_bytes_that_are_no_character_are_marked_as_in_one_text(tail: bytes, head: bytes) -> None:
    tokenizer = byte_level()
    by_bytes = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [by_bytes[bytes([byte])] for byte in b"x" + tail + head]
    cut = 1 + len(tail)
    for step in (1, 2, 99):
        assert joined(tokenizer, ids, cut, step) == (b"x" + tail + head).decode(errors="replace")


def test_a_prompt_given_as_text_is_shown_as_it_is() -> None:
    tokenizer = byte_level()
    echoed = EchoedText(tokenizer, tokenizer.encode("a\ufffd"), "a\ufffd")
    assert echoed.push([], "b", is_last=False) == "a\ufffdb"
    assert echoed.push([], "c", is_last=True) == "c"


def test_a_prompt_without_an_answer_keeps_its_mark() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🏔")[:-1]
    assert EchoedText(tokenizer, ids, None).push([], "", is_last=True) == "a\ufffd"
