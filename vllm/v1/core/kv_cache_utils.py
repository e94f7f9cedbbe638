"""Hashes of prompt blocks; and the one import for blocks, the free queue and the config builder.

A block's hash is chained: hash((parent's hash, tokens, extra keys)), so that equal hashes mean
equal prefixes. Extra keys are what makes the same tokens mean different values: the LoRA adapter,
multimodal items, the tenant's salt, prompt embeddings.

``NONE_HASH`` and ``tensor_data`` are looked up in this module on every call: outsiders replace
them, and reload the module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

from vllm import envs
from vllm.multimodal.identity import is_identity
from vllm.native.prefix_hash import find_hash_chain
from vllm.utils.hashing import BlockHash
from vllm.v1.core.layout.config_builder import (
    _project_kv_cache_groups_to_worker,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.layout.grouping import (
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
)
from vllm.v1.core.layout.sizing import (
    estimate_max_model_len,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.core.values.free_block_queue import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from vllm.v1.utils import tensor_data

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = [
    "NONE_HASH",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashWithGroupId",
    "ExternalBlockHash",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "_project_kv_cache_groups_to_worker",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "generate_scheduler_kv_cache_config",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_spec_uniform",
    "make_block_hash_with_group_id",
    "maybe_convert_block_hash",
    "resolve_kv_cache_block_sizes",
    "tensor_data",
    "unify_hybrid_kv_cache_specs",
]

# A block hash as it leaves the process in KV events.
ExternalBlockHash = bytes | int

_GROUP_ID_BYTES = 4

# Blocks from which on a native call is quicker than Python's own hash functions.
_LONG_CHAIN = 3

# Hashes in a row are a hash, without a call of the NewType.
_join: Callable[[Iterable[bytes]], Any] = b"".join

# Parent of a first block. Random until init_none_hash so that nobody can predict a hash.
NONE_HASH: BlockHash = BlockHash(os.urandom(32))


def init_none_hash(hash_fn: Callable[[Any], Any], known: bytes | None = None) -> None:
    """Set ``NONE_HASH``: from ``PYTHONHASHSEED`` if it is set, so that processes agree.

    Args:
        hash_fn: The prefix cache's hash function.
        known: What other processes have agreed on; None: nothing.
    """
    global NONE_HASH
    if known is not None:
        NONE_HASH = BlockHash(known)
        return
    seed = os.environ.get("PYTHONHASHSEED")
    NONE_HASH = BlockHash(os.urandom(32) if seed is None else hash_fn(seed))


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """Return the cache key of a block: its hash and, in 4 big-endian bytes, its group."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(_GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """Return the hash in a cache key."""
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """Return the group in a cache key."""
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


def maybe_convert_block_hash(block_hash: BlockHash) -> ExternalBlockHash:
    """Return a hash as KV events carry it: 64-bit ints by default, else the bytes."""
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return block_hash
    return int.from_bytes(block_hash, "big") & 0xFFFF_FFFF_FFFF_FFFF


def hash_block_tokens(
    hash_function: Callable[[Any], Any],
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """Return the hash of one block of tokens behind its parent.

    Args:
        hash_function: Hash of any Python value.
        parent_block_hash: The block before, None for a first block.
        curr_block_token_ids: The block's tokens.
        extra_keys: See ``generate_block_hash_extra_keys``.
    """
    return BlockHash(
        hash_function((parent_block_hash or NONE_HASH, tuple(curr_block_token_ids), extra_keys))
    )


def _mm_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[Any], int]:
    """Return (identifier, offset in the block) of overlapping items, and the next item's index."""
    mm_features = request.mm_features
    keys: list[Any] = []
    if not mm_features:
        return keys, start_mm_idx
    mm_idx = start_mm_idx if start_mm_idx >= 0 else max(len(mm_features) + start_mm_idx, 0)
    while mm_idx < len(mm_features):
        position = mm_features[mm_idx].mm_position
        item_end = position.offset + position.length
        if position.offset >= end_token_idx:
            break
        if item_end > start_token_idx:
            keys.append((mm_features[mm_idx].identifier, position.offset - start_token_idx))
            if item_end > end_token_idx:
                break
        mm_idx += 1
    return keys, mm_idx


def _prompt_embeds_digest(request: Request, start_token_idx: int, end_token_idx: int) -> bytes:
    """Return the digest of a slice of prompt embeddings, computed once per request."""
    digests = request._prompt_embeds_per_block_hashes
    key = (start_token_idx, end_token_idx)
    digest = digests.get(key)
    if digest is None:
        assert request.prompt_embeds is not None
        embeds = request.prompt_embeds[start_token_idx:end_token_idx]
        digest = digests[key] = hashlib.sha256(tensor_data(embeds)).digest()
    return digest


def generate_block_hash_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return what besides tokens decides a block's values.

    Args:
        request: The request.
        start_token_idx: First token of the block.
        end_token_idx: One past its last token.
        start_mm_idx: Multimodal item to start at (items are ordered by offset); negative counts
            from the end.

    Returns:
        The keys in fixed order (LoRA name, multimodal items, salt, embeddings), None if there are
        none; and the item to start at for the next block.
    """
    return _extra_keys(request, start_token_idx, end_token_idx, start_mm_idx, request.cache_salt)


def event_extra_keys(
    request: Request, starts: Sequence[int], num_tokens: int
) -> list[tuple[Any, ...] | None]:
    """Return ``generate_block_hash_extra_keys`` of blocks, the salt replaced by its digest.

    Whoever knows a salt can share its owner's prefixes: it must not leave the process. An item's
    identity confirms a guess of what it is: under a salt, its name depends on the salt too.

    Args:
        request: The request.
        starts: First tokens of the blocks, ascending.
        num_tokens: Tokens of each.
    """
    salt = request.cache_salt
    public_salt = salt_digest(salt) if salt and starts and starts[0] == 0 else None
    extra_keys = []
    mm_idx = 0
    for start in starts:
        keys, mm_idx = _extra_keys(request, start, start + num_tokens, mm_idx, public_salt)
        if salt and keys is not None and request.mm_features:
            keys = tuple(
                (_salted_name(key[0], salt), key[1]) if isinstance(key, tuple) else key
                for key in keys
            )
        extra_keys.append(keys)
    return extra_keys


def salt_digest(salt: str) -> str:
    """Return how a cache salt is named in KV events: ``salt-sha256:`` and 32 hex digits."""
    return f"salt-sha256:{hashlib.sha256(salt.encode()).hexdigest()[:32]}"


def _salted_name(identifier: str, salt: str) -> str:
    """How an item of a salted request is named in KV events; a name that is no digest stays."""
    if not is_identity(identifier):
        return identifier
    digest = hashlib.blake2b(identifier.encode(), digest_size=16, key=salt.encode()[:64])
    return f"mm-sha256:{digest.hexdigest()}"


def _extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int, salt: str | None
) -> tuple[tuple[Any, ...] | None, int]:
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.lora_name)
    mm_keys, next_mm_idx = _mm_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    keys += mm_keys
    # The chain carries the salt on: the first block is enough.
    if start_token_idx == 0 and salt:
        keys.append(salt)
    if request.prompt_embeds is not None:
        keys.append(_prompt_embeds_digest(request, start_token_idx, end_token_idx))
    return (tuple(keys) if keys else None), next_mm_idx


def get_request_block_hasher(
    block_size: int, caching_hash_fn: Callable[[Any], Any]
) -> Callable[[Request], list[BlockHash]]:
    """Return the function that hashes a request's new full blocks.

    Args:
        block_size: Tokens under one hash.
        caching_hash_fn: Hash of any Python value.

    Returns:
        A function that returns the hashes of the full blocks behind ``request.block_hashes``,
        chained to its last.
    """
    chain = find_hash_chain(caching_hash_fn, block_size)

    def hash_one(request: Request, parent: BlockHash, begin: int, mm_idx: int) -> tuple[Any, int]:
        extra_keys, mm_idx = generate_block_hash_extra_keys(
            request, begin, begin + block_size, mm_idx
        )
        tokens = tuple(request.all_token_ids[begin : begin + block_size])
        return caching_hash_fn((parent, tokens, extra_keys)), mm_idx

    def hash_plain(parent: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """Hash blocks that have no extra keys."""
        if chain is not None and len(token_ids) >= _LONG_CHAIN * block_size:
            chained = chain(parent, token_ids)
            if chained is not None:
                return cast("list[BlockHash]", chained)
        tokens = tuple(token_ids)
        hashes: list[BlockHash] = []
        for begin in range(0, len(tokens), block_size):
            parent = caching_hash_fn((parent, tokens[begin : begin + block_size], None))
            hashes.append(parent)
        return hashes

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        start = len(known) * block_size
        num_tokens = request.num_tokens
        if start + block_size > num_tokens:
            return []  # most decode steps end here
        parent = known[-1] if known else NONE_HASH
        # Items that lie before the first new block are passed over by the first look.
        mm_idx = 0
        every_block_has_keys = request.lora_request is not None or request.prompt_embeds is not None
        hashes: list[BlockHash] = []
        end = num_tokens // block_size * block_size
        # A salt is a key of the first block alone, an item of the blocks that it lies in.
        last_item = request.mm_features[-1].mm_position if request.mm_features else None
        keys_end = 1 if last_item is None else last_item.offset + last_item.length
        while start < end and (every_block_has_keys or start < keys_end):
            parent, mm_idx = hash_one(request, parent, start, mm_idx)
            hashes.append(parent)
            start += block_size
        # One slice of the read-only view.
        return hashes + hash_plain(parent, request.all_token_ids[start:end])

    return hash_new_blocks


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """A lazy view of block hashes at a coarser block size.

    Item i is the concatenation of the finer hashes under coarse block i; a last, partly covered
    block is not in the view. Items are remembered: groups of one block size share a view.

    Args:
        block_hashes: Hashes of ``hash_block_size`` tokens each; may grow behind the view.
        hash_block_size: Tokens under one of them.
        target_block_size: Tokens of one item, a multiple of that.
    """

    __slots__ = ("_known", "block_hashes", "scale_factor")

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        assert target_block_size % hash_block_size == 0, (
            f"Block size {target_block_size} is no multiple of the hash block {hash_block_size}."
        )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size
        self._known: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self.merged(i) for i in range(*index.indices(len(self)))]
        length = len(self)
        position = index + length if index < 0 else index
        if not 0 <= position < length:
            raise IndexError(f"Block hash {index} is outside a list of {length}.")
        return self.merged(position)

    def __iter__(self) -> Iterator[BlockHash]:
        for i in range(len(self)):
            yield self.merged(i)

    def merged(self, index: int) -> BlockHash:
        """Return an item without checking that it is in the view."""
        merged = self._known.get(index)
        if merged is None:
            base = index * self.scale_factor
            merged = _join(self.block_hashes[base : base + self.scale_factor])
            self._known[index] = merged
        return merged


BlockHashList = list[BlockHash] | BlockHashListWithBlockSize
