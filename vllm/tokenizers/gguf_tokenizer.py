"""The tokenizer that a GGUF file's keys describe.

    gpt2    byte-level BPE: tokens, merges, and the name of the expression that splits text
    llama   SentencePiece: tokens and scores; the merge of the highest score is done first
    gemma4  BPE over characters: tokens and merges; spaces are marked, and only line breaks split

An unknown name of a splitting expression is refused: a wrong one would answer wrongly and say
nothing. The expressions are those of the models' own releases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError
from vllm.utils.gguf_file import read_gguf

_SPACE_MARK = "\u2581"
# Where a vocabulary has it, characters without a token are spelled by their bytes.
_FIRST_BYTE = "<0x00>"
_WORDS_IN_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PLAIN_WORDS = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PLAIN = rf"{_PLAIN_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_SINGLE_DIGITS = rf"{_PLAIN_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}"
_IN_CASE = (
    _WORDS_IN_CASE.replace("END", f"{_SHORTENED}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_IN_CASE_BESIDE_HAN = (
    r"[\p{Han}]+|"
    + _WORDS_IN_CASE.replace(r"\p{M}]", rf"\p{{M}}{_NOT_HAN}").replace("END", f"{_SHORTENED}?")
    + rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
)
# Each cuts what the one before has left: digits in threes, runs of Chinese and Japanese, the rest.
_THREE_PASSES = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    + rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a tokenizer cuts text before it merges.

    Attributes:
        expressions: One after the other; none: what byte-level BPE began with.
        has_single_digits: Whether each digit is cut off before.
        takes_words: Whether a word that is a token is taken whole, whatever its merges.
        is_composed: Whether its release composes characters before.
        adds_bos: Whether a text begins by a token of its own, where no key says so.
    """

    expressions: tuple[str, ...] = ()
    has_single_digits: bool = False
    takes_words: bool = False
    is_composed: bool = False
    adds_bos: bool = False


# By the names of ``tokenizer.ggml.pre``; those of a row are the same.
_NAMES: Mapping[_Splitting, str] = {
    _Splitting(): "gpt-2 phi-2 olmo mpt jais trillion exaone4 granite-docling mellum a.x-4.0",
    _Splitting(has_single_digits=True): (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
    ),
    _Splitting((_PLAIN,), takes_words=True, adds_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0"
    ),
    _Splitting((_PLAIN,)): "dbrx smaug-bpe chatglm-bpe",
    _Splitting((_PLAIN,), takes_words=True): "glm4 glm5",
    # Marks of combined letters belong to words.
    _Splitting(
        (
            rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        is_composed=True,
    ): "qwen35",
    _Splitting((_SINGLE_DIGITS,), is_composed=True): "qwen2",
    _Splitting((_SINGLE_DIGITS,)): (
        "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo"
    ),
    _Splitting((_IN_CASE,), takes_words=True): "gpt-4o llama4 kanana2 minimax-m2",
    _Splitting(
        (
            _WORDS_IN_CASE.replace("END", "")
            + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        takes_words=True,
        adds_bos=True,
    ): "tekken",
    _Splitting(_THREE_PASSES): "deepseek-v3 joyai-llm hunyuan-dense hy_v4",
    _Splitting((_IN_CASE_BESIDE_HAN,)): "kimi-k2",
}
SPLITTINGS: Mapping[str, _Splitting] = {
    name: splitting for splitting, names in _NAMES.items() for name in names.split()
}
"""Name of ``tokenizer.ggml.pre`` -> how text is cut."""

_LINES = r"[^\n]+|\n+"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_TEMPLATE = "tokenizer.chat_template"
_WHOLE = "tokenizer.huggingface.json"
_NAMED = ("bos", "eos", "unknown", "padding")
# Some writers say -1 of what a tokenizer has not, signed or not.
_NO_TOKENS, _NOT_NEEDED = (-1, 0xFFFFFFFF), ("unknown", "padding")


def read_gguf_tokenizer(path: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return a file's tokenizer, and what its tokenizer_config.json would hold.

    Raises:
        CheckpointError: The file is broken, or its keys contradict one another.
        ConfigError: It holds no tokenizer.
        UnsupportedFeatureError: It holds one of a kind that is not served.
    """
    keys = _TokenKeys(path, read_gguf(path).keys)
    kind = keys.get("model", str, "")
    name = keys.get("pre", str, "")
    is_known = kind in ("llama", "gemma4") or (kind == "gpt2" and name in SPLITTINGS)
    whole = keys.whole_tokenizer()
    if whole is not None and not is_known:
        return whole, _make_config(keys, adds_bos=False)
    if kind == "gpt2":
        backend = _make_byte_level(keys)
    elif kind == "llama":
        backend = _make_sentence_piece(keys)
    elif kind == "gemma4":
        backend = _make_character_level(keys)
    elif not kind:
        raise ConfigError(f"{path} holds no tokenizer: give one by --tokenizer.")
    else:
        raise UnsupportedFeatureError(
            f"{path} holds a tokenizer of the kind {kind!r}, which is not served (gpt2, llama and "
            "gemma4 are): give one by --tokenizer."
        )
    _add_tokens(backend, keys)
    adds_bos = kind != "gpt2" or SPLITTINGS[name].adds_bos
    return backend, _make_config(keys, adds_bos=adds_bos)


class _TokenKeys:
    """Typed reading of the tokenizer's keys."""

    def __init__(self, path: str | Path, keys: Mapping[str, Any]) -> None:
        self.path, self._keys = path, keys
        self.tokens: list[str] = self.get("tokens", list, [])
        if not self.tokens or not all(isinstance(token, str) for token in self.tokens):
            raise ConfigError(f"{path} holds no tokenizer: give one by --tokenizer.")
        self.types: list[int] = self.get("token_type", list, [1] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise self.broken(f"{len(self.types)} types for {len(self.tokens)} tokens")

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._keys.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, kind):
            raise self.broken(f"{name} is {value!r}")
        return value

    def chat_templates(self) -> list[dict[str, str]]:
        """Return the templates by name, as tokenizer_config.json lists several."""
        found = {"default": self._keys.get(_TEMPLATE)}
        for key, value in self._keys.items():
            if key.startswith(f"{_TEMPLATE}."):
                found.setdefault(key.removeprefix(f"{_TEMPLATE}."), value)
        return [
            {"name": name, "template": text}
            for name, text in found.items()
            if isinstance(text, str)
        ]

    def whole_tokenizer(self) -> tokenizers.Tokenizer | None:
        """Return the tokenizer.json that a file may hold beside its keys."""
        text = self._keys.get(_WHOLE)
        if not isinstance(text, str):
            return None
        try:
            return tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise self.broken(f"{_WHOLE}: {error}") from error

    def token_of(self, name: str) -> str | None:
        """Return the spelling of the token that a key numbers."""
        number = self._keys.get(f"tokenizer.ggml.{name}_token_id")
        if number is None:
            return None
        if number in _NO_TOKENS and name in _NOT_NEEDED:
            return None
        if type(number) is not int or not 0 <= number < len(self.tokens):
            raise self.broken(f"{name}_token_id is {number!r} of {len(self.tokens)} tokens")
        return self.tokens[number]

    def make_vocabulary(self) -> dict[str, int]:
        """Return spelling -> number."""
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            doubled = next(t for i, t in enumerate(self.tokens) if vocabulary[t] != i)
            raise self.broken(f"token {doubled!r} stands there twice")
        return vocabulary

    def broken(self, reason: str) -> CheckpointError:
        """Return the error of keys that make no tokenizer."""
        return CheckpointError(
            f"{self.path}: its tokenizer cannot be read ({reason}): download it again, or give "
            "another by --tokenizer."
        )


def _make_byte_level(keys: _TokenKeys) -> tokenizers.Tokenizer:
    name = keys.get("pre", str, "")
    if name not in SPLITTINGS:
        raise UnsupportedFeatureError(
            f"{keys.path} splits text by the expression {name!r}, which is not known here (known: "
            f"{', '.join(SPLITTINGS)}): give the model's own tokenizer by --tokenizer."
        )
    splitting = SPLITTINGS[name]
    backend = _make_merging(keys, ignore_merges=splitting.takes_words)
    if splitting.is_composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if splitting.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for expression in splitting.expressions:
        steps.append(pre_tokenizers.Split(Regex(expression), behavior="isolated"))
    uses_own = not splitting.expressions
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_own))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_merging(keys: _TokenKeys, **settings: Any) -> tokenizers.Tokenizer:
    """Returns BPE by the file's list of merges, with the library's other settings."""
    merges = []
    # Without any, every word would be spelled by its bytes: no model was trained on that.
    words = sum(
        kind == _NORMAL and len(t) > 1 for t, kind in zip(keys.tokens, keys.types, strict=True)
    )
    if words and not keys.get("merges", list, []):
        raise keys.broken(f"{words} words and no merges")
    for merge in keys.get("merges", list, []):
        first, space, second = str(merge).partition(" ")
        if not space or not first or not second:
            raise keys.broken(f"{merge!r} is no merge")
        merges.append((first, second))
    try:
        model = models.BPE(vocab=keys.make_vocabulary(), merges=merges, **settings)
    except Exception as error:  # the library raises bare Exception
        raise keys.broken(str(error)) from error
    return tokenizers.Tokenizer(model)


def _make_character_level(keys: _TokenKeys) -> tokenizers.Tokenizer:
    backend = _make_merging(
        keys,
        unk_token=_find_unknown(keys),
        fuse_unk=True,
        byte_fallback=_FIRST_BYTE in keys.tokens,
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_LINES), behavior="isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _find_unknown(keys: _TokenKeys) -> str | None:
    return keys.token_of("unknown") or next(
        (token for token, kind in zip(keys.tokens, keys.types, strict=True) if kind == 2), None
    )


def _make_sentence_piece(keys: _TokenKeys) -> tokenizers.Tokenizer:
    scores = keys.get("scores", list, [])
    vocabulary = keys.make_vocabulary()
    if len(scores) != len(vocabulary):
        raise keys.broken(f"{len(scores)} scores for {len(vocabulary)} tokens")
    merges = []
    for token, number in vocabulary.items():
        if keys.types[number] in (_CONTROL, _USER_DEFINED):
            continue
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += [(-scores[number], number, pair) for pair in known]
    merges.sort(key=lambda entry: entry[:2])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[pair for _, _, pair in merges],
            unk_token=_find_unknown(keys),
            fuse_unk=True,
            byte_fallback=_FIRST_BYTE in vocabulary,
        )
    )
    has_prefix = keys.get("add_space_prefix", bool, True)
    replaced = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK), replaced] if has_prefix else [replaced]
    )
    steps: list[Any] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, keys: _TokenKeys) -> None:
    """Tokens that text is never merged into: special ones, and those of the vocabulary's maker."""
    special, plain = [], []
    for token, kind in zip(keys.tokens, keys.types, strict=True):
        if kind == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _make_config(keys: _TokenKeys, *, adds_bos: bool) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {
        names[name]: token for name in _NAMED if (token := keys.token_of(name)) is not None
    }
    config["add_bos_token"] = keys.get("add_bos_token", bool, adds_bos and "bos_token" in config)
    config["add_eos_token"] = keys.get("add_eos_token", bool, False)
    templates = keys.chat_templates()
    if templates and templates[0]["name"] == "default":
        config["chat_template"] = templates
    return config
