"""What chat, responses and messages share: from a chat to the engine, from its tokens to pieces."""
