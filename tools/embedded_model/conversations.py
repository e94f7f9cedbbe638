"""Whole training sequences: documents with many questions, streams of repeated facts."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.embedded_model import facts, tasks, words
from tools.embedded_model.facts import ANSWER, Fact
from tools.embedded_model.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, Pieces

UNKNOWN = "I don't know that."
NumTokens = Callable[[Pieces], int]


@dataclass(frozen=True)
class Recipe:
    """What sequences a stage of training sees.

    Attributes:
        length: Tokens per sequence.
        repeats: Share of sequences that are streams of facts told twice.
        chats: Share of sequences that are chats without a document.
        chatter: Share of a document's sentences that tell nothing.
        numbers: Share of facts that are four-digit numbers.
        unknown: Share of questions about what was never told.
        document: Share of a sequence's tokens that the document takes.
    """

    length: int
    repeats: float = 0.3
    chatter: float = 0.2
    numbers: float = 0.7
    unknown: float = 0.08
    document: float = 0.5
    chats: float = 0.0


def tell(fact: Fact, lead: str) -> Pieces:
    """A sentence that tells the fact; no token is a target."""
    return facts.sentence(fact, fact.told, lead, 0.0)


def stream_of_repeats(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """Facts in a row, each told again later, where its value is a target."""
    pieces = Pieces().add(BOS).add(USER)
    length, told, lead = num_tokens(pieces), [], ""
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
    pieces, told, length, lead = Pieces(), {}, 0, ""
    while pool:
        if rng.random() < recipe.chatter:
            piece = Pieces().add(lead + facts.chatter(rng))
        else:
            who = pool.pop()
            if told and rng.random() < 0.15:
                who = rng.choice(list(told))[1]
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
    while order or absent:
        fact: Fact | None = None
        if (absent and rng.random() < recipe.unknown) or not order:
            lost = _never_told(rng, told, absent, recipe)
            asked, reply = lost, Pieces().add(UNKNOWN, ANSWER)
            if rng.random() < 0.3:
                absent.pop()
        else:
            fact = order.pop()
            asked, reply = fact, facts.answer(fact)
        lead = ""
        if pieces.parts[-1][0] == " ":
            pieces.parts.pop()
            lead = " "
        turn = facts.question(asked, lead)
        turn.extend(open_answer(rng, fact)).extend(reply).add(EOS, 0.5).add(USER)
        length += num_tokens(turn)
        if length > recipe.length:
            return pieces
        pieces.extend(turn)
    return pieces


def _never_told(rng: random.Random, told: list[Fact], absent: list[str], recipe: Recipe) -> Fact:
    """A fact about a stranger, or of another kind about somebody known."""
    keys = {fact.key for fact in told}
    who = rng.choice(told).key[1] if told and rng.random() < 0.25 else rng.choice(absent)
    while True:
        lost = facts.any_fact(rng, who, recipe.numbers)
        if lost.key not in keys:
            return lost


def chat(rng: random.Random, recipe: Recipe, num_tokens: NumTokens) -> Pieces:
    """Short turns of many kinds, after a rule or none; facts are told and asked on the way."""
    pieces = Pieces().add(BOS)
    todo: list[tasks.Turn] = []
    if rng.random() < 0.4:
        system, todo = tasks.rule(rng)
        pieces.add(system)
    length, told, said = num_tokens(pieces), [], set()
    while True:
        fact: Fact | None = None
        looks_up = False
        draw = rng.random()
        if todo:
            asked, reply = todo.pop(0)
            question = Pieces().add(asked)
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
            looks_up = True
        else:
            asked, reply = tasks.any_task(rng)
            if reply.text in said:
                continue  # what was said before is copied, not learnt
            said.add(reply.text)
            question = Pieces().add(asked)
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
    if draw < recipe.repeats + recipe.chats:
        return chat(rng, recipe, num_tokens)
    return questions_on_document(rng, recipe, num_tokens)
