"""Labels as texts, tokens and tries."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from vllm.entrypoints.decisions.labels import LabelTrie, encode_labels, label_texts
from vllm.exceptions import UnsupportedFeatureError
from vllm.tokenizers import Tokenizer


def test_no_label_begins_another() -> None:
    for count in (1, 2, 26, 27, 255):
        labels = label_texts(count)
        assert len(set(labels)) == count
        assert len({len(label) for label in labels}) == 1
    assert label_texts(26)[-1] == "Z"
    assert label_texts(28)[-1] == "BB"


def test_chain_rule() -> None:
    trie = LabelTrie.build([(1, 2), (1, 3), (4,)])
    assert list(trie.branches) == [(), (1,)]
    assert trie.branches[()] == (1, 4)
    assert trie.depth == 1
    read = {(): {1: -1.0, 4: -2.0}, (1,): {2: -0.25, 3: -0.5}}
    assert trie.label_logprobs(read) == [-1.25, -1.5, -2.0]


@pytest.mark.parametrize("paths", [[(1,), (1,)], [(1,), (1, 2)], [()]])
def test_labels_that_cannot_be_told_apart(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(UnsupportedFeatureError):
        LabelTrie.build(paths)


def bpe(merges: list[tuple[str, str]], pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    letters = [*"ABC:\u2581"]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    backend = Backend(model)
    backend.pre_tokenizer = pre
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def test_labels_are_encoded_behind_the_prompts_end() -> None:
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain = bpe([], metaspace)
    # Alone they would get a space in front.
    assert encode_labels(plain, ":", ["A", "AB"]) == [(0,), (0, 1)]
    # A label that joins the prompt's last token is taken as it stands alone, without the space.
    joining = bpe([(":", "A")], metaspace)
    assert encode_labels(joining, ":", ["A", "B"]) == [(0,), (1,)]
    assert encode_labels(plain, "", ["C"]) == [(2,)]
