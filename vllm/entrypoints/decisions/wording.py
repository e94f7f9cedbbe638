"""The words around a question, all of them here. Other words give other probabilities:
whoever changes any of them raises ``PROMPT_FORMAT_VERSION``.

    input ... \\n\\n Question about the above:\\n | instructions  Options: A. ..  Reply with ...
    -------------- the same for all questions --|----------- the question's own ---------------
"""

from vllm.entrypoints.decisions.questions import Question, QuestionKind, shown_value

PROMPT_FORMAT_VERSION = 1
# Between the input and this there is an empty line, where both stand in one message.
BETWEEN = "\n\n"
LEAD = "Question about the above:\n"
# The last words of every question: the chat format's own text follows.
LAST_WORDS = " of one option only."
_OPTIONS = "Options:"
_LEVELS = "Options, from the lowest to the highest:"
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
