"""A recorded cache, replayed: the same decisions, or those of other settings."""
