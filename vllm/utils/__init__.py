"""Leaves that know nothing of serving: numbers, hashes, command lines."""
