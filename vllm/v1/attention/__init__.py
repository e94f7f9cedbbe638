"""Attention over paged caches: per-step index tables and the ops that use them."""
