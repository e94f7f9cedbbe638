"""A record of what decided about the cache: enough to decide it again, and no text."""
