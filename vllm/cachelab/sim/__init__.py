"""The server's own scheduler and cache under a clock of its own."""
