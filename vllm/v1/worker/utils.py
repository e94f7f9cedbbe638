"""KV cache groups, as a worker completes them."""

from collections.abc import Mapping, Sequence

from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Put each layer that reads another's KV cache into that layer's group.

    Such layers have no spec of their own, so grouping did not see them; they need the group's
    block table and metadata all the same.

    Args:
        shared_kv_cache_layers: Sharing layer to the layer whose cache it uses.
        kv_cache_groups: The groups.
        runner_only_attn_layers: Layers that only the model runner knows, not the KV manager.

    Mutates:
        The groups' layer names, and ``runner_only_attn_layers`` if given.
    """
    group_of = {name: group for group in kv_cache_groups for name in group.layer_names}
    for layer_name, target in shared_kv_cache_layers.items():
        group_of[target].layer_names.append(layer_name)
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(layer_name)
