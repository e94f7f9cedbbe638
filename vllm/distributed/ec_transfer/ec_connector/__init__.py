"""Encoder-cache connectors: their interface, their registry, an example."""
