"""A checkpoint's tokenizer: a thin, read-only layer over the ``tokenizers`` library."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from vllm.exceptions import ConfigError, UserInputError
from vllm.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from vllm.tokenizers.length_bound import LengthBound
from vllm.tokenizers.template_files import DEFAULT_TEMPLATE
from vllm.utils.gguf_file import is_gguf

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_OTHER_FORMATS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")


def _byte_level_table() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, the other way round.

    Printable Latin-1 bytes stand for themselves; the others, in order, take U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_LEVEL = _byte_level_table()


class Tokenizer:
    """Encodes and decodes one checkpoint's vocabulary.

    Read-only after construction, hence safe to share between threads.

    Owns: the ``tokenizers.Tokenizer`` of the folder.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        """Wrap ``backend``; ``config`` is the content of tokenizer_config.json."""
        self._config = dict(config or {})
        # A saved tokenizer can carry a training run's limits; prompts must never be cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token = _token_text(self._config.get("bos_token"))
        self.eos_token = _token_text(self._config.get("eos_token"))
        self.bos_token_id = self._id_of_config_token("bos_token", self.bos_token)
        self.eos_token_id = self._id_of_config_token("eos_token", self.eos_token)
        added = backend.get_added_tokens_decoder()
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._known_bytes: dict[int, bytes] = {}
        self.all_special_ids = frozenset(i for i, token in added.items() if token.special)
        self._prefix, self._suffix = self._missing_affixes()
        kinds = _decoder_types(backend)
        self._is_byte_level = "ByteLevel" in kinds
        self._byte_ids = _find_byte_ids(backend) if "ByteFallback" in kinds else {}

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read tokenizer.json and, if there, tokenizer_config.json and chat_template.jinja.

        Of a GGUF file, what its keys say.

        Raises:
            ConfigError: A file is absent or broken.
            CheckpointError: A GGUF file is broken.
            UnsupportedFeatureError: It holds a tokenizer of a kind that is not served.
        """
        folder = Path(path)
        if is_gguf(folder) and folder.is_file():
            return cls(*read_gguf_tokenizer(folder))
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist: a tokenizer in the tokenizers library's format is needed. "
                f"{_name_other_formats(folder)}Name a folder that has one (--tokenizer)."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any bad file
            raise ConfigError(f"{file} is not a valid tokenizer: {error}.") from error
        return cls(backend, _read_tokenizer_config(folder))

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, for reading only."""
        return self._backend

    @property
    def config(self) -> dict[str, Any]:
        """A copy of tokenizer_config.json's content."""
        return dict(self._config)

    @property
    def special_texts(self) -> frozenset[str]:
        """The spellings of the special tokens."""
        return frozenset(self._added_text[token_id] for token_id in self.all_special_ids)

    def describe(self) -> dict[str, Any]:
        """Return tokenizer_config.json, and what stands in files beside it."""
        pad = _token_text(self._config.get("pad_token"))
        return {
            **self._config,
            "tokenizer_class": self._config.get("tokenizer_class", "PreTrainedTokenizerFast"),
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": pad,
            "chat_template": self.chat_templates.get(DEFAULT_TEMPLATE),
            "vocab_size": self.vocab_size,
        }

    @property
    def template_tokens(self) -> dict[str, str]:
        """The tokens that templates know by name, such as bos_token, with their spellings."""
        fields = {k: v for k, v in self._config.items() if k.endswith("_token")}
        extra = self._config.get("extra_special_tokens")
        fields |= extra if isinstance(extra, dict) else {}
        named = {name: content_of(entry) for name, entry in fields.items()}
        return {name: content for name, content in named.items() if content is not None}

    def with_backend(self, backend: tokenizers.Tokenizer) -> "Tokenizer":
        """Return a tokenizer that encodes by ``backend``, and adds around a prompt what this does.

        Special tokens may be spelled otherwise in it.
        """
        twin = copy.copy(self)
        backend.no_truncation()
        backend.no_padding()
        twin._backend = backend
        return twin

    @property
    def vocab_size(self) -> int:
        """Number of tokens known here, added ones included (a model's vocabulary can be larger)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def is_byte_level(self) -> bool:
        """Whether text is the UTF-8 decoding of the tokens' bytes, one after another."""
        return self._is_byte_level

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own Jinja chat template, if it has one.

        Raises:
            ConfigError: As ``chat_templates``.
        """
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's own Jinja chat templates by name; the usual one is "default".

        Raises:
            ConfigError: Its ``chat_template`` is neither text nor named texts with a default.
        """
        given = self._config.get("chat_template")
        if given is None:
            return {}
        if isinstance(given, str):
            return {DEFAULT_TEMPLATE: given}
        if isinstance(given, list):
            given = {
                entry.get("name"): entry.get("template")
                for entry in given
                if isinstance(entry, dict)
            }
        texts = isinstance(given, dict) and all(
            isinstance(text, str) for pair in given.items() for text in pair
        )
        if not texts or DEFAULT_TEMPLATE not in given:
            raise ConfigError(
                "chat_template in tokenizer_config.json must be a string, or a list of named "
                "templates with one called 'default'."
            )
        return dict(given)

    @property
    def byte_ids(self) -> Mapping[int, int]:
        """Tokens that stand for one byte each, where others stand for characters."""
        return self._byte_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: Any text; special tokens written in it become special ids.
            add_special_tokens: Whether to add what the checkpoint puts around a bare prompt (bos).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text; the library works on them in parallel.

        Raises:
            UserInputError: A text holds a lone surrogate, which no encoding can carry.
        """
        try:
            encodings = self._backend.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise UserInputError(
                "The text cannot be tokenised: it must be valid Unicode without lone surrogates."
            ) from error
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self._prefix, *encoding.ids, *self._suffix] for encoding in encodings]

    def min_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, from its length; 0: nobody knows."""
        return self._length_bound.min_tokens(text)

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound(self._backend, self._is_byte_level or bool(self._byte_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ``ids``; ids without a token give nothing.

        Of a run of byte tokens that is no UTF-8 as a whole, each bad sequence becomes U+FFFD. The
        library would replace every byte of it, and so take back text that a stream has shown.

        Raises:
            UserInputError: An id is negative or beyond 32 bits.
        """
        try:
            if self._byte_ids and not self._byte_ids.keys().isdisjoint(ids):
                return self._decode_with_bytes(ids, skip_special_tokens)
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise UserInputError(
                f"Token ids must be whole numbers of at least 0 and less than {self.vocab_size}."
            ) from error

    def _decode_with_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokens: list[str] = []
        run = bytearray()
        for token_id in ids:
            token = self._backend.id_to_token(token_id)
            if token is None or (skip_special_tokens and token_id in self.all_special_ids):
                continue
            byte = self._byte_ids.get(token_id)
            if byte is not None:
                run.append(byte)
                continue
            if run:
                tokens += _spell_bytes(run)
                run.clear()
            tokens.append(token)
        tokens += _spell_bytes(run)
        decoder = self._backend.decoder
        assert decoder is not None
        text: str = decoder.decode(tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token spelled ``token`` in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def special_token_id(self, token: str) -> int:
        """Return the id of a token that the model's prompt format cannot do without.

        Raises:
            ConfigError: The vocabulary lacks it.
        """
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"The tokenizer has no token {token!r}, which this model's prompts need: "
                "use the tokenizer that belongs to the checkpoint."
            )
        return token_id

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each id's spelling in the vocabulary, byte-level marks and all; unknown: empty."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; they can be a part of a UTF-8 character."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._find_bytes(token_id)
            if known:
                # As many as the vocabulary has: ids beyond it have none.
                self._known_bytes[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            if all(char in _BYTE_LEVEL for char in piece):
                return bytes(_BYTE_LEVEL[char] for char in piece)
            return piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode()

    def id_to_piece(self, token_id: int) -> str:
        """Return a token's text for display; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _id_of_config_token(self, field: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"{field}={token!r} of tokenizer_config.json is not in tokenizer.json's vocabulary."
            )
        return token_id

    def _missing_affixes(self) -> tuple[list[int], list[int]]:
        """What ``add_bos_token``/``add_eos_token`` ask for and the post-processor does not add.

        DeepSeek's releases carry the wish in tokenizer_config.json only.
        """
        around = self._backend.encode("", add_special_tokens=True).ids
        prefix: list[int] = []
        suffix: list[int] = []
        if self._config.get("add_bos_token") and self.bos_token_id not in around[:1]:
            prefix = [self._required_id("add_bos_token", self.bos_token_id)]
        if self._config.get("add_eos_token") and self.eos_token_id not in around[-1:]:
            suffix = [self._required_id("add_eos_token", self.eos_token_id)]
        return prefix, suffix

    @staticmethod
    def _required_id(field: str, token_id: int | None) -> int:
        if token_id is None:
            token = field.removeprefix("add_")
            raise ConfigError(f"tokenizer_config.json sets {field} but names no {token}.")
        return token_id


def _name_other_formats(folder: Path) -> str:
    """Return a sentence on what the folder has instead; empty where it has nothing."""
    found = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    if not found:
        return ""
    return f"{', '.join(found)} cannot be read: transformers can convert it to tokenizer.json. "


def _find_byte_ids(backend: tokenizers.Tokenizer) -> dict[int, int]:
    spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
    found = {backend.token_to_id(token): byte for token, byte in spelled.items()}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


def _spell_bytes(run: bytes | bytearray) -> list[str]:
    """Return tokens whose text is that of some bytes, decoded as UTF-8."""
    try:
        bytes(run).decode()
    except UnicodeDecodeError:
        # As text: a decoder leaves alone what spells no byte.
        return [bytes(run).decode(errors="replace")]
    return [f"<0x{byte:02X}>" for byte in run]


def _token_text(entry: Any) -> str | None:
    """The text of a token of tokenizer_config.json, written as a string or as an object."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    if content is None or isinstance(content, str):
        return content
    raise ConfigError(f"tokenizer_config.json holds {entry!r} where a token must stand.")


def content_of(entry: Any) -> str | None:
    """The text of a field that may hold a token; None for anything else."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    """The type names of a tokenizer's decoder and of its parts."""
    decoder = backend.decoder
    if decoder is None:
        return set()
    # The library shows a decoder's parts only in its serialised form.
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if file.is_file():
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}.") from error
        if not isinstance(read, dict):
            raise ConfigError(f"{file} must hold a JSON object.")
        config = read
    # Files of templates stand for all of those in tokenizer_config.json.
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    templates = {
        name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
    }
    if templates:
        config["chat_template"] = templates
    return config
