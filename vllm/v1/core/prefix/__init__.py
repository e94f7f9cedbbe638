"""What is cached, and finding it: the indexes of the block pool, checkpoints, lookups, events."""
