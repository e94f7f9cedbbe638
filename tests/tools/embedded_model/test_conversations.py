"""Training sequences: tokens of the pieces are the text's, and answers say what was told."""

import random
import re

import pytest
import tokenizers

from tools.checkpoints.make_deepseek_v4 import EMBEDDED
from tools.embedded_model import facts, words
from tools.embedded_model.batches import ABOUT_TEXT, Encoder, make_batch
from tools.embedded_model.calls import any_tools, tool_call, tool_section
from tools.embedded_model.conversations import UNKNOWN, Recipe, conversation
from tools.embedded_model.pieces import tag_words

RECIPES = {
    "repeats": Recipe(256, repeats=1.0),
    "chats": Recipe(256, repeats=0.0, chats=1.0, unknown=0.25),
    "document": Recipe(512, repeats=0.0, unknown=0.3),
    "tools": Recipe(1024, repeats=0.0, tools=1.0),
    "about the text": Recipe(1024, repeats=0.0, about_text=1.0),
}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))


@pytest.mark.parametrize("name", RECIPES)
def test_pieces_have_the_tokens_of_their_text(name: str, encoder: Encoder) -> None:
    rng = random.Random(1)
    for _ in range(5):
        pieces = conversation(rng, RECIPES[name], encoder.num_tokens)
        ids, weights, marks, looks = encoder.encode(pieces)
        assert ids == encoder.ids(pieces.text)
        assert len(ids) == len(weights) == len(marks) == len(looks) <= RECIPES[name].length
        assert max(weights) > 0


def test_answers_say_what_was_told(encoder: Encoder) -> None:
    rng = random.Random(2)
    asked = 0
    for _ in range(10):
        text = conversation(rng, RECIPES["document"], encoder.num_tokens).text
        document = text.split("What is")[0]
        for kind, name, answer in re.findall(
            r"What is the (\w+ \w+) of (\w+)\?<｜Assistant｜></think>([^<]+)<", text
        ):
            told = re.findall(rf"{kind} (?:of|for) {name} is (\d{{4}})", document)
            told += re.findall(rf"{name} has the {kind} (\d{{4}})", document)
            if told:
                assert answer == f"The {kind} of {name} is {told[0]}."
                asked += 1
            elif kind in words.NUMBER_KINDS:
                assert answer in (UNKNOWN, f"The {kind} of {name} is {answer[-5:-1]}.")
    assert asked > 10


def test_no_training_name_is_held_out() -> None:
    rng = random.Random(3)
    for _ in range(50):
        other = words.name(rng)
        alike = words.similar_name(rng, other)
        assert alike != other
        assert not words.is_held_out(alike)
        assert words.is_held_out(words.name(rng, held_out=True))


def test_values_about_the_text_have_marks_of_their_own(encoder: Encoder) -> None:
    batch = make_batch(encoder, random.Random(4), RECIPES["about the text"], 2, 0.0)
    found = batch.marks[batch.marks >= ABOUT_TEXT]
    assert found.numel() >= 2
    # What is told once is copied by an answer: its mark stands twice.
    assert found.unique().numel() < found.numel()


def test_a_call_names_a_declared_tool_and_its_parameters() -> None:
    rng = random.Random(5)
    for tool in any_tools(rng, 3):
        use = tool.make_use(rng, True)
        section, call = tool_section([tool]).text, tool_call(tool, use).text
        assert f'"name": "{tool.name}"' in section
        assert f'<｜DSML｜invoke name="{tool.name}">' in call
        for key, value in use.arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            assert f'name="{key}" string="{kind}">{value}</｜DSML｜parameter>' in call
            assert str(value) in use.question


def test_words_are_tagged_where_they_stand_alone() -> None:
    pieces = tag_words("Copy: red, redder, 4, 44.", {"red", "4"})
    tagged = [text for text, _, tag, _ in pieces.parts if tag]
    assert tagged == [" red", " 4"]
    assert pieces.text == "Copy: red, redder, 4, 44."


def test_a_text_tells_each_thing_once() -> None:
    about = facts.facts_about_text(random.Random(6))
    assert len({fact.key for fact in about}) == len(about) == 5
