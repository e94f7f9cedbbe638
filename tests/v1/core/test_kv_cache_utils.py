import hashlib
import importlib
import random
from types import SimpleNamespace

import pytest

import vllm.v1.core.kv_cache_utils as utils
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    KVCacheBlock,
    event_extra_keys,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.utils import ConstantList


@pytest.fixture(autouse=True)
def none_hash(monkeypatch):
    """Tests set NONE_HASH in many ways: put it back."""
    monkeypatch.setattr(utils, "NONE_HASH", utils.NONE_HASH)


def make_request(tokens, mm=(), lora=None, salt=None, embeds=None):
    """A request as hashing sees it; ``mm`` holds (identifier, offset, length)."""
    return SimpleNamespace(
        all_token_ids=ConstantList(tokens),
        num_tokens=len(tokens),
        block_hashes=[],
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in mm
        ],
        lora_request=lora,
        cache_salt=salt,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={},
    )


def extend(request, tokens, hasher):
    """Let a request grow, and hash what is new."""
    all_tokens = list(request.all_token_ids) + tokens
    request.all_token_ids = ConstantList(all_tokens)
    request.num_tokens = len(all_tokens)
    request.block_hashes.extend(hasher(request))


class TestNoneHash:
    @pytest.mark.parametrize("hash_fn", [sha256, sha256_cbor, hash])
    def test_from_the_seed(self, monkeypatch, hash_fn):
        monkeypatch.setenv("PYTHONHASHSEED", "python hash seed")
        init_none_hash(hash_fn)
        assert hash_fn("python hash seed") == utils.NONE_HASH

    def test_random(self, monkeypatch):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        init_none_hash(sha256)
        first = utils.NONE_HASH
        init_none_hash(sha256)
        assert isinstance(first, bytes)
        assert len(first) == 32
        assert first != utils.NONE_HASH

    def test_reload(self, monkeypatch):
        """Functions and classes from before a reload go on working, with the new NONE_HASH."""
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        old_block, old_hash = KVCacheBlock, hash_block_tokens
        hasher = get_request_block_hasher(2, sha256)
        again = importlib.reload(utils)
        again.init_none_hash(sha256)
        assert sha256("7") == again.NONE_HASH
        assert again.KVCacheBlock is old_block
        assert old_hash(sha256, None, [1, 2]) == sha256((sha256("7"), (1, 2), None))
        assert hasher(make_request([1, 2])) == [sha256((sha256("7"), (1, 2), None))]

    def test_there_is_one_from_the_start(self):
        assert importlib.reload(utils).NONE_HASH


class TestKeys:
    @pytest.mark.parametrize("group_id", [0, 1, 255, 256, 2**32 - 1])
    def test_round_trip(self, group_id):
        block_hash = sha256("x")
        key = make_block_hash_with_group_id(block_hash, group_id)
        assert key == block_hash + group_id.to_bytes(4, "big")
        assert get_block_hash(key) == block_hash
        assert get_group_id(key) == group_id

    def test_event_form(self, monkeypatch):
        block_hash = bytes(range(32))
        monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
        assert maybe_convert_block_hash(block_hash) == int.from_bytes(bytes(range(24, 32)), "big")
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        assert maybe_convert_block_hash(block_hash) == block_hash


class TestHashBlockTokens:
    @pytest.mark.parametrize("hash_fn", [sha256, sha256_cbor, hash])
    def test_definition(self, hash_fn):
        init_none_hash(hash_fn)
        parent = hash_fn("parent")
        keys = ("key1", "key2")
        assert hash_block_tokens(hash_fn, parent, [1, 2, 3], keys) == hash_fn(
            (parent, (1, 2, 3), keys)
        )
        assert hash_block_tokens(hash_fn, None, ConstantList([1])) == hash_fn(
            (utils.NONE_HASH, (1,), None)
        )


class TestExtraKeys:
    """Items: a at 0..4, b at 10..14."""

    MM = (("a", 0, 5), ("b", 10, 5))

    @pytest.mark.parametrize(
        ("start", "end", "mm_idx", "keys", "next_idx"),
        [
            (0, 5, 0, (("a", 0),), 1),  # exactly the item
            (0, 4, 0, (("a", 0),), 0),  # the item goes on
            (3, 8, 0, (("a", -3),), 1),  # began before the block
            (6, 10, 0, None, 1),  # between the two
            (5, 11, 0, (("b", 5),), 1),
            (0, 15, 0, (("a", 0), ("b", 10)), 2),
            (12, 16, 0, (("b", -2),), 2),  # items before the block are passed
            (12, 16, -1, (("b", -2),), 2),  # from the end
            (6, 10, -1, None, 1),
            (2, 4, -5, (("a", -2),), 0),  # further from the end than there are items
            (15, 20, 1, None, 2),
            (15, 20, 2, None, 2),
        ],
    )
    def test_multimodal(self, start, end, mm_idx, keys, next_idx):
        request = make_request(list(range(20)), self.MM)
        assert generate_block_hash_extra_keys(request, start, end, mm_idx) == (keys, next_idx)

    @pytest.mark.parametrize("mm_idx", [0, 3, -1])
    def test_text_keeps_the_index(self, mm_idx):
        assert generate_block_hash_extra_keys(make_request([1, 2]), 0, 2, mm_idx) == (None, mm_idx)

    def test_salt_in_the_first_block_only(self):
        request = make_request(list(range(8)), salt="salt")
        assert generate_block_hash_extra_keys(request, 0, 4, 0) == (("salt",), 0)
        assert generate_block_hash_extra_keys(request, 4, 8, 0) == (None, 0)

    def test_events_name_the_salt_by_its_digest(self):
        lora = LoRARequest("lora", 1, "/x")
        request = make_request(list(range(8)), self.MM, lora, salt="salt")
        (name, *items, salt), mm_idx = generate_block_hash_extra_keys(request, 0, 4, 0)
        assert salt == "salt"
        digest = "salt-sha256:63479ad69a090b258277ec8fba6f9941"
        second, _ = generate_block_hash_extra_keys(request, 4, 8, mm_idx)
        assert event_extra_keys(request, [0, 4], 4) == [(name, *items, digest), second]
        assert event_extra_keys(request, [4], 4) == [second]

    def test_order(self, monkeypatch):
        monkeypatch.setattr(utils, "tensor_data", lambda part: bytes(part))
        request = make_request(
            list(range(8)), self.MM, LoRARequest("lora", 1, "/x"), "salt", list(range(8))
        )
        digest = hashlib.sha256(bytes([0, 1, 2, 3])).digest()
        keys, next_idx = generate_block_hash_extra_keys(request, 0, 4, 0)
        assert keys == ("lora", ("a", 0), "salt", digest)
        assert next_idx == 0

    def test_embeddings_are_digested_once(self, monkeypatch):
        calls = []

        def tensor_data(part):
            calls.append(part)
            return bytes(part)

        monkeypatch.setattr(utils, "tensor_data", tensor_data)
        request = make_request(list(range(8)), embeds=list(range(8)))
        first = generate_block_hash_extra_keys(request, 0, 4, 0)
        assert generate_block_hash_extra_keys(request, 0, 4, 0) == first
        assert calls == [[0, 1, 2, 3]]
        other, _ = generate_block_hash_extra_keys(request, 4, 8, 0)
        assert other == (hashlib.sha256(bytes([4, 5, 6, 7])).digest(),)
        assert set(request._prompt_embeds_per_block_hashes) == {(0, 4), (4, 8)}


def brute_force_hashes(request, block_size, hash_fn):
    """Every full block from the start, each with its items looked up anew."""
    hashes, parent = [], utils.NONE_HASH
    for i in range(request.num_tokens // block_size):
        start, end = i * block_size, (i + 1) * block_size
        keys = [request.lora_request.lora_name] if request.lora_request else []
        for item in request.mm_features:
            position = item.mm_position
            if position.offset < end and position.offset + position.length > start:
                keys.append((item.identifier, position.offset - start))
        if i == 0 and request.cache_salt:
            keys.append(request.cache_salt)
        tokens = tuple(request.all_token_ids[start:end])
        parent = hash_fn((parent, tokens, tuple(keys) or None))
        hashes.append(parent)
    return hashes


class TestRequestBlockHasher:
    @pytest.mark.parametrize("hash_fn", [sha256, sha256_cbor, hash])
    def test_full_blocks_only(self, hash_fn):
        init_none_hash(hash_fn)
        request = make_request(list(range(10)))
        hasher = get_request_block_hasher(3, hash_fn)
        hashes = hasher(request)
        assert hashes == brute_force_hashes(request, 3, hash_fn)
        assert len(hashes) == 3
        assert get_request_block_hasher(11, hash_fn)(request) == []
        assert get_request_block_hasher(3, hash_fn)(make_request([])) == []

    def test_goes_on_from_the_last(self):
        hasher = get_request_block_hasher(4, sha256)
        request = make_request([])
        for n in [3, 1, 4, 9, 0, 2]:
            extend(request, list(range(n)), hasher)
            assert request.block_hashes == brute_force_hashes(request, 4, sha256)
        assert len(request.block_hashes) == 4

    @pytest.mark.parametrize("seed", range(40))
    def test_with_everything(self, seed):
        """Prompt in one go (items may lie anywhere in it), then decode in small steps."""
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8])
        mm, offset = [], 0
        while (offset := offset + rng.randint(0, 9)) < 40:
            length = rng.randint(1, 12)
            mm.append((f"item{len(mm)}", offset, length))
            offset += length
        request = make_request(
            [rng.randrange(100) for _ in range(offset + rng.randint(0, 5))],
            mm if rng.random() < 0.7 else [],
            LoRARequest("lora", 1, "/x") if rng.random() < 0.5 else None,
            "salt" if rng.random() < 0.5 else None,
        )
        hasher = get_request_block_hasher(block_size, sha256)
        request.block_hashes.extend(hasher(request))
        for _ in range(5):
            extend(request, [rng.randrange(100) for _ in range(rng.randint(0, 5))], hasher)
        assert request.block_hashes == brute_force_hashes(request, block_size, sha256)

    @pytest.mark.parametrize("num_known", range(1, 6))
    def test_items_ahead_of_known_hashes_are_in_those_to_come(self, num_known):
        request = make_request(list(range(24)), [("a", 2, 3), ("b", 9, 5), ("c", 19, 4)])
        expected = brute_force_hashes(request, 4, sha256)
        request.block_hashes = expected[:num_known]
        assert expected[num_known:] == get_request_block_hasher(4, sha256)(request)

    def test_salt_changes_every_hash(self):
        hasher = get_request_block_hasher(2, sha256)
        plain = hasher(make_request([1] * 8))
        salted = hasher(make_request([1] * 8, salt="a"))
        assert not set(plain) & set(salted)


class TestCoarserView:
    def test_concatenates(self):
        hashes = [b"a", b"b", b"c", b"d", b"e"]
        view = BlockHashListWithBlockSize(hashes, 2, 4)
        assert len(view) == 2
        assert list(view) == [b"ab", b"cd"]
        assert view[0] == b"ab"
        assert view[-1] == b"cd"
        assert view[0:1] == [b"ab"]
        assert view[:] == [b"ab", b"cd"]
        assert view[::-1] == [b"cd", b"ab"]
        assert view[1:9] == [b"cd"]
        for index in (2, -3):
            with pytest.raises(IndexError):
                view[index]

    def test_follows_its_list(self):
        hashes = [b"a"]
        view = BlockHashListWithBlockSize(hashes, 16, 32)
        assert list(view) == []
        hashes.append(b"b")
        assert list(view) == [b"ab"]

    def test_same_size(self):
        assert list(BlockHashListWithBlockSize([b"a", b"b"], 16, 16)) == [b"a", b"b"]

    def test_must_be_a_multiple(self):
        with pytest.raises(AssertionError, match="no multiple"):
            BlockHashListWithBlockSize([], 32, 48)


def test_every_exported_name_is_here():
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []
