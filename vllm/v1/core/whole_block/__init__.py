"""Hits at whole blocks, by vLLM 0.23's rules and under its names, for code written against them.

Nothing that is served comes through here: models hit at one unit
(``vllm.v1.core.kv_cache_coordinator``). ``get_kv_cache_coordinator`` builds these classes where
``KVCacheConfig.hit_unit`` is None.
"""
