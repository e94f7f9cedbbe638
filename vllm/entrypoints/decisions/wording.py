"""The words around a question, all of them here: those of decisions, and those about a query and a
document. Other words give other probabilities: whoever changes any of them raises
``PROMPT_FORMAT_VERSION``.

    input ... \\n\\n Question about the above:\\n | instructions  Options: A. ..  Reply with ...
    -------------- the same for all questions --|----------- the question's own ---------------
"""

from vllm.entrypoints.decisions.labels import label_texts
from vllm.entrypoints.decisions.questions import (
    Question,
    QuestionKind,
    predicate_options,
    shown_value,
)

PROMPT_FORMAT_VERSION = 1
# Between the input and this there is an empty line, where both stand in one message.
BETWEEN = "\n\n"
LEAD = "Question about the above:\n"
# The last words of every question: the chat format's own text follows.
LAST_WORDS = " of one option only."
_OPTIONS = "Options:"
_LEVELS = "Options, from the lowest to the highest:"
# What stands behind a question to a model that knows no chats.
PLAIN_END = "\n\nAnswer:"
_HOW = {1: "Reply with the letter", 2: "Reply with the two letters"}


def spell_question(question: Question, labels: list[str]) -> str:
    """Return the text of a question, from behind ``LEAD`` to ``LAST_WORDS``.

    Args:
        question: The question.
        labels: What stands for its options, in their order.
    """
    lines = []
    for label, option in zip(labels, question.options, strict=True):
        value = shown_value(option.value, question.options)
        about = f": {option.description}" if option.description else ""
        lines.append(f"{label}. {value}{about}")
    heading = _LEVELS if question.kind is QuestionKind.SCORE else _OPTIONS
    how = _HOW[len(labels[0])]
    options = "\n".join(lines)
    return f"{question.instructions}\n\n{heading}\n{options}\n\n{how}{LAST_WORDS}"


RELEVANCE = Question(
    "documents",
    QuestionKind.PREDICATE,
    "Does the document contain what the query asks for?",
    predicate_options(),
)
"""What a model is asked of a query and a document."""


def spell_pair(query: str, document: str, instruction: str | None) -> str:
    """Return the input of ``RELEVANCE``: what the documents of a query share comes first."""
    head = "" if instruction is None else f"{instruction}\n\n"
    return f"{head}Query: {query}\n\nDocument: {document}"


def spell_plain(text: str, question: Question) -> str:
    """Return a question about a text, for a model that knows no chats: a label is next."""
    asked = spell_question(question, label_texts(len(question.options)))
    return f"{text}{BETWEEN}{LEAD}{asked}{PLAIN_END}"
