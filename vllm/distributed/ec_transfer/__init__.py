"""Moving encoder outputs in and out of this engine."""
