"""``/v1/responses``: OpenAI's API of items, events and stored conversations."""
