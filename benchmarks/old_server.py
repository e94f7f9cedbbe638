"""``vllm serve`` with the prefix cache as it was before hits at one unit, to compare with.

    python -m benchmarks.old_server [flags of vllm serve]

Hits are whole blocks of all groups (the least common multiple of the block sizes: 4,096 tokens of
DeepSeek-V4 at ``--block-size 32``), checkpoints stand at every such boundary and nowhere else
(interval ``none``), and a prefill step takes pool blocks for every window row that it writes,
those that die within the step included. The scheduler, the model and the kernels are ours.
"""
