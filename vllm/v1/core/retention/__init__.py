"""Which prefixes are worth keeping: pure functions and small state machines, without a pool."""
