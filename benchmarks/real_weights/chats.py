"""What is said in chats that are drawn: of no weight, but it is language."""

import random
from collections.abc import Sequence

from vllm.tokenizers.chat_tokenizer import ChatTokenizer

_SUBJECTS = (
    *("a river in spring", "the moon", "how bread rises", "a lighthouse", "old maps"),
    *("a train at night", "the number seven", "why leaves fall", "a broken clock", "winter"),
)
_ASKS = ("Describe", "Explain in one sentence", "Write a line about", "Ask a question about")


def draw_text(rng: random.Random, num_sentences: int) -> str:
    """Return so many sentences, each of about a dozen tokens."""
    return " ".join(
        f"{rng.choice(_ASKS)} {rng.choice(_SUBJECTS)}, number {rng.randrange(1000)}."
        for _ in range(num_sentences)
    )


def encode_chat(tokenizer: ChatTokenizer, said: Sequence[str]) -> list[int]:
    """Return the tokens of what a user and the model said by turns; of a text, for a base model."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(said))
    roles = ("user", "assistant")
    chat = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(said)]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert isinstance(ids, list)
    return ids
