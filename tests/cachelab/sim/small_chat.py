"""A chat of few conversations and the servers that it goes through, for tests of several."""

from benchmarks.chat_trace import ChatShape, make_chat_trace
from vllm.cachelab.sim.settings import SimSettings, find_hf_config

SHAPE = ChatShape(num_conversations=12, mean_turns=4.0, rate=0.5, answer_blocks=1)
SETTINGS = SimSettings(
    find_hf_config("v4-flash"),
    block_size=32,
    pool_bytes=1 << 30,
    max_model_len=16_384,
    scheduler={"max_num_batched_tokens": 2048, "max_num_seqs": 16},
)
LINES = make_chat_trace(SHAPE, seed=4)
