"""What the pool of blocks is made of: its index, the tiers of free blocks, claims, pins, events."""
