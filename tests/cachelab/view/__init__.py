"""Views of the cache."""
