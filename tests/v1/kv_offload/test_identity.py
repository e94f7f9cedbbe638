"""What a folder's rows depend on."""

import threading
from pathlib import Path

from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.kv_cache_setup import plan_kv_cache
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.identity import find_identity
from vllm.v1.kv_offload.layout import make_layout
from vllm.v1.kv_offload.store.folder import Identity


def identify(root: Path, cache_dtype: str) -> Identity:
    """Return that of the embedded model with random weights."""
    config = EngineArgs(
        load_format="dummy",
        dtype="float32",
        num_gpu_blocks_override=400,
        max_model_len=512,
        kv_cache_dtype=cache_dtype,
    ).create_vllm_config()
    plan = plan_kv_cache(config, UniProcExecutor(config).get_kv_cache_specs(), [1 << 30])
    kv_cache = plan.worker_configs[0]
    found = find_identity(
        config, kv_cache, make_layout(kv_cache, 32), root, lambda done, of: None, threading.Event()
    )
    assert found is not None
    return found


def test_rows_of_the_models_own_type_have_one_name(tmp_path: Path) -> None:
    by_default = identify(tmp_path, "auto")
    assert by_default.parts["cache dtype"] == "auto"
    assert identify(tmp_path, "float32").parts == by_default.parts
    halves = identify(tmp_path, "float16").parts
    assert {name for name in halves if halves[name] != by_default.parts[name]} >= {"cache dtype"}
