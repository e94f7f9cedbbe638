"""How users reach an engine: the command line, the HTTP server, the LLM class."""
