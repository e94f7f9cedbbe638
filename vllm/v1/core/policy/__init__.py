"""What the prefix cache keeps, and in which order it gives things up: rules without a pool."""
