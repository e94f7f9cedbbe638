"""Statistics of the engine."""
