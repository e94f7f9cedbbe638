"""Tokenizers out of GGUF files: the ids and texts of those they were written from."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaTokenizer

from tests.model_executor.model_loader.gguf_files import gguf, write_tokenizer
from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError
from vllm.tokenizers import Tokenizer

TEXTS = [
    "then <|im_end|> in time",
    "Zw\u00f6lf  K\u00e4mpfer\n\n 12345",
    "<think>im</think>",
    "\u4e2d",
]


def write(path: Path, keys: dict[str, Any]) -> Path:
    """Writes a file of keys and no tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentence_piece(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    words = ["\u2581", "a", "b", "ab", "\u2581a", "ba", "abab", "\u2581ab", "[tool]"]
    scores = [0.0] * len(pieces) + [-20.0, -21.0, -22.0, -1.0, -5.0, -9.0, -2.0, -7.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types + [1] * 8 + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def byte_pairs(pre: str, **changes: Any) -> dict[str, Any]:
    """A vocabulary of single bytes, and what else is given."""
    single = [token for token in byte_level().backend.get_vocab() if len(token) == 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": single,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def split(pre: str, text: str, path: Path) -> list[str]:
    """Returns the pieces that text is cut into before anything is merged."""
    tokenizer = Tokenizer.from_folder(write(path, byte_pairs(pre)))
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in pieces]


def test_byte_level_ids_are_those_of_the_source(tmp_path: Path) -> None:
    source, path = byte_level(), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    write_tokenizer(writer, source, 320)
    writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = Tokenizer.from_folder(path)
    for text in TEXTS:
        ids = source.encode(text)
        assert read.encode(text) == ids
        assert read.decode(ids) == text
    assert read.eos_token == "<|im_end|>"
    assert read.chat_template == source.chat_template
    assert set(read.chat_templates) == {"default", "tool_use"}
    assert "<|im_start|>" in read.special_texts
    assert read.vocab_size == 320


def test_sentence_piece_merges_the_highest_score_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model.gguf", sentence_piece()))
    ids = tokenizer.encode("abab ba")
    # "ab" (-1) is merged before "\u2581a" (-5), then "abab" (-2); "\u2581ab" (-7) never comes up.
    spelled = tokenizer.convert_ids_to_tokens(ids)
    assert spelled == ["<s>", "\u2581", "abab", "\u2581", "ba"]
    assert tokenizer.decode(ids[1:]) == "abab ba"
    emoji = tokenizer.encode("\u00e9", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(emoji) == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(emoji) == "\u00e9"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a[tool]b")) == [
        "<s>",
        "\u2581a",
        "[tool]",
        "\u2581",
        "b",
    ]


def test_spaces_and_beginnings_as_the_keys_say(tmp_path: Path) -> None:
    keys = sentence_piece(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model.gguf", keys))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab a")) == ["ab", "\u2581a", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" ab")[:-1]) == " ab"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["It", "'s", " ", "123", "45", " GPUs", "\n\n", "ok"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " GPUs", "\n\n", "ok"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", "5", " GPUs", "\n\n", "ok"]),
        ("gpt-4o", ["It's", " ", "123", "45", " GPUs", "\n\n", "ok"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " GPUs", "\n\n", "ok"]),
        ("gpt-2", ["It", "'s", " 12345", " GPUs", "\n", "\n", "ok"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " GPUs", "\n", "\n", "ok"]),
    ],
)
def test_text_is_split_as_the_name_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert split(pre, "It's 12345 GPUs\n\nok", tmp_path / "model.gguf") == pieces


@pytest.mark.parametrize(
    ("pre", "same"),
    [
        ("llama3", "llama-bpe"),
        ("glm4", "llama-bpe"),
        ("deepseek-r1-qwen", "qwen2"),
        ("llama4", "gpt-4o"),
        ("starcoder", "smollm"),
        ("phi-2", "gpt-2"),
        ("joyai-llm", "deepseek-v3"),
    ],
)
def test_other_names_split_alike(pre: str, same: str, tmp_path: Path) -> None:
    text = "It's 12345 GPUs, \u4e2d\u6587 a.b\n\n  ok  "
    assert split(pre, text, tmp_path / "a.gguf") == split(same, text, tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "deepseek-v3",
            ["It", "'s", " ", "123", "45", " \u20ac", " ,", "\u4e2d\u6587", ".go", "\n\n", " ok"],
        ),
        (
            "kimi-k2",
            ["It's", " ", "123", "45", " \u20ac", " ,", "\u4e2d\u6587", ".go", "\n\n", " ok"],
        ),
    ],
)
def test_passes_cut_what_those_before_left(pre: str, pieces: list[str], tmp_path: Path) -> None:
    text = "It's 12345 \u20ac ,\u4e2d\u6587.go\n\n ok"
    assert split(pre, text, tmp_path / "model.gguf") == pieces
    # Kana stand with Chinese in one family, Han alone in the other.
    kana = split(pre, "\u4e2d\u3042", tmp_path / "kana.gguf")
    assert kana == (["\u4e2d\u3042"] if pre == "deepseek-v3" else ["\u4e2d", "\u3042"])


# What llama.cpp 11434 makes of odd texts under nine names, with merges that cross every boundary.
_RECORDED = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text("utf-8"))


@pytest.mark.parametrize("pre", _RECORDED["ids"])
def test_ids_of_odd_texts_are_llama_cpps(pre: str, tmp_path: Path) -> None:
    merges = _RECORDED["merges"]
    letters = sorted(token for token in byte_level().backend.get_vocab() if len(token) == 1)
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    keys = byte_pairs(pre, tokens=tokens, merges=merges)
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model.gguf", keys))
    for text, expected in zip(_RECORDED["texts"], _RECORDED["ids"][pre], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert " ".join(map(str, ids)) == expected, text
        assert tokenizer.decode(ids) == text


def test_a_text_begins_as_the_name_says_where_no_key_does(tmp_path: Path) -> None:
    keys = {"bos_token_id": 0, "eos_token_id": 1}
    for pre, adds in (("llama3", True), ("tekken", True), ("qwen2", False), ("glm4", False)):
        for changes, expected in (({}, adds), ({"add_bos_token": not adds}, not adds)):
            path = write(tmp_path / "model.gguf", byte_pairs(pre, **keys, **changes))
            assert (Tokenizer.from_folder(path).encode("a")[0] == 0) is expected, (pre, changes)


def test_a_whole_tokenizer_stands_in_where_the_keys_name_an_unknown_one(tmp_path: Path) -> None:
    source = byte_level()
    keys = byte_pairs("new-bpe") | {"tokenizer.huggingface.json": source.backend.to_str()}
    read = Tokenizer.from_folder(write(tmp_path / "model.gguf", keys))
    assert read.encode(TEXTS[1]) == source.encode(TEXTS[1])
    keys["tokenizer.huggingface.json"] = "{}"
    with pytest.raises(CheckpointError, match=r"tokenizer\.huggingface\.json"):
        Tokenizer.from_folder(write(tmp_path / "model.gguf", keys))


def test_marks_belong_to_words_where_the_family_says_so(tmp_path: Path) -> None:
    text = "\u0915\u0947 x\u0301y"  # a vowel sign, and an accent that composes with no x
    words = ["\u0915\u0947", " x\u0301y"]
    assert split("qwen35", text, tmp_path / "a.gguf") == words
    assert split("qwen2", text, tmp_path / "b.gguf") != words


def test_characters_are_merged_as_the_familys_own_tokenizer_does(tmp_path: Path) -> None:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3, 3, 3, 2] + [6] * 256
    letters = ["\u2581", "\n", *"abcdenot"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b"), ("\n", "\n"), ("\u2581", "\u2581")]
    merges += [("t", "o"), ("to", "\u2581")]
    words = [*letters, *("".join(pair) for pair in merges), "<|tool>"]
    tokens = [*pieces, *words]
    keys = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.token_type": types + [1] * (len(words) - 1) + [4],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    ours = Tokenizer.from_folder(write(tmp_path / "model.gguf", keys))
    theirs = GemmaTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    theirs.add_tokens(["<|tool>"])
    for text in ("ab to  abc", " a b\n\n\nto a", "\u00e9<|tool> ab", "", "not\tone", "to ab\n "):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text) == [2, *expected]
        assert ours.decode(expected) == text


def test_a_token_that_there_is_not_is_none(tmp_path: Path) -> None:
    keys = sentence_piece(padding_token_id=0xFFFFFFFF)
    assert Tokenizer.from_folder(write(tmp_path / "model.gguf", keys)).encode("ab")[0] == 1


def test_what_would_answer_wrongly_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(UnsupportedFeatureError, match="expression 'new-bpe', which is not known"):
        Tokenizer.from_folder(write(path, byte_pairs("new-bpe", merges=["a b"])))
    with pytest.raises(UnsupportedFeatureError, match="of the kind 'bert'"):
        Tokenizer.from_folder(write(path, sentence_piece(model="bert")))
    with pytest.raises(ConfigError, match="holds no tokenizer: give one by --tokenizer"):
        Tokenizer.from_folder(write(path, {"general.name": "x"}))
    with pytest.raises(CheckpointError, match="'ab' is no merge"):
        Tokenizer.from_folder(write(path, byte_pairs("gpt-2", merges=["ab"])))
    words = byte_pairs("gpt-2")
    words["tokenizer.ggml.tokens"] += ["ab", "abc"]
    with pytest.raises(CheckpointError, match=r"2 words and no merges"):
        Tokenizer.from_folder(write(path, words))
    with pytest.raises(CheckpointError, match=r"token 'a' stands there twice"):
        Tokenizer.from_folder(
            write(path, sentence_piece(tokens=["a", "a"], token_type=[1, 1], scores=[0.0, 1.0]))
        )
    with pytest.raises(CheckpointError, match="eos_token_id is 999999 of"):
        Tokenizer.from_folder(write(path, sentence_piece(eos_token_id=999999)))
    with pytest.raises(CheckpointError, match="2 scores for"):
        Tokenizer.from_folder(write(path, sentence_piece(scores=[0.0, 1.0])))
