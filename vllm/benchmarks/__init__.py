"""``vllm bench``: load for a server, offline speed, start-up, a cache under its own clock."""
