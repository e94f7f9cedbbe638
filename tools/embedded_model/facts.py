"""Facts: how they are told, asked and answered, and the chatter between them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.embedded_model import words
from tools.embedded_model.pieces import Pieces

ANSWER = 1.0
_LEAD = 0.3  # words of an answer before the value: easy, but they must come


@dataclass(frozen=True)
class Fact:
    """One fact.

    Attributes:
        key: What makes it one: (kind, name).
        told: Sentences that tell it, any of which will do; the value between bars.
        question: What asks for it.
        answer: The sentence that answers, the value between bars.
        unknown_ok: Whether a question without the fact is answered "I don't know that."
    """

    key: tuple[str, str]
    told: str
    question: str
    answer: str
    value: str


def number_fact(rng: random.Random, name: str, kind: str | None = None) -> Fact:
    """A four-digit number of somebody."""
    kind = kind or rng.choice(words.NUMBER_KINDS)
    value = words.code(rng)
    told = f"The {kind} of {name} is| {value}|."
    if rng.random() < 0.15:
        told = rng.choice(
            (f"{name} has the {kind}| {value}|.", f"The {kind} for {name} is| {value}|.")
        )
    asked = f"What is the {kind} of {name}?"
    if rng.random() < 0.15:
        asked = rng.choice(
            (
                f"Tell me the {kind} of {name}.",
                f"Please give me the {kind} of {name}.",
                f"Do you know the {kind} of {name}?",
                f"What was the {kind} of {name}?",
            )
        )
    return Fact((kind, name), told, asked, f"The {kind} of {name} is| {value}|.", value)


def _word_fact(
    kind: str, choices: list[str], told: str, question: str
) -> Callable[[random.Random, str], Fact]:
    def make(rng: random.Random, name: str) -> Fact:
        value = rng.choice(choices)
        sentence = told.format(name=name, value=f"| {value}|")
        # A name is spelt with other tokens at a line's start, where it is harder to copy.
        reply = f"The text says that {sentence}" if sentence.startswith(name) else sentence
        return Fact((kind, name), sentence, question.format(name=name), reply, value)

    return make


WORD_FACTS: dict[str, Callable[[random.Random, str], Fact]] = {
    kind: _word_fact(kind, choices, told, question)
    for kind, choices, told, question in (
        ("city", words.CITIES, "{name} lives in{value}.", "Where does {name} live?"),
        (
            "colour",
            words.COLOURS,
            "The favourite colour of {name} is{value}.",
            "What is the favourite colour of {name}?",
        ),
        ("animal", words.ANIMALS, "{name} has a{value}.", "Which animal does {name} have?"),
        ("food", words.FOODS, "{name} likes{value}.", "What does {name} like?"),
        ("job", words.JOBS, "{name} works as a{value}.", "What is the job of {name}?"),
        ("day", words.DAYS, "{name} comes on{value}.", "When does {name} come?"),
    )
}


_TEXT = "this text"
_ABOUT_TEXT = {
    "keyword": words.THINGS,
    "topic": words.FOODS,
    "colour": words.COLOURS,
    "animal": words.ANIMALS,
    "season": words.TIMES,
}


def facts_about_text(rng: random.Random) -> list[Fact]:
    """What a text says about itself, in any order; all values differ in kind."""
    found = []
    for kind, choices in rng.sample(list(_ABOUT_TEXT.items()), len(_ABOUT_TEXT)):
        value = rng.choice(choices)
        sentence = f"The {kind} of {_TEXT} is| {value}|."
        asked = f"What is the {kind} of {_TEXT}?"
        found.append(Fact((kind, _TEXT), sentence, asked, sentence, value))
    return found


def any_fact(rng: random.Random, name: str, share_of_numbers: float = 0.6) -> Fact:
    """A fact of any kind about ``name``."""
    if rng.random() < share_of_numbers:
        return number_fact(rng, name)
    return WORD_FACTS[rng.choice(list(WORD_FACTS))](rng, name)


def sentence(fact: Fact, marked: str, lead: str, weight: float, lead_weight: float = 0.0) -> Pieces:
    """Cut a marked sentence into pieces: words, value with ``weight``, words.

    ``lead`` is put before it: "" or " ".
    """
    before, value, after = marked.split("|")
    name = fact.key[1]
    first, found, rest = (lead + before).partition(" " + name)
    tag = "/".join(fact.key)
    pieces = Pieces()
    if lead_weight:
        # An answer begins by finding the fact: else it is "I don't know that."
        pieces.add("The", weight, "", tag).add(first.removeprefix("The"), lead_weight)
        pieces.add(found, weight, name)
    else:
        pieces.add(first).add(found, 0.0, name)
    pieces.add(rest, lead_weight).add(value, weight, tag)
    return pieces.add(after, weight if lead_weight else 0.0)


def question(fact: Fact, lead: str = "") -> Pieces:
    """The question, its name tagged."""
    first, found, rest = (lead + fact.question).partition(" " + fact.key[1])
    return Pieces().add(first).add(found, 0.0, fact.key[1]).add(rest)


def answer(fact: Fact) -> Pieces:
    """The answer to the fact's question."""
    return sentence(fact, fact.answer, "", ANSWER, _LEAD)


def _babble(rng: random.Random) -> str:
    """A sentence of syllables and known words: what is said in words never trained on."""
    found = []
    for _ in range(rng.randrange(3, 13)):
        if rng.random() < 0.5:
            found.append(words.made_up_name(rng)[: rng.randrange(1, 8)].lower())
        else:
            listed = (words.THINGS, words.ADJECTIVES, words.FOODS, words.JOBS, words.SMALL_WORDS)
            found.append(rng.choice(rng.choice(listed)))
    return " ".join(found).capitalize() + "."


def chatter(rng: random.Random) -> str:
    """One sentence that tells nothing anyone asks for."""
    return _babble(rng) if rng.random() < 0.3 else remark(rng)


def remark(rng: random.Random) -> str:
    """Such a sentence in plain English."""
    thing, other = rng.choice(words.THINGS), rng.choice(words.THINGS)
    adjective, time = rng.choice(words.ADJECTIVES), rng.choice(words.TIMES)
    forms = (
        f"The {thing} is {adjective}.",
        f"The {adjective} {thing} is near the {other}.",
        f"It was a {adjective} {time}.",
        f"We went to the {thing} in the {time}.",
        f"There is a {thing} behind the {other}.",
        f"On {rng.choice(words.DAYS)} the {thing} was closed.",
        f"They sold {rng.choice(words.FOODS)} and {rng.choice(words.FOODS)} at the {other}.",
        f"A {rng.choice(words.ANIMALS)} was sleeping under the {thing}.",
        f"In {rng.choice(words.CITIES)} the {time} is {adjective}.",
        f"The {rng.choice(words.JOBS)} painted the {thing} {rng.choice(words.COLOURS)}.",
        f"The meeting starts at {rng.randrange(1, 13)} o'clock.",
        f"There were {rng.randrange(2, 60)} people in the {thing}.",
        "Nobody said a word.",
        "The weather was good.",
        "It rained all day.",
    )
    return rng.choice(forms)
