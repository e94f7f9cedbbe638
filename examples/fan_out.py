"""Many questions to one document at the same time: ``make serve``, then run this.

The first question reads the document; the others find it in the prefix cache.
"""

import asyncio
import random
import time

from openai import AsyncOpenAI

NAMES = ("Mira", "Tolven", "Karesh", "Anna", "Belmar", "Oscar", "Zorin", "Petra", "Hugo", "Lena")
CHATTER = ("It rained all day.", "The garden is quiet.", "The old lamp is near the door.")


def make_document(num_sentences: int = 400) -> tuple[str, dict[str, str]]:
    """A text that tells a code for each name, somewhere among sentences that tell nothing."""
    rng = random.Random(2)
    codes = {name: f"{rng.randrange(10_000):04d}" for name in NAMES}
    sentences = [rng.choice(CHATTER) for _ in range(num_sentences)]
    for name, code in codes.items():
        sentences.insert(rng.randrange(len(sentences)), f"The access code of {name} is {code}.")
    return " ".join(sentences), codes


async def ask(client: AsyncOpenAI, model: str, document: str, name: str) -> tuple[str, int, int]:
    """The answer for one name, the prompt's tokens and how many of them were cached."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": document},
            {"role": "user", "content": f"What is the access code of {name}?"},
        ],
        temperature=0,
        max_tokens=40,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )
    usage = answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else 0) or 0
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached


async def main() -> None:
    """Ask for one name, then for all others at once."""
    document, codes = make_document()
    async with AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        for names in (NAMES[:1], NAMES[1:]):
            start = time.perf_counter()
            found = await asyncio.gather(*(ask(client, model, document, name) for name in names))
            seconds = time.perf_counter() - start
            right = sum(
                codes[name] in text for name, (text, _, _) in zip(names, found, strict=True)
            )
            prompt = sum(tokens for _, tokens, _ in found)
            cached = sum(tokens for _, _, tokens in found)
            print(
                f"{len(names)} at once: {right} right, {prompt} prompt tokens, {cached} cached, "
                f"{seconds:.2f} s"
            )


if __name__ == "__main__":
    asyncio.run(main())
