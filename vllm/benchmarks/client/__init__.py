"""The client of an OpenAI-compatible server: bodies, streams, observations."""
