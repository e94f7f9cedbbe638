"""Spellings of one word fold to one id, as the tokenizers library's normalizers have it."""

import pytest

from tests.model_executor.models.deepseek_v41.tiny import fold_by_library
from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.model_executor.models.deepseek_v41.token_folding import fold_text, fold_tokens
from vllm.tokenizers import Tokenizer


@pytest.mark.parametrize("name", ["byte level", "embedded"])
def test_it_folds_as_the_library_does(name: str) -> None:
    folder = resolve_checkpoint("deepseek-v4").path
    tokenizer = byte_level() if name == "byte level" else Tokenizer.from_folder(folder)
    size = tokenizer.vocab_size
    expected = fold_by_library(tokenizer, size)
    count = max(expected) + 1
    assert fold_tokens(tokenizer, size, count).tolist() == expected
    # Ids that pad the vocabulary have no token: they are not counted, or as one.
    padded = size + 3
    assert fold_tokens(tokenizer, padded, count).tolist() == [*expected, 0, 0, 0]
    assert fold_tokens(tokenizer, padded, count + 1).tolist() == [*expected, *[count] * 3]
    for vocab_size, wrong in ((size, count + 1), (padded, count - 1), (padded, count + 2)):
        with pytest.raises(CheckpointError, match=f"{size} ids fold to {count}, but"):
            fold_tokens(tokenizer, vocab_size, wrong)


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        (" Héllo", "hello"),
        ("ﬁne", "fine"),
        ("a \t\r\n b", "a b"),
        (" ", " "),
        ("\n\n", " "),
        ("\u0301", ""),
        ("Ⅷ", "viii"),
        ("ＡＢ", "ab"),
    ],
)
def test_texts(text: str, folded: str) -> None:
    assert fold_text(text) == folded
