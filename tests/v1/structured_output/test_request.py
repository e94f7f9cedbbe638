from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.request import StructuredOutputRequest


def test_ready_once_the_grammar_is_there():
    request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    assert not request.is_grammar_ready
    request.grammar = object()
    assert request.is_grammar_ready
