"""Managers of single KV-cache groups with hits at whole blocks, and what they share."""
