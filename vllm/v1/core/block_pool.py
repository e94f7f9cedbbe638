"""Names of vLLM 0.23 for the pool of hits at whole blocks; engines have a ``TieredPool``."""

from vllm.v1.core.whole_block.block_pool import BlockPool
from vllm.v1.core.whole_block.hash_index import BlockHashToBlockMap

__all__ = ["BlockHashToBlockMap", "BlockPool"]
