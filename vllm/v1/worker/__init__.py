"""One device's part of a step: KV tensors, block tables, batches, the model's run."""
