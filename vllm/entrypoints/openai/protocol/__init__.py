"""The JSON of the HTTP edge: requests (pydantic, lenient) and responses (msgspec, exact)."""
