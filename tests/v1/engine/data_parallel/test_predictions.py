"""What was foretold of the last requests."""

from vllm.v1.engine.data_parallel.predictions import Prediction, Predictions
from vllm.v1.messages import EngineCoreOutput, PrefillStats


def output(name: str, predicted: int | None, cached: int = 64) -> EngineCoreOutput:
    stats = PrefillStats(100, cached, predicted_tokens=predicted, prediction="late")
    return EngineCoreOutput(name, [1], prefill_stats=stats)


def test_predictions_are_found_by_the_clients_id_and_are_bounded():
    predictions = Predictions(max_requests=2)
    predictions.note([output("cmpl-a-0-0123abcd-00000001", 32)], core=1)
    # A later step, one without a prediction, and another prompt of the same request tell nothing.
    predictions.note([EngineCoreOutput("cmpl-a-0-0123abcd-00000001", [2])], core=1)
    predictions.note([output("cmpl-b-0-0123abcd-00000002", None)], core=1)
    predictions.note([output("cmpl-a-1-0123abcd-00000003", 0)], core=0)
    assert predictions.find("cmpl-a") == Prediction(32, 64, "late", 1)
    assert predictions.find("cmpl-b") is None
    predictions.note([output("cmpl-c-0-0123abcd-00000004", 1)], core=0)
    predictions.note([output("cmpl-d-0-0123abcd-00000005", 1)], core=0)
    assert predictions.find("cmpl-a") is None
    assert predictions.find("cmpl-d") is not None
