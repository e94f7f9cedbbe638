"""Tiny tokenizers as families build them: special tokens outside or inside the vocabulary."""

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from vllm.tokenizers import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """Byte-level BPE with special tokens behind the vocabulary, as Qwen, Llama 3 and gpt-oss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "|"), ("|", ">"), ("e", "n"), ("i", "m")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "chat_template": CHATML})


def spaced(kind: str = "bpe") -> Tokenizer:
    """Spaces as marks and special tokens inside the vocabulary, as Gemma, Llama 2 and Mistral."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = [chr(code) for code in range(33, 127)] + ["\u2581", "\n"]
    merges = [("<", "e"), ("o", "s"), ("<e", "os"), ("\u2581", "a")]
    pieces = [*specials, *letters, *("".join(pair) for pair in merges)]
    if kind == "bpe":
        vocab = {piece: i for i, piece in enumerate(pieces)}
        model: Any = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True)
    else:
        model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    return Tokenizer(backend, {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": GEMMA})


FAMILIES = {"byte-level": byte_level, "bpe": spaced, "unigram": lambda: spaced("unigram")}
