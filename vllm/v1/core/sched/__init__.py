"""Which requests run in a step, and what became of them."""
