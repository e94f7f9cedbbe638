"""The words the training data is made of: names by rule, everything else by list."""

# ruff: noqa: SIM905 - lists of words read better as text

import random
import zlib
from collections.abc import Callable

_ONSETS = (
    "b c d f g h j k l m n p r s t v w y z br cr dr fr gr kr pr tr bl cl fl gl kl pl sl "
    "ch sh th st sk sp sm sn sw qu"
).split()
_CONSONANTS = "b c d f g h j k l m n p r s t v w x y z".split()
_SIMPLE_ONSETS = "b d f g h j k l m n p r s t v z".split()
_VOWELS = "a e i o u a e i o a e i o y ai ea ee ie io ia oo ou".split()
_CODAS = "n r l s t m d k x th ck nd rt st sh ng rd ll ss nn".split()
_GIVEN = (
    "Mira Anna Emma Olivia Sophia Mia Lena Nora Clara Julia Laura Sarah Maria Elena Diana Irene "
    "Alice Grace Ruby Rose Lily Lucy Hanna Ella Eva Ada Vera Petra Heidi Ingrid Karin Astrid Freya "
    "Sigrid Tilda Wanda Zoe Yara Nadia Leila Amira Fatima Aisha Priya Anjali Meera Kavya Yuki "
    "Hana Sakura Naomi Keiko Oliver Noah Liam James Henry Lucas Oscar Felix Jonas Simon Tobias "
    "Martin Peter Paul Karl Anton Boris Ivan Viktor Dmitri Pavel Marek Tomas Milan Luka Marco "
    "Paolo Pedro Diego Carlos Mateo Hugo Louis Pierre Jean Andre Marcel Bruno Otto Erik Lars Nils "
    "Bjorn Sven Magnus Olaf Finn Sean Colin Ewan Rory Angus Omar Ahmed Hassan Tariq Karim Samir "
    "Ravi Arjun Vikram Rohan Kenji Hiro Takeshi Daniel David Robert Thomas William George Arthur "
    "Walter Edgar Frank Victor Stefan Adrian Fabian Julian Sandra Monica Sylvia Helena Bianca "
    "Carmen Teresa Angela Martha Edith Agnes Bertha Norma Tolven Karesh Zorin Belmar Quinn Tarek"
).split()

COLOURS = "red blue green yellow black white brown orange purple pink grey silver golden".split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Prague Dublin Athens Warsaw Tokyo Cairo "
    "Boston Geneva Zurich Milan Lyon Bergen"
).split()
ANIMALS = "cat dog horse bird fish rabbit goat sheep duck mouse parrot turtle pony hen".split()
FOODS = "bread rice soup cheese apples pears plums cake honey pasta beans nuts eggs grapes".split()
JOBS = "baker teacher doctor farmer painter driver writer nurse pilot singer cook tailor".split()
THINGS = (
    "table chair lamp book door window clock box bag cup plate spoon map key pen boat bridge tower "
    "garden house river lake road train shop market school library station kitchen roof wall tree"
).split()
ADJECTIVES = "old new small large quiet bright dark clean wide narrow heavy light cold warm".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
TIMES = "morning afternoon evening night spring summer autumn winter".split()
SMALL_WORDS = (
    "the a an of to in on at by and or but with from for is was has had were are be been not so "
    "he she it they we you I his her their my our this that when where who which all some no"
).split()
NUMBER_KINDS = (
    "access code|access code|access code|access code|locker number|room number|badge number|"
    "ticket number|order number|pin code|phone number|secret number"
).split("|")


def is_held_out(name: str) -> bool:
    """Whether a name is kept for evaluation; a tenth of all names are, by a hash."""
    return zlib.crc32(name.encode()) % 10 == 0


def _plain_name(rng: random.Random) -> str:
    """Consonants and vowels in turn, evenly drawn."""
    start, length = rng.random() < 0.2, rng.randrange(4, 8)
    letters = (rng.choice("aeiou" if i % 2 != start else _CONSONANTS) for i in range(length))
    return "".join(letters).capitalize()


def made_up_name(rng: random.Random) -> str:
    """Return a pronounceable word of 4 to 7 letters, with a capital."""
    return _plain_name(rng) if rng.random() < 0.35 else syllable_name(rng)


def syllable_name(rng: random.Random) -> str:
    """Return such a word made of English-looking syllables; the tokenizer knows these well."""
    while True:
        word = ""
        for _ in range(rng.choice((1, 2, 2, 2, 3, 3))):
            onsets = _ONSETS if not word or rng.random() < 0.3 else _SIMPLE_ONSETS
            word += rng.choice(onsets) + rng.choice(_VOWELS)
        if rng.random() < 0.5:
            word += rng.choice(_CODAS)
        if rng.random() < 0.1:
            word = rng.choice("aeiou") + word
        if 4 <= len(word) <= 7:
            return word.capitalize()


def name(
    rng: random.Random,
    held_out: bool = False,
    make: Callable[[random.Random], str] = made_up_name,
) -> str:
    """Return a name: mostly made up; only held-out ones or none of them."""
    while True:
        word = rng.choice(_GIVEN) if rng.random() < 0.15 else make(rng)
        if is_held_out(word) == held_out:
            return word


def names(rng: random.Random, count: int, held_out: bool = False) -> list[str]:
    """Return different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[name(rng, held_out)] = None
    return list(found)


def similar_name(rng: random.Random, other: str) -> str:
    """Return another name that shares its start or its end with ``other``; none held out."""
    while True:
        fresh = made_up_name(rng)
        cut = rng.randrange(1, max(2, len(other) - 1))
        word = other[:cut] + fresh.lower() if rng.random() < 0.7 else fresh + other[cut:]
        word = word[: rng.randrange(4, 8)]
        if word != other and len(word) >= 4 and word[-1] != word[-2] and not is_held_out(word):
            return word


def code(rng: random.Random) -> str:
    """Return four digits."""
    return f"{rng.randrange(10000):04d}"
