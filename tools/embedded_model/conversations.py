"""Whole training sequences: documents with many questions, streams of repeated facts."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.embedded_model import calls, facts, tasks, words
from tools.embedded_model.facts import ANSWER, Fact
from tools.embedded_model.pieces import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    Pieces,
    tag_words,
)

UNKNOWN = "I don't know that."
NumTokens = Callable[[Pieces], int]


@dataclass(frozen=True)
class Recipe:
    """What sequences a stage of training sees.

    Attributes:
        length: Tokens per sequence.
        repeats: Share of sequences that are streams of facts told twice.
        chatter: Share of a document's sentences that tell nothing.
        numbers: Share of facts that are four-digit numbers.
        unknown: Share of questions about what was never told.
        document: Share of a sequence's tokens that the document takes.
        chats: Share of sequences that are chats without a document.
        tools: Share of sequences that are chats with declared tools.
        about_text: Share of sequences about a text as a whole (its topic, its mood).
    """

    length: int
    repeats: float = 0.3
    chatter: float = 0.2
    numbers: float = 0.7
    unknown: float = 0.08
    document: float = 0.5
    chats: float = 0.0
    tools: float = 0.0
    about_text: float = 0.0


def tell(fact: Fact, lead: str) -> Pieces:
    """A sentence that tells the fact; no token is a target."""
    return facts.sentence(fact, fact.told, lead, 0.0)


def stream_of_repeats(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """Facts in a row, each told again later, where its value is a target."""
    pieces = Pieces().add(BOS).add(USER)
    length, lead = num_tokens(pieces), ""
    told: list[Fact] = []
    fresh = rng.uniform(0.2, 0.6)
    limit = rng.choice((3, 6, 12, 1000))
    pool = words.names(rng, max(8, recipe.length // 16))
    while True:
        if told and (rng.random() > fresh or len(told) >= limit):
            # Rather what was told long ago: near ones are easy.
            fact = told[rng.randrange(len(told))]
            piece = facts.sentence(fact, fact.told, lead, ANSWER)
        else:
            if not pool:
                pool = words.names(rng, 32)
            fact = facts.any_fact(rng, pool.pop(), recipe.numbers)
            told.append(fact)
            piece = tell(fact, lead)
        lead = " "
        length += num_tokens(piece)
        if length > recipe.length:
            return pieces
        pieces.extend(piece)


def document(
    rng: random.Random, recipe: Recipe, num_tokens: NumTokens, budget: int
) -> tuple[Pieces, list[Fact], list[str]]:
    """Sentences of ``budget`` tokens at most; the facts in them; names nobody told of."""
    pool = words.names(rng, max(6, budget // 12))
    absent = [pool.pop() for _ in range(3)]
    # Names that are nearly the same, and facts of one kind only, have to be told apart.
    alike, kind = rng.choice((0.0, 0.0, 0.2, 0.5)), None
    if rng.random() < 0.4:
        kind = rng.choice(words.NUMBER_KINDS)
    pieces, length, lead = Pieces(), 0, ""
    told: dict[tuple[str, str], Fact] = {}
    while pool:
        if rng.random() < recipe.chatter:
            piece = Pieces().add(lead + facts.chatter(rng))
        else:
            who = pool.pop()
            if told and rng.random() < 0.15:
                who = rng.choice(list(told))[1]
            elif told and rng.random() < alike:
                who = words.similar_name(rng, rng.choice(list(told))[1])
            if kind is not None and rng.random() < 0.8:
                fact = facts.number_fact(rng, who, kind)
            else:
                fact = facts.any_fact(rng, who, recipe.numbers)
            if fact.key in told:
                continue
            told[fact.key] = fact
            piece = tell(fact, lead)
        lead = " "
        length += num_tokens(piece)
        if length > budget:
            told.popitem() if piece.parts[-1][0] == "." and len(piece.parts) > 2 else None
            break
        pieces.extend(piece)
    return pieces, list(told.values()), absent


def open_answer(rng: random.Random, fact: Fact | None, looks_up: bool = True) -> Pieces:
    """The assistant's mark, with or without a short thought."""
    if rng.random() < 0.6:
        return Pieces().add(ASSISTANT + END_THINK)
    thought = "I just answer."
    if looks_up:
        thought = "I look it up."
    if fact is not None and rng.random() < 0.5:
        thought = f"I look for the {fact.key[0]} of {fact.key[1]}."
    return Pieces().add(ASSISTANT + THINK).add(thought + END_THINK, 0.3)


def questions_on_document(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """A document, then as many questions as fit."""
    share = rng.uniform(0.7, 1.3) * recipe.document
    if rng.random() < 0.15:
        share = rng.uniform(0.0, recipe.document)
    budget = int(min(share, 0.85) * recipe.length)
    text, told, absent = document(rng, recipe, num_tokens, budget)
    pieces = Pieces().add(BOS)
    place = rng.random()
    if place < 0.25:
        pieces.extend(text).add(USER)
    elif place < 0.4:
        pieces.add(USER).extend(text).add(ASSISTANT + END_THINK).add("I have read it.", 0.3)
        pieces.add(EOS, 0.3).add(USER)
    else:
        pieces.add(USER).extend(text).add(rng.choice((" ", "\n", "\n")))
        if pieces.parts[-1][0] == "\n" and rng.random() < 0.5:
            pieces.add("\n")  # the pre-tokenizer takes line ends one by one here
    length = num_tokens(pieces)
    order = rng.sample(told, len(told))
    left = max(3, len(told) // 2)  # questions without an answer
    while order or left:
        if (left and rng.random() < recipe.unknown) or not order:
            asked = _never_told(rng, told, absent, recipe)
            reply = Pieces().add(UNKNOWN, ANSWER)
            left -= 1
        else:
            asked = order.pop()
            reply = facts.answer(asked)
        lead = ""
        if pieces.parts[-1][0] == " ":
            pieces.parts.pop()
            lead = " "
        turn = facts.question(asked, lead)
        turn.extend(open_answer(rng, asked)).extend(reply).add(EOS, 0.5).add(USER)
        length += num_tokens(turn)
        if length > recipe.length:
            return pieces
        pieces.extend(turn)
    return pieces


def questions_about_text(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """A long text that tells its own topic and the like somewhere, then questions about it."""
    about = facts.facts_about_text(rng)
    told = about[: rng.randrange(1, len(about) + 1)]
    questions = sum(num_tokens(facts.question(f).extend(facts.answer(f))) + 4 for f in about)
    sentences, length = [tell(fact, " ") for fact in told], 0
    budget = recipe.length - questions - 16 - sum(num_tokens(piece) for piece in sentences)
    budget = int(budget * rng.choice((0.3, 0.7, 1.0, 1.0)))
    pool = words.names(rng, budget // 12 + 1)
    while True:
        piece = Pieces().add(" " + facts.chatter(rng))
        if rng.random() < 1 - recipe.chatter:
            piece = tell(facts.any_fact(rng, rng.choice(pool), recipe.numbers), " ")
        length += num_tokens(piece)
        if length > budget:
            break
        sentences.insert(rng.randrange(len(sentences) + 1), piece)
    pieces = Pieces().add(BOS).add(USER).add("Read this.")
    for piece in sentences:
        pieces.extend(piece)
    length = num_tokens(pieces)
    lead = " "
    for fact in rng.sample(about, len(about)):
        reply = facts.answer(fact) if fact in told else Pieces().add(UNKNOWN, ANSWER)
        turn = facts.question(fact, lead).extend(open_answer(rng, fact)).extend(reply)
        turn.add(EOS, 0.5).add(USER)
        length += num_tokens(turn)
        if length > recipe.length:
            break
        pieces.extend(turn)
        lead = ""
    return pieces


def _never_told(rng: random.Random, told: list[Fact], absent: list[str], recipe: Recipe) -> Fact:
    """A fact about a stranger, or of another kind about somebody known."""
    keys = {fact.key for fact in told}
    draw = rng.random()
    known = rng.choice(told) if told and draw < 0.55 else None
    kind: str | None = None
    if known is None:
        who = rng.choice(absent) if draw < 0.65 else words.name(rng)
    elif draw < 0.25:
        who = known.key[1]
    else:
        who = words.similar_name(rng, known.key[1])
        kind = known.key[0] if known.key[0] in words.NUMBER_KINDS else None
    while True:
        lost = facts.any_fact(rng, who, recipe.numbers)
        if kind is not None and rng.random() < 0.5:
            lost = facts.number_fact(rng, who, kind)
        if lost.key not in keys:
            return lost


def chat(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """Short turns of many kinds, after a rule or none; facts are told and asked on the way."""
    pieces = Pieces().add(BOS)
    todo: list[tasks.Turn] = []
    if rng.random() < 0.4:
        system, todo = tasks.rule(rng)
        pieces.extend(tag_words(system, {tag for _, reply in todo for tag in reply.tags}))
    length, told, said = num_tokens(pieces), [], set()
    while True:
        fact: Fact | None = None
        looks_up = False
        draw = rng.random()
        if todo:
            asked, reply = todo.pop(0)
            question = tag_words(asked, reply.tags)
        elif draw < 0.15:
            new = facts.any_fact(rng, words.name(rng), recipe.numbers)
            told.append(new)
            question, reply = facts.sentence(new, new.told, "", 0.0), Pieces()
            reply.add("I will remember that.", ANSWER)
        elif draw < 0.35 and told:
            fact, looks_up = rng.choice(told), True
            question, reply = facts.question(fact), facts.answer(fact)
        elif draw < 0.42:
            lost = _never_told(rng, told, [words.name(rng)], recipe)
            question, reply = facts.question(lost), Pieces().add(UNKNOWN, ANSWER)
            fact, looks_up = lost, True
        else:
            asked, reply = tasks.any_task(rng)
            if reply.text in said:
                continue  # what was said before is copied, not learnt
            said.add(reply.text)
            question = tag_words(asked, reply.tags)
        turn = Pieces().add(USER).extend(question).extend(open_answer(rng, fact, looks_up))
        turn.extend(reply).add(EOS, 0.5)
        length += num_tokens(turn)
        if length > recipe.length:
            return pieces
        pieces.extend(turn)


def conversation(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """One training sequence of at most ``recipe.length`` tokens."""
    draw = rng.random()
    if draw < recipe.repeats:
        return stream_of_repeats(rng, recipe, num_tokens)
    draw -= recipe.repeats
    if draw < recipe.chats:
        return chat(rng, recipe, num_tokens)
    draw -= recipe.chats
    if draw < recipe.tools:
        return calls.tool_chat(rng, recipe.length, num_tokens)
    if draw < recipe.tools + recipe.about_text:
        return questions_about_text(rng, recipe, num_tokens)
    return questions_on_document(rng, recipe, num_tokens)
