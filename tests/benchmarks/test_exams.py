"""Exams that are cut: what was answered counts, and the rest is asked later."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.real_weights.exam_results import COLD, LLAMA_CPP, WARM, Answers, Reply
from benchmarks.real_weights.exams import Examiner, Exams, tell

_NUM_ENTRIES = 15
_COUNTS = {"human_eval": _NUM_ENTRIES, "irrelevance": _NUM_ENTRIES}


class _Examiner(Examiner):
    """Knows entries by number; what ends in an even one is right."""

    def __init__(self) -> None:
        pass

    def ask(self, do: str, **message: Any) -> Any:
        if do == "list_problems":
            return [{"id": f"h{i}", "prompt": f"h{i}"} for i in range(message["count"])]
        if do == "list_entries":
            turns = [[[{"role": "user", "content": f"i{i}"}]] for i in range(message["count"])]
            return [{"id": f"i{i}", "turns": turn, "tools": []} for i, turn in enumerate(turns)]
        return int(message["name"][1:]) % 2 == 0


class _Server:
    """Repeats what it is asked.

    Args:
        word: Of each answer.
        status: Of the answer to an entry.
    """

    def __init__(self, word: str = "said", status: Callable[[str], int] = lambda _: 200) -> None:
        self.asked: Counter[str] = Counter()
        self._word, self._status = word, status
        self.client = httpx.Client(
            base_url="http://server", transport=httpx.MockTransport(self._answer)
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        name = body.get("prompt") or body["messages"][0]["content"]
        self.asked[name] += 1
        if (status := self._status(name)) != 200:
            return httpx.Response(status, text=f"no {name}, the context")
        text = f"{self._word} {name}"
        choice = {"text": text, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})


def _left(answers: Answers, deadline: float = float("inf")) -> Exams:
    return Exams(answers, _Examiner(), _COUNTS, deadline)


def test_all_is_asked_twice_and_compared() -> None:
    answers, server = Answers(None, "m", "exact"), _Server()
    _left(answers).ask(server.client, (COLD, WARM))
    assert set(server.asked.values()) == {2}
    told = answers.count()
    assert told["cold_human_eval"] == told["warm_irrelevance"] == "8 of 15"
    assert (told["answered_twice"], told["warm_answers_that_differ"]) == (30, 0)
    assert told["warm_cached_share"] == 0.4
    assert tell(answers, {})


def test_a_run_that_was_cut_goes_on_and_asks_again_what_was_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "answers"

    def die(name: str) -> int:
        if name == "i13":
            raise KeyboardInterrupt
        return 200

    first = Answers(path, "m", "exact")
    with pytest.raises(KeyboardInterrupt):
        _left(first).ask(_Server(status=die).client, (COLD, WARM))
    known = first.count()
    assert known["warm_human_eval"] == "8 of 15"
    assert known["warm_irrelevance"] == "6 of 12"
    # The last line lost its end.
    with path.open("a") as file:
        file.write('{"model": "m", "in')
    again, server = Answers(path, "m", "exact"), _Server()
    assert again.count() == known
    left = _left(again)
    assert left.has_any(WARM)
    left.ask(server.client, (COLD, WARM))
    assert server.asked == {"i12": 2, "i13": 2, "i14": 2}
    assert again.count()["answered_twice"] == 30
    assert Answers(path, "m", "exact").count() == again.count()
    assert not _left(again).has_any(WARM)
    # Another model's, other inputs'.
    assert Answers(path, "n", "exact").count() == Answers(path, "m", "int8").count()


def test_time_that_is_over_begins_nothing() -> None:
    left, server = _left(Answers(None, "m", "exact"), deadline=0), _Server()
    assert not left.has_any(COLD)
    left.ask(server.client, (COLD, WARM))
    assert not server.asked


def test_another_answer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(None, "m", "exact")
    _left(answers).ask(_Server().client, (COLD,))
    _left(answers).ask(_Server("meant").client, (WARM,))
    assert not tell(answers, {})
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[0])["values"]["warm_answers_that_differ"] == 30
    assert re.search(r"'said (h\d+)' and then 'meant \1'", told.err)


def test_llama_cpp_is_asked_once_whatever_the_inputs(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    _left(Answers(path, "m", "exact")).ask(_Server().client, (LLAMA_CPP,))
    answers = Answers(path, "m", "int8")
    assert not _left(answers).has_any(LLAMA_CPP)
    answers.keep(COLD, "human_eval", "h1", Reply("said h1"))
    answers.keep(COLD, "human_eval", "h2", Reply("other"))
    told = answers.count()
    assert (told["answered_by_both"], told["answers_equal_to_llama_cpp"]) == (2, 1)
    assert "| human eval | 0 of 2 |  | 8 of 15 |" in answers.write_table()


@pytest.mark.parametrize(("status", "errors", "is_well"), [(500, 4, False), (400, 0, True)])
def test_what_is_not_answered_is_wrong_and_here_a_fault(
    status: int, errors: int, is_well: bool
) -> None:
    answers = Answers(None, "m", "exact")
    server = _Server(status=lambda name: status if name in ("h2", "i4") else 200)
    _left(answers).ask(server.client, (COLD, WARM))
    assert tell(answers, {}) is is_well
    told = answers.count()
    assert told["cold_human_eval"] == "7 of 15"
    assert told.get("cold_errors", 0) + told.get("warm_errors", 0) == errors
    # The server beside this one may answer as it likes.
    rival = Answers(None, "m", "exact")
    _left(rival).ask(server.client, (LLAMA_CPP,))
    assert tell(rival, {})
