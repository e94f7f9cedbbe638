"""What a layer keeps in the KV cache, by kind of attention; all names in ``kv_cache_interface``."""
