"""One decoder for families that differ in data only."""
