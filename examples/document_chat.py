"""A chat over a document, each turn from the cache: ``python examples/document_chat.py``."""

import random
import time

from vllm import LLM, SamplingParams

NAMES = ("Mira", "Tolven", "Karesh", "Anna", "Belmar", "Oscar", "Zorin", "Petra", "Hugo", "Lena")
CHATTER = ("It rained all day.", "The garden is quiet.", "The old lamp is near the door.")


def make_document(num_sentences: int = 150) -> tuple[str, dict[str, str]]:
    """A text that tells a code for each name, somewhere among sentences that tell nothing."""
    rng = random.Random(1)
    codes = {name: f"{rng.randrange(10_000):04d}" for name in NAMES}
    sentences = [rng.choice(CHATTER) for _ in range(num_sentences)]
    for name, code in codes.items():
        sentences.insert(rng.randrange(len(sentences)), f"The access code of {name} is {code}.")
    return " ".join(sentences), codes


def main() -> None:
    """Ask three questions in one chat, then all of them at once, each in a chat of its own."""
    document, codes = make_document()
    llm = LLM("deepseek-v4", block_size=32)
    greedy = SamplingParams(temperature=0, max_tokens=40)
    chat_format = {"thinking": False}

    print("One chat, turn after turn:")
    messages = [{"role": "system", "content": document}]
    for name in NAMES[:3]:
        messages.append({"role": "user", "content": f"What is the access code of {name}?"})
        start = time.perf_counter()
        (output,) = llm.chat(messages, greedy, use_tqdm=False, chat_template_kwargs=chat_format)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(
            f"  {answer!r} (told: {codes[name]}); {len(output.prompt_token_ids or [])} prompt "
            f"tokens, {output.num_cached_tokens} cached, {time.perf_counter() - start:.2f} s"
        )

    print("Every name at once, in chats of their own:")
    chats = [
        [{"role": "user", "content": f"{document} What is the access code of {name}?"}]
        for name in NAMES
    ]
    for attempt in (1, 2):
        start = time.perf_counter()
        outputs = llm.chat(chats, greedy, use_tqdm=False, chat_template_kwargs=chat_format)
        right = sum(
            codes[name] in output.outputs[0].text
            for name, output in zip(NAMES, outputs, strict=True)
        )
        total = sum(len(output.prompt_token_ids or []) for output in outputs)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        print(
            f"  attempt {attempt}: {right} of {len(NAMES)} right, {total} prompt tokens, "
            f"{cached} cached, {time.perf_counter() - start:.2f} s"
        )


if __name__ == "__main__":
    main()
