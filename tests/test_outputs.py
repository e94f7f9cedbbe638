from vllm.outputs import CompletionOutput, RequestOutput


def output(*answers: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], None, list(answers), finished)


def test_deltas_are_joined():
    first = output(CompletionOutput(0, "a", [1], -1.0, [{}]))
    first.merge(
        output(CompletionOutput(0, "b", [2], -2.0, [{}], "stop", "x"), finished=True), deltas=True
    )
    (answer,) = first.outputs
    assert (answer.text, list(answer.token_ids), answer.cumulative_logprob) == ("ab", [1, 2], -2.0)
    assert (len(answer.logprobs), answer.finish_reason, answer.stop_reason) == (2, "stop", "x")
    assert answer.finished()
    assert first.finished


def test_cumulative_outputs_are_replaced():
    first = output(CompletionOutput(0, "a", [1]))
    first.merge(output(CompletionOutput(0, "ab", [1, 2])), deltas=False)
    assert [o.text for o in first.outputs] == ["ab"]


def test_answers_are_told_apart():
    first = output(CompletionOutput(0, "a", [1]))
    first.merge(output(CompletionOutput(1, "x", [9])), deltas=True)
    first.merge(output(CompletionOutput(0, "b", [2])), deltas=True)
    assert [(o.index, o.text) for o in first.outputs] == [(0, "ab"), (1, "x")]


def test_prompt_logprobs_of_the_first_delta_are_kept():
    first = output(CompletionOutput(0, "a", [1]))
    first.prompt_logprobs = [None]
    first.merge(output(CompletionOutput(0, "b", [2])), deltas=True)
    assert first.prompt_logprobs == [None]
