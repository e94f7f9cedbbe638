"""Questions of the accuracy check: the same for every server, and a difference is counted."""

from benchmarks.accuracy import Answer, Question, compare, make_questions


def test_questions_are_the_same_each_time_and_share_their_examples() -> None:
    made, again = make_questions(12, 7), make_questions(12, 7)
    assert [q.body for q in made] == [q.body for q in again]
    kinds = [q.kind for q in made]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(kinds, 12)
    prompts = [q.body["messages"][0]["content"] for q in made if q.kind == "5-shot"]
    shots = {prompt.rsplit("\n", 1)[0] for prompt in prompts}
    assert len(shots) == 2
    assert all(len(shot.splitlines()) == 5 for shot in shots)
    assert all(q.is_right(f" {q.wanted}") or q.is_right(q.wanted) for q in made)


def test_answers_are_compared_with_the_first_servers_first_round() -> None:
    question = Question("told", {}, "4", lambda text: text == "4")
    right, wrong = Answer("4", 10, 0), Answer("5", 10, 8)
    values = compare([question], {"none": [[right], [right]], "cache": [[right], [wrong]]})
    assert values["none"]["told"] == {"asked": 2, "right": 2, "different": 0, "cached": 0.0}
    assert values["cache"]["told"] == {"asked": 2, "right": 1, "different": 1, "cached": 0.4}
