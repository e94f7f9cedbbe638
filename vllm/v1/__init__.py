"""The engine, from a tokenized request to sampled tokens."""
