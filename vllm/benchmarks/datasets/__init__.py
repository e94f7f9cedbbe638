"""Prompts to send: made up from a seed, or read from files."""
