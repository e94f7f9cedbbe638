"""The declared calls: registered, checked by the dispatcher, CPU and Meta agreeing."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests import OpCheckError

from vllm.exceptions import UnsupportedFeatureError
from vllm_ascend.ops.dtype_codes import code_of, torch_dtype_of
from vllm_ascend.ops.samples import sample_calls
from vllm_ascend.ops.schemas import NPU_OPS, register_npu_ops


def call(name: str) -> Any:
    return getattr(torch.ops.npu, name)


def test_schemas_come_back_from_torch() -> None:
    for op in NPU_OPS:
        schema = call(op.name).default._schema
        assert schema == torch._C.parse_schema(f"npu::{op.schema}")


def test_registering_twice_is_once() -> None:
    assert register_npu_ops() is register_npu_ops()


@pytest.mark.slow
def test_a_loaded_torch_npu_is_refused() -> None:
    code = (
        "import torch\n"
        "library = torch.library.Library('npu', 'FRAGMENT')\n"
        "library.define('npu_rms_norm(Tensor x) -> Tensor')\n"
        "from vllm.exceptions import ConfigError\n"
        "from vllm_ascend.ops.schemas import register_npu_ops\n"
        "try:\n"
        "    register_npu_ops()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "npu_rms_norm is registered already" in done.stdout


def test_every_call_has_a_sample() -> None:
    assert {sample.name for sample in sample_calls()} == {op.name for op in NPU_OPS}


@pytest.mark.parametrize("sample", sample_calls(), ids=lambda sample: sample.name)
def test_meta_results_look_like_cpu_results(sample: Any) -> None:
    on_cpu = sample.results(torch.device("cpu"))
    on_meta = sample.results(torch.device("meta"))
    assert [(r.shape, r.dtype) for r in on_cpu] == [(r.shape, r.dtype) for r in on_meta]
    assert all(r.device.type == "meta" for r in on_meta)


@pytest.mark.slow
@pytest.mark.parametrize("sample", sample_calls(), ids=lambda sample: sample.name)
def test_opcheck(sample: Any) -> None:
    """The schema's word on aliases and mutation is kept, and fake tensors agree with real ones."""
    arguments, keywords = sample.make(torch.device("cpu"))
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(call(sample.name).default, arguments, keywords, test_utils=utils)


def test_opcheck_sees_a_mutation_that_the_schema_hides() -> None:
    with torch.library._scoped_library("checked", "DEF") as library:
        library.define("hidden(Tensor x) -> Tensor")
        library.impl("hidden", lambda x: x.add_(1).clone(), "CPU")
        with pytest.raises(OpCheckError, match="mutated"):
            torch.library.opcheck(
                torch.ops.checked.hidden.default, (torch.ones(2),), test_utils="test_schema"
            )


@pytest.mark.parametrize("sample", sample_calls(), ids=lambda sample: sample.name)
def test_fake_results_look_like_meta_results(sample: Any) -> None:
    with FakeTensorMode():
        fake = sample.results(torch.device("cpu"))
    on_meta = sample.results(torch.device("meta"))
    assert [(r.shape, r.dtype) for r in fake] == [(r.shape, r.dtype) for r in on_meta]
    assert all(r.device.type == "cpu" for r in fake)


def test_the_dispatcher_checks_call_sites() -> None:
    with pytest.raises(RuntimeError, match="npu_clipped_swiglu"):
        call("npu_clipped_swiglu")(torch.ones(2, 2), clamp=1.0)


def test_arguments_without_a_cpu_meaning_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"npu_dynamic_quant\(smooth_scales"):
        call("npu_dynamic_quant")(torch.ones(2, 2), smooth_scales=torch.ones(2))
    with pytest.raises(UnsupportedFeatureError, match=r"npu_grouped_matmul\(split_item"):
        call("npu_grouped_matmul")([torch.ones(2, 2)], [torch.ones(1, 2, 2)], group_type=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
def test_dtype_codes_are_torchs_own(dtype: torch.dtype) -> None:
    assert torch_dtype_of(code_of(dtype)) == dtype
    # torch parses the integers of such arguments as ScalarType.
    assert torch.ops.aten.empty.memory_format([1], dtype=code_of(dtype)).dtype == dtype


def test_unknown_dtype_codes() -> None:
    with pytest.raises(UnsupportedFeatureError, match="complex64"):
        code_of(torch.complex64)
    with pytest.raises(UnsupportedFeatureError, match="type code 99"):
        torch_dtype_of(99)


def test_rotary_halves() -> None:
    x, one, zero = torch.tensor([[[[1.0, 2.0]]]]), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    assert call("npu_rotary_mul")(x, zero, one).flatten().tolist() == [-2.0, 1.0]
    assert call("npu_rotary_mul")(x, one, zero).flatten().tolist() == [1.0, 2.0]


def test_clipped_swiglu_interleaved_is_the_other_layout_shuffled() -> None:
    x = torch.randn(3, 8)
    apart = torch.cat([x[:, ::2], x[:, 1::2]], 1)
    torch.testing.assert_close(
        call("npu_clipped_swiglu")(x), call("npu_clipped_swiglu")(apart, interleaved=False)
    )


def test_dynamic_quant_of_a_zero_row() -> None:
    quantised, scales = call("npu_dynamic_quant")(torch.tensor([[0.0, 0.0], [1.0, -0.5]]))
    assert quantised.tolist() == [[0, 0], [127, -64]]
    assert scales.tolist() == pytest.approx([0.0, 1 / 127])
