import subprocess
import sys

import pytest

import vllm


@pytest.mark.slow
def test_importing_vllm_is_light():
    code = (
        "import sys, vllm; vllm.SamplingParams; vllm.RequestOutput; vllm.TokensPrompt;"
        "print([m for m in ('torch', 'pydantic', 'transformers', 'zmq') if m in sys.modules])"
    )
    path = [p for p in sys.path if p]
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
        capture_output=True,
        check=True,
    )
    assert out.stdout.strip() == b"[]"


@pytest.mark.parametrize("name", [n for n in vllm.__all__ if n != "__version__"])
def test_every_public_name_loads(name):
    assert getattr(vllm, name) is not None
    assert name in dir(vllm)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vllm.nonsense
