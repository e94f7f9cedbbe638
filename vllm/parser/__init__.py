"""From a model's text to its reasoning, its answer and its tool calls; one machine per family."""
