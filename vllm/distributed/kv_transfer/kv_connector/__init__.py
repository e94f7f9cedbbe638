"""KV connectors: their interface, their registry, an example."""
