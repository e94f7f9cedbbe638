"""``--additional-config``: the keys that Ascend's users type, and why none matters here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm.exceptions import ConfigError

_GRAPHS = "graphs are chosen by --enforce-eager and the platform's variable"
_EXPERTS = "experts are shared out evenly, and answers do not depend on it"
_OVERLAP = "work of a step runs in one order, and answers do not depend on it"
_SHARES = "--tensor-parallel-size shares all matrices out alike"
_WEIGHTS = "weights are laid out by the platform's variable"
_SCHEDULER = "there is one scheduler, set by its own flags"
_CACHE = "the cache's layout follows from --block-size and --kv-cache-dtype"

# Key -> why it may be left out.
KNOWN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "ascend_compilation_config": _GRAPHS,
        "ascend_fusion_config": _OVERLAP,
        "ascend_scheduler_config": _SCHEDULER,
        "chunked_prefill_for_mla": _SCHEDULER,
        "dump_config_path": "nothing is dumped",
        "dynamic_eplb": _EXPERTS,
        "enable_async_exponential": _OVERLAP,
        "enable_cpu_binding": "VLLM_CPU_OMP_THREADS_BIND binds threads",
        "enable_kv_nz": _CACHE,
        "enable_npugraph_ex": _GRAPHS,
        "enable_shared_expert_dp": _EXPERTS,
        "enable_weight_nz_layout": _WEIGHTS,
        "eplb_config": _EXPERTS,
        "expert_map_path": _EXPERTS,
        "expert_map_record_path": _EXPERTS,
        "finegrained_tp_config": _SHARES,
        "gate_eplb": _EXPERTS,
        "init_redundancy_expert": _EXPERTS,
        "kv_cache_dtype": _CACHE,
        "layer_sharding": _SHARES,
        "lmhead_tensor_parallel_size": _SHARES,
        "mix_placement": _EXPERTS,
        "multistream_overlap_gate": _OVERLAP,
        "multistream_overlap_shared_expert": _OVERLAP,
        "num_iterations_eplb_update": _EXPERTS,
        "num_wait_worker_iterations": _EXPERTS,
        "oproj_tensor_parallel_size": _SHARES,
        "pa_shape_list": _GRAPHS,
        "recompute_scheduler_enable": _SCHEDULER,
        "refresh": "nothing of a platform's configuration is kept between engines",
        "torchair_graph_config": _GRAPHS,
        "weight_nz_mode": _WEIGHTS,
        "weight_prefetch_config": _OVERLAP,
        "xlite_graph_config": _GRAPHS,
    }
)


def explain_additional_config(given: Mapping[str, Any]) -> list[str]:
    """Return a line for each key given: that it has no effect, and why.

    Raises:
        ConfigError: A key is none that a platform reads.
    """
    unknown = sorted(set(given) - KNOWN_KEYS.keys())
    if unknown:
        raise ConfigError(
            f"additional-config has unknown keys {', '.join(map(repr, unknown))}: use "
            f"{', '.join(KNOWN_KEYS)}; none of them has an effect."
        )
    return [
        f"additional-config: {key} is accepted and has no effect: {KNOWN_KEYS[key]}."
        for key in given
    ]
