"""Output constrained by a grammar."""
