"""What a run came to: numbers, table, JSON, plots."""
