"""What engines compare, and their weights' fingerprint."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.distributed.kv_transfer.handover.fingerprint import fingerprint_weights
from vllm.distributed.kv_transfer.handover.manifest import (
    _digest,
    _key_sizes,
    _pages,
    find_mismatch,
    make_manifest,
)
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files
from vllm.model_executor.model_loader.safetensors_header import read_header
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.kv_cache_setup import plan_kv_cache
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVQuantMode

pytestmark = pytest.mark.slow


def manifest(rank: int = 0, **args: object) -> dict[str, str]:
    """What a server of the embedded model with these flags says."""
    settings = {"load_format": "dummy", "num_gpu_blocks_override": 400, "max_model_len": 512}
    vllm_config = EngineArgs(**(settings | args)).create_vllm_config()  # type: ignore[arg-type]
    executor = UniProcExecutor(vllm_config)
    plan = plan_kv_cache(vllm_config, executor.get_kv_cache_specs(), [1 << 30])
    return make_manifest(vllm_config, plan.worker_configs[0], rank=rank)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"block_size": 64}, "block_size"),
        ({"seed": 5}, "weights"),
        ({"kv_cache_dtype": "bfloat16"}, "KV pages"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"quantization": "int8"}, "quantization"),
        ({"rank": 1}, "rank"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "drafter"),
    ],
)
def test_what_changes_rows_is_named(args: dict[str, Any], named: str) -> None:
    ours = Hello(manifest(), "p", "1")
    theirs = Hello(manifest(**args), "d", "2")
    mismatch = find_mismatch(ours, theirs)
    assert mismatch is not None
    assert f"do not match: {named} is" in mismatch
    assert "at engine p" in mismatch
    assert "at engine d" in mismatch
    assert find_mismatch(ours, Hello(manifest(num_gpu_blocks_override=None), "d", "2")) is None


def test_the_order_in_which_a_file_names_its_values_is_no_difference() -> None:
    assert _digest({"a": 1, "b": {"c": 2, "d": 3}}) == _digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert _digest({"a": 1}) != _digest({"a": 2})


def test_what_keys_were_divided_by_is_compared() -> None:
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.int8,
        kv_quant_mode=KVQuantMode.of_dtype(torch.int8),
    )
    groups = [
        KVCacheGroupSpec(["a", "b"], spec.with_key_sizes(digest)) for digest in ("", "c", "d")
    ]
    plain, *others = ({"KV pages": _digest(_pages(g)), **_key_sizes([g])} for g in groups)
    mismatch = find_mismatch(*(Hello(each, "p", "1") for each in others))
    assert mismatch is not None
    assert "sizes of int8 keys is 'c' at engine p and 'd'" in mismatch
    # Engines that divide nothing say what those of before said.
    assert list(plain) == ["KV pages"]
    assert _pages(groups[0])[0] == ["a", 16, 16 * 2 * (8 + 4), "torch.int8"]


def test_they_are_in_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm.distributed.kv_transfer.handover.manifest._key_sizes"
    monkeypatch.setattr(module, lambda _groups: {"sizes of int8 keys": "c"})
    assert manifest()["sizes of int8 keys"] == "c"


def test_a_side_that_tells_less_does_not_match() -> None:
    both = Hello({"a": "1"}, "p", "1")
    assert find_mismatch(both, Hello({}, "d", "2")) is not None
    assert find_mismatch(Hello({}, "d", "2"), both) is not None


def test_the_fingerprint_sees_a_changed_tensor(tmp_path: Path) -> None:
    config = EngineArgs().create_vllm_config()
    folder = Path(config.model_config.path or "")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    moved = EngineArgs(model=str(copy)).create_vllm_config()
    assert fingerprint_weights(moved) == fingerprint_weights(config)
    file = find_weight_files(copy)[0]
    tensor = max(read_header(file), key=lambda item: item.num_bytes)
    with file.open("r+b") as opened:
        opened.seek(tensor.offset + tensor.num_bytes // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    assert fingerprint_weights(moved) != fingerprint_weights(config)
