"""``/v1/messages``: Anthropic's API, on the engine and chat formats of the others."""
