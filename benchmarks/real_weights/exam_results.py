"""What was answered in exams, and what it comes to.

A run of all exams takes hours, so each answer is kept in a file as it comes, one line of JSON, and
a run that is cut goes on where it was.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# This server, asked twice, and the one beside it.
COLD, WARM, LLAMA_CPP = "cold", "warm", "llama_cpp"
RUNS = (COLD, WARM, LLAMA_CPP)


@dataclass(slots=True)
class Reply:
    """What came of one entry.

    Attributes:
        said: The words, or the calls.
        is_right: As the examiner marks it.
        error: Why there is no answer.
        prompt_tokens: Of all requests.
        cached_tokens: Those of them that were hits.
    """

    said: Any = None
    is_right: bool = False
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of the file.

    Attributes:
        model: Its name.
        inputs: How those of products are rounded: "exact", "int8"; empty for llama.cpp's.
        run: One of ``RUNS``.
        exam: Its name.
        entry: The entry's id.
        reply: What came of it.
    """

    model: str
    inputs: str
    run: str
    exam: str
    entry: str
    reply: Reply


class Answers:
    """All answers of one model with one kind of inputs, the last one of each entry.

    Owns: the file's lines.

    Args:
        path: Of the file, which may hold other models' answers, too; none: kept in memory.
        model: Its name.
        inputs: How those of products are rounded.
    """

    def __init__(self, path: Path | None, model: str, inputs: str) -> None:
        self._path = path
        self._model = model
        self._inputs = inputs
        self._found: dict[tuple[str, str, str], Answer] = {}
        for line in _read_whole_lines(path) if path is not None else []:
            raw = json.loads(line)
            answer = Answer(**{**raw, "reply": Reply(**raw["reply"])})
            if answer.model == model and answer.inputs == self._inputs_of(answer.run):
                self._found[answer.run, answer.exam, answer.entry] = answer

    def keep(self, run: str, exam: str, entry: str, reply: Reply) -> None:
        """Keep what came of an entry; the last one counts."""
        answer = Answer(self._model, self._inputs_of(run), run, exam, entry, reply)
        self._found[run, exam, entry] = answer
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(answer)) + "\n")

    def list_missing(self, run: str, exam: str, entries: Sequence[str]) -> list[str]:
        """Return those of the entries without an answer."""
        return [entry for entry in entries if (run, exam, entry) not in self._found]

    def list_differing(self) -> list[tuple[Answer, Answer]]:
        """Return the answers whose repetition is another one, each with it."""
        return [
            (cold, warm)
            for cold, warm in self._list_pairs(COLD, WARM)
            if (cold.reply.said, cold.reply.error) != (warm.reply.said, warm.reply.error)
        ]

    def list_errors(self) -> list[Answer]:
        """Return what this server did not answer."""
        return [a for a in self._found.values() if a.reply.error and a.run != LLAMA_CPP]

    def count(self) -> dict[str, Any]:
        """Return the figures: how many of how many are right, and what compares the runs."""
        figures: dict[str, Any] = {}
        for run in RUNS:
            own = [answer for answer in self._found.values() if answer.run == run]
            asked = Counter(answer.exam for answer in own)
            right = Counter(answer.exam for answer in own if answer.reply.is_right)
            figures |= {f"{run}_{exam}": f"{right[exam]} of {asked[exam]}" for exam in asked}
            if errors := sum(bool(answer.reply.error) for answer in own):
                figures[f"{run}_errors"] = errors
            if prompts := sum(answer.reply.prompt_tokens for answer in own):
                cached = sum(answer.reply.cached_tokens for answer in own)
                figures[f"{run}_cached_share"] = round(cached / prompts, 3)
        figures["answered_twice"] = len(self._list_pairs(COLD, WARM))
        figures["warm_answers_that_differ"] = len(self.list_differing())
        if pairs := self._list_pairs(COLD, LLAMA_CPP):
            figures["answered_by_both"] = len(pairs)
            figures["answers_equal_to_llama_cpp"] = sum(
                a.reply.said == b.reply.said for a, b in pairs
            )
        return figures

    def write_table(self) -> str:
        """Return the marks as a markdown table, a row for each exam."""
        figures = self.count()
        exams = dict.fromkeys(exam for _, exam, _ in self._found)
        lines = ["| | here, cold | here, warm | llama.cpp |", "|---|--:|--:|--:|"]
        for exam in exams:
            cells = [str(figures.get(f"{run}_{exam}", "")) for run in RUNS]
            lines.append(f"| {exam.replace('_', ' ')} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _list_pairs(self, first: str, second: str) -> list[tuple[Answer, Answer]]:
        return [
            (answer, self._found[second, exam, entry])
            for (run, exam, entry), answer in self._found.items()
            if run == first and (second, exam, entry) in self._found
        ]

    def _inputs_of(self, run: str) -> str:
        return "" if run == LLAMA_CPP else self._inputs


def _read_whole_lines(path: Path) -> list[str]:
    """Return a file's lines; what a cut left of a last one is taken away.

    Mutates: the file, where its last line has no end.
    """
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        path.write_bytes(whole)
    return whole.decode("utf-8").splitlines()
