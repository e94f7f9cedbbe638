"""The HTTP server: OpenAI's routes, streams and errors."""
