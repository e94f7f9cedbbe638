import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.tokenizers.family_tokenizers import FAMILIES
from tests.v1.engine.fakes import make_tokenizer
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.detokenizer import (
    Detokenizer,
    find_stop_string,
    make_text_stream,
)

TOKENIZER = make_tokenizer()
EOS_ID = TOKENIZER.eos_token_id
assert EOS_ID is not None
short_text = st.text(alphabet="abcé日🙂", max_size=30)
stops = st.lists(st.text(alphabet="abcé日", min_size=1, max_size=4), max_size=3)


def byte_id(byte: int) -> int:
    return next(i for i in range(256) if TOKENIZER.token_bytes(i) == bytes([byte]))


BYTE_IDS = {byte: byte_id(byte) for byte in range(256)}


def detokenizer(*, skip_special_tokens: bool = False, **params) -> Detokenizer:
    stream = make_text_stream(TOKENIZER, [], skip_special_tokens)
    return Detokenizer(stream, SamplingParams(**params))


def run(d: Detokenizer, ids: list[int]) -> tuple[list[str], str | None]:
    """Feed ids as DELTA outputs until a stop string; return the deltas and that string."""
    deltas = []
    for i, token_id in enumerate(ids):
        stop = d.push(token_id)
        if stop is None and i == len(ids) - 1:
            stop = d.finish()
        last = stop is not None or i == len(ids) - 1
        deltas.append(d.take_text(delta=True, finished=last))
        if stop is not None:
            return deltas, stop
    return deltas, None


KINDS = {"own": lambda: TOKENIZER, **FAMILIES, "byte fallback": lambda: sentencepiece_like()}


@pytest.mark.parametrize("kind", list(KINDS))
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_deltas_join_to_the_text_decoded_at_once(kind, data, skip):
    """Of any ids: noise, special tokens and characters cut into bytes among them."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    d = Detokenizer(make_text_stream(tokenizer, [], skip), SamplingParams())
    assert "".join(run(d, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_cut_into_bytes_comes_whole():
    d = detokenizer()
    assert run(d, [BYTE_IDS[b] for b in "🙂".encode()])[0] == ["", "", "", "🙂"]


def test_an_unfinished_character_shows_at_the_end_only():
    ids = [BYTE_IDS[b] for b in "a🙂".encode()[:-1]]
    deltas, _ = run(detokenizer(), ids)
    assert deltas == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_skipped_on_request():
    ids = [BYTE_IDS[97], EOS_ID, BYTE_IDS[98]]
    assert run(detokenizer(skip_special_tokens=True), ids)[0] == ["a", "", "b"]
    assert run(detokenizer(), ids)[0] == ["a", "<eos>", "b"]


def brute_force_stop(text: str, stop_list: list[str]) -> tuple[str, str] | None:
    """The text letter by letter: it stops at the first prefix that ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop_list if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


@given(short_text, stops, st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stop_list, include, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text.encode()) - 1)), max_size=8)))
    encoded = text.encode()
    pieces = [encoded[i:j] for i, j in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]

    class Pieces:
        """A vocabulary whose tokens are these pieces."""

        is_byte_level = True
        all_special_ids = frozenset()

        @staticmethod
        def token_bytes(token_id: int) -> bytes:
            return pieces[token_id]

    params = SamplingParams(stop=stop_list, include_stop_str_in_output=include)
    d = Detokenizer(make_text_stream(Pieces, [], False), params)
    deltas, stop = run(d, list(range(len(pieces))))
    expected = brute_force_stop(text, stop_list)
    if expected is None:
        assert (stop, "".join(deltas)) == (None, text)
    else:
        assert stop == expected[1]
        assert "".join(deltas) == expected[0] + (expected[1] if include else "")
    assert d.text == "".join(deltas)


def test_no_part_of_a_stop_string_is_shown_before_it_is_sure():
    d = detokenizer(stop=["END"])
    deltas, stop = run(d, [BYTE_IDS[b] for b in b"aENbEND"])
    assert stop == "END"
    assert deltas == ["", "", "a", "E", "N", "b", ""]


def test_a_cumulative_text_never_shrinks():
    d = detokenizer(stop=["xyz"])
    shown = []
    for byte in b"xyaxyz":
        stop = d.push(BYTE_IDS[byte])
        shown.append(d.take_text(delta=False, finished=stop is not None))
    assert shown == ["", "", "x", "xy", "xya", "xya"]


def test_a_stop_string_below_min_tokens_does_not_count_later_either():
    d = detokenizer(stop=["a"], min_tokens=3, max_tokens=9)
    deltas, stop = run(d, [BYTE_IDS[b] for b in b"aabca"])
    assert (deltas, stop) == (["a", "a", "b", "c", ""], "a")


def test_a_stop_string_completed_by_token_min_tokens_counts():
    _, stop = run(detokenizer(stop=["ab"], min_tokens=2), [BYTE_IDS[97], BYTE_IDS[98]])
    assert stop == "ab"


def test_the_stop_string_that_ends_first_wins():
    assert find_stop_string("xabcd", 0, ["abcd", "bc"]) == (2, "bc")
    assert find_stop_string("xabc", 0, ["bc", "abc"]) == (1, "abc")
    assert find_stop_string("abab", 2, ["ab"]) == (2, "ab")
    assert find_stop_string("ab", 2, ["ab"]) is None


def test_without_a_tokenizer_there_is_no_text():
    d = Detokenizer(None, SamplingParams(detokenize=False))
    assert run(d, [1, 2, 3]) == (["", "", ""], None)


def test_a_long_answer_costs_linear_time():
    d = detokenizer(stop=["never"])
    start = time.process_time()
    text = "".join(run(d, [BYTE_IDS[97]] * 30_000)[0])
    assert len(text) == 30_000 == len(d.text)
    # 0.05 s of processor time; with quadratic growth it would be minutes.
    assert time.process_time() - start < 5.0


def sentencepiece_like() -> Tokenizer:
    vocab = {"▁": 0, "▁hi": 1, "a": 2, "b": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return Tokenizer(backend, {})


def test_other_decoders_keep_spaces_and_join_bytes():
    tokenizer = sentencepiece_like()
    assert not tokenizer.is_byte_level
    ids = [1, 2, 1, *(4 + b for b in "日".encode()), 3]
    d = Detokenizer(make_text_stream(tokenizer, [2, 3], False), SamplingParams())
    deltas, _ = run(d, ids)
    assert "".join(deltas) == " hia hi日b"
    assert deltas[3:6] == ["", "", "日"]


def test_noise_among_bytes_costs_no_text():
    """A run of bytes that is no UTF-8 as a whole keeps its characters, and holds none back."""
    tokenizer = sentencepiece_like()
    stream = make_text_stream(tokenizer, [], False)
    run_of_bytes = ["日".encode(), b"\xff", b"\xe6\x97", "日".encode()]
    ids = [[4 + byte for byte in part] for part in run_of_bytes]
    shown = ["".join(stream.push(token_id) for token_id in part) for part in ids]
    assert shown == ["日", "\ufffd", "", "\ufffd日"]
    assert tokenizer.decode([token_id for part in ids for token_id in part]) == "日\ufffd\ufffd日"


@pytest.mark.parametrize("include", [False, True])
def test_text_behind_a_stop_string_in_the_same_token_is_cut(include):
    hello = TOKENIZER.token_to_id("hello")
    assert hello is not None
    d = detokenizer(stop=["el"], include_stop_str_in_output=include)
    assert d.push(hello) == "el"
    assert d.take_text(delta=True, finished=True) == ("hel" if include else "h")
