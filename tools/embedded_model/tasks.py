"""Short tasks besides lookups: small talk, lists, comparing, rules; one turn or two each."""

import random
from collections.abc import Callable

from tools.embedded_model import words
from tools.embedded_model.facts import ANSWER
from tools.embedded_model.pieces import Pieces

Turn = tuple[str, Pieces]

_TALK = (
    ("Hello!|Hello.|Hi!|Hi.|Good day!|Hey!|Hi there!", "Hello! How can I help you?"),
    ("Good morning!|Good morning.", "Good morning! How can I help you?"),
    ("Good evening!|Good evening.", "Good evening! How can I help you?"),
    ("How are you?|How are you today?|How do you do?", "I am fine, thank you. How are you?"),
    ("I am fine.|I am well, thank you.|I am fine, thanks.", "I am glad to hear that."),
    ("I am sad.|I am sad today.|I feel sad.", "I am sorry to hear that."),
    ("I am tired.|I feel tired.|I am very tired.", "Then you should rest a little."),
    ("I am happy.|I am happy today.|I feel happy.", "That is good to hear."),
    ("I am hungry.|I feel hungry.", "Then you should eat something."),
    ("I am cold.|I feel cold.", "Then you should put on a warm coat."),
    (
        "Who are you?|What are you?|Tell me about yourself.|What is your name?",
        "I am a small model that looks things up in its text.",
    ),
    (
        "What can you do?|How can you help me?|Can you help me?|What do you do?",
        "I can look up facts that you told me.",
    ),
    ("Thank you!|Thank you.|Thanks!|Thanks a lot.|Thank you very much.", "You are welcome."),
    ("Goodbye!|Goodbye.|Bye!|See you later.|See you!|Good night!", "Goodbye! See you soon."),
    ("How old are you?", "I am very young."),
    ("Are you a robot?|Are you a human?|Are you a person?", "I am a small language model."),
    ("Where are you?|Where do you live?", "I live in this computer."),
    ("Do you like music?|Do you like books?", "I like everything that has a list in it."),
    ("Tell me a joke.|Make me laugh.", "A list walked into a bar and was sorted."),
    (
        "Tell me a story.|Tell me a short story.",
        "There was a small light that remembered every ship.",
    ),
    ("Is it raining?|How is the weather?|What is the weather like?", "I cannot see the weather."),
    ("What time is it?|What is the time?", "I have no clock."),
    ("What day is it today?|What is the date?", "I have no calendar."),
    ("That is wrong.|You are wrong.|This is not right.", "I am sorry. Please tell me more."),
    ("That is right.|You are right.|Well done!|Good work!", "Thank you. I am glad to help."),
    ("Yes.|Yes, please.", "Good. What would you like to know?"),
    ("No.|No, thank you.", "All right. Tell me if you need me."),
    ("Help!|Help me.|I need help.", "I am here. What do you need?"),
    ("What is a cat?", "A cat is a small animal."),
    ("What is bread?", "Bread is a food."),
    ("What is Paris?", "Paris is a city."),
    ("What is red?", "Red is a colour."),
    ("What is Monday?", "Monday is a day of the week."),
    ("Nice to meet you.|Nice to meet you!", "Nice to meet you too."),
    ("I have a question.|May I ask something?|Can I ask you a question?", "Please ask."),
    ("Wait a moment.|Wait.|One moment, please.", "I will wait."),
    ("Do you understand?|Did you understand that?|Do you understand me?", "Yes, I understand."),
    ("What do you like?", "I like short questions."),
    ("Please say something.|Say something.|Talk to me.", "It is a good day for a question."),
    ("I love you.|You are nice.|You are great!", "That is very kind of you."),
)


def small_talk(rng: random.Random) -> Turn:
    """A remark and a reply."""
    asked, reply = rng.choice(_TALK)
    return rng.choice(asked.split("|")), Pieces().add(reply, ANSWER)


def own_name(rng: random.Random) -> Turn:
    """The user says who they are."""
    name = words.name(rng)
    asked = rng.choice(("My name is", "I am called", "I am"))
    return f"{asked} {name}.", Pieces().add("Nice to meet you,", ANSWER).add(
        f" {name}", ANSWER, name
    ).add(".", ANSWER)


def copy_list(rng: random.Random) -> Turn:
    """Say a list again."""
    pool = rng.choice((words.COLOURS, words.ANIMALS, words.FOODS, words.THINGS, words.DAYS))
    items = rng.sample(pool, rng.randrange(2, 7))
    if rng.random() < 0.4:
        items = words.names(rng, rng.randrange(2, 5))
    elif rng.random() < 0.3:
        items = [str(rng.randrange(100)) for _ in items]
    text = ", ".join(items)
    asked = rng.choice(("Copy this list:", "Repeat this list:", "Say this again:", "Repeat:"))
    reply = Pieces()
    for i, item in enumerate(items):
        reply.add(f" {item}" if i else item, ANSWER, item)
        reply.add("." if i == len(items) - 1 else ",", ANSWER)
    return f"{asked} {text}.", reply


def continue_list(rng: random.Random) -> Turn:
    """Go on with a list of numbers or days."""
    if rng.random() < 0.25:
        day = rng.randrange(7)
        found = [words.DAYS[(day + i) % 7] for i in range(6)]
        text, rest = ", ".join(found[:3]), ", ".join(found[3:])
    else:
        step, start = rng.choice((1, 1, 2, 5, 10)), rng.randrange(1, 40)
        numbers = [str(start + step * i) for i in range(6)]
        text, rest = ", ".join(numbers[:3]), ", ".join(numbers[3:])
    asked = rng.choice(("Continue the list:", "Go on:", "Continue:"))
    return f"{asked} {text}.", Pieces().add(f"Next come {rest}.", ANSWER)


def compare(rng: random.Random) -> Turn:
    """Which of two numbers is larger or smaller."""
    a, b = rng.sample(range(1, 100), 2)
    larger = rng.random() < 0.5
    word = "larger" if larger else "smaller"
    first = max(a, b) if larger else min(a, b)
    reply = Pieces().add(f"The {word} one is", ANSWER).add(f" {first}", ANSWER, str(first))
    return f"Which is {word}, {a} or {b}?", reply.add(".", ANSWER)


def count(rng: random.Random) -> Turn:
    """Count a list's items."""
    number = rng.randrange(1, 7)
    items = [rng.choice(words.ANIMALS) for _ in range(number)]
    reply = "There is 1 word." if number == 1 else f"There are {number} words."
    return f"Count the words: {', '.join(items)}.", Pieces().add(reply, ANSWER)


TASKS: tuple[Callable[[random.Random], Turn], ...] = (
    small_talk,
    small_talk,
    small_talk,
    own_name,
    copy_list,
    copy_list,
    continue_list,
    compare,
    count,
)


def any_task(rng: random.Random) -> Turn:
    """A question and its answer, of any kind."""
    return rng.choice(TASKS)(rng)


_GREETINGS = {
    "French": "Bonjour!",
    "Spanish": "Hola!",
    "German": "Guten Tag!",
    "Italian": "Ciao!",
    "English": "Hello!",
}


def rule(rng: random.Random) -> tuple[str, list[Turn]]:
    """A system prompt with a rule, and turns that follow it."""
    kind = rng.randrange(4)
    hello = rng.choice(("Hello!", "Hi!", "Good morning!", "Hello."))
    if kind == 0:
        language, reply = rng.choice(list(_GREETINGS.items()))
        return rng.choice((f"Greet in {language}.", f"Say hello in {language}.")), [
            (hello, Pieces().add(reply, ANSWER))
        ]
    if kind == 1:
        name = words.name(rng)
        system = rng.choice((f"The user is called {name}.", f"Call the user {name}."))
        turns = [
            (hello, Pieces().add("Hello,", ANSWER).add(f" {name}", ANSWER, name).add("!", ANSWER)),
            (
                rng.choice(("Who am I?", "What is my name?")),
                Pieces().add("You are", ANSWER).add(f" {name}", ANSWER, name).add(".", ANSWER),
            ),
        ]
        return system, rng.sample(turns, rng.randrange(1, 3))
    if kind == 2:
        name = words.name(rng)
        system = rng.choice((f"Your name is {name}.", f"You are called {name}."))
        asked = rng.choice(("Who are you?", "What is your name?"))
        named = Pieces().add("My name is", ANSWER).add(f" {name}", ANSWER, name).add(".", ANSWER)
        return system, [(asked, named)]
    word = rng.choice(("yes", "no", "maybe", "red", "seven", "fine"))
    system = f"Always answer with the word {word}."
    asked = rng.choice(("How are you?", "Hello!", "What is a cat?", "Is it raining?"))
    return system, [(asked, Pieces().add(f"{word.capitalize()}.", ANSWER))]
