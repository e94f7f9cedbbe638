"""From the specs of layers to a KVCacheConfig: groups, sizes, the packing of a block."""
