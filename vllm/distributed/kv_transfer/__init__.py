"""Moving KV blocks in and out of this engine."""
