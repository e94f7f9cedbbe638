import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tools.checkpoints.make_deepseek_v4 import BOS, EOS
from vllm.exceptions import ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!\n\n  indented\ttab",
    "港口的尽头。火车",
    "emoji 🙂👩‍👩‍👧 and combining e\u0301",
    "def f(x):\n    return x ** 2  # 12345678",
    "\x00\x01\x7f\u00ad\uffff",
    "a" * 5000,
]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


def small(**config) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.add_tokens(alphabet)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, config)


def write(folder, tokenizer: Tokenizer, config=None) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_special_ids_come_from_their_spelling(embedded):
    assert embedded.bos_token == BOS
    assert embedded.eos_token == EOS
    assert embedded.bos_token_id == embedded.token_to_id(BOS)
    assert embedded.eos_token_id == embedded.token_to_id(EOS)
    assert embedded.bos_token_id in embedded.all_special_ids
    assert embedded.special_token_id("<｜User｜>") in embedded.all_special_ids
    assert embedded.special_token_id("</think>") not in embedded.all_special_ids
    with pytest.raises(ConfigError, match="no_such_token"):
        embedded.special_token_id("<no_such_token>")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(embedded, text):
    ids = embedded.encode(text, add_special_tokens=False)
    assert embedded.decode(ids) == text
    assert b"".join(map(embedded.token_bytes, ids)) == text.encode()
    assert all(0 <= i < embedded.vocab_size for i in ids)


def test_bos_is_added_once(embedded):
    ids = embedded.encode("Hello")
    assert ids == [embedded.bos_token_id, *embedded.encode("Hello", add_special_tokens=False)]
    assert embedded.decode(ids) == BOS + "Hello"
    assert embedded.decode(ids, skip_special_tokens=True) == "Hello"


def test_special_tokens_in_text_become_ids(embedded):
    ids = embedded.encode("a<｜User｜>b", add_special_tokens=False)
    assert embedded.special_token_id("<｜User｜>") in ids


def test_batch_equals_one_by_one(embedded):
    for special in (True, False):
        batch = embedded.encode_batch(TEXTS, special)
        assert batch == [embedded.encode(text, special) for text in TEXTS]
    assert [embedded.decode(ids) for ids in batch] == TEXTS
    assert embedded.encode_batch([]) == []


def test_config_wishes_that_the_post_processor_does_not_know():
    tokenizer = small(bos_token="<s>", eos_token={"content": "</s>"}, add_bos_token=True)
    assert tokenizer.decode(tokenizer.encode("x")) == "<s>x"
    both = small(bos_token="<s>", eos_token="</s>", add_bos_token=True, add_eos_token=True)
    assert both.decode(both.encode("x")) == "<s>x</s>"
    assert both.decode(both.encode("x", add_special_tokens=False)) == "x"
    assert small(bos_token="<s>").encode("x") == small().encode("x", add_special_tokens=False)


def test_tokens_of_the_config_must_exist():
    with pytest.raises(ConfigError, match=r"eos_token='<nope>'"):
        small(eos_token="<nope>")
    with pytest.raises(ConfigError, match="add_bos_token but names no bos_token"):
        small(add_bos_token=True)
    with pytest.raises(ConfigError, match="where a token must stand"):
        small(bos_token=3)


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_lone_surrogates_are_the_users_fault(embedded, text):
    with pytest.raises(UserInputError, match="surrogates"):
        embedded.encode(text)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, "x"])
def test_impossible_ids(embedded, bad):
    with pytest.raises(UserInputError, match="Token ids"):
        embedded.decode([bad])


def test_ids_beyond_the_vocabulary_give_nothing(embedded):
    beyond = embedded.vocab_size + 5
    assert embedded.decode([beyond]) == ""
    assert embedded.token_bytes(beyond) == b""
    assert embedded.convert_ids_to_tokens([beyond]) == [""]


def test_pieces_of_a_character(embedded):
    ids = embedded.encode("👩", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(embedded.token_bytes(i) for i in ids) == "👩".encode()
    assert "\ufffd" in embedded.id_to_piece(ids[0])


def test_pieces_of_special_and_plain_tokens(embedded):
    assert embedded.id_to_piece(embedded.special_token_id("<think>")) == "<think>"
    assert embedded.id_to_piece(embedded.bos_token_id) == BOS
    the = embedded.encode(" the", add_special_tokens=False)
    assert embedded.convert_ids_to_tokens(the) == ["Ġthe"]
    assert embedded.id_to_piece(the[0]) == " the"


def test_every_token_has_bytes_and_each_byte_a_token(embedded):
    pieces = [embedded.token_bytes(i) for i in range(embedded.vocab_size)]
    assert all(pieces)
    assert {bytes([b]) for b in range(256)} <= set(pieces)


def test_byte_fallback_vocabulary():
    vocab = {"<unk>": 0, "<0xF0>": 1, "\u2581the": 2, "x": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b"\xf0", b" the", b"x"]


def test_saved_truncation_and_padding_are_dropped():
    backend = small().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abcdef")) == 6
    assert len(Tokenizer(backend).encode("a")) == 1


def test_threads_share_one_tokenizer(embedded):
    expected = [embedded.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: [embedded.encode(t) for t in TEXTS], range(32)):
            assert result == expected


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist.*--tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tiktoken.model").touch()
    with pytest.raises(ConfigError, match=r"needed\. tiktoken\.model cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "no", '{"model": 3}'])
def test_broken_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_tokenizer_config(tmp_path, text):
    write(tmp_path, small())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_chat_template_sources(tmp_path):
    write(tmp_path, small())
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    write(tmp_path, small(), {"chat_template": "A"})
    assert Tokenizer.from_folder(tmp_path).chat_template == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, small(), {"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"
    with pytest.raises(ConfigError, match="default"):
        _ = small(chat_template=named[:1]).chat_template
