"""Whoever compares prompts compares their pictures: ids alone are equal for two of one size."""

from base64 import b64decode
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm.cachelab.trace.events import Added, Units
from vllm.cachelab.trace.hash_chain import HashChains
from vllm.cachelab.twin.pairs import compare_recorded, format_pair
from vllm.cachelab.twin.trace_file import RecordedRequest
from vllm.distributed.kv_transfer.handover.params import digest_prompt
from vllm.entrypoints.openai.diagnosis.fingerprint import prefix_digests
from vllm.multimodal.comparison import comparable_ids
from vllm.multimodal.families import gemma4_images, qwen35_images
from vllm.multimodal.identity import image_identity, is_identity
from vllm.multimodal.inputs import ImageFeature
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import BlockHash, get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    event_extra_keys,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.engine.data_parallel.router import with_hashes
from vllm.v1.engine.wire import AddRequests, Codec
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.request_options import RequestOptions

SHA = get_hash_fn_by_name("sha256")
_UNIT, _SOFT = 4, 7
# The picture's soft tokens are 5 .. 16, from inside unit 1 to inside unit 4.
_IDS = [1, 2, 3, 4, 5, *[_SOFT] * 12, 6, 8, 9, 10, 11, 12, 13]
_FIRST_UNIT_OF_IT = 5 // _UNIT


def feature(name: str = "a", offset: int = 5, rows: int = 3, columns: int = 4) -> ImageFeature:
    identity = (name * 64)[:64]
    return ImageFeature(identity, offset, rows, columns, 2, 2, bytes(12))


def request_of(*images: ImageFeature, salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=_IDS,
        sampling_params=SamplingParams(max_tokens=4),
        arrival_time=0.0,
        options=RequestOptions(cache_salt=salt),
        images=list(images),
    )


def hashes_of(*images: ImageFeature, salt: str | None = None) -> list[bytes]:
    init_none_hash(SHA, "0")
    hasher = get_request_block_hasher(_UNIT, SHA)
    request = Request.from_engine_core_request(request_of(*images, salt=salt), hasher)
    return [bytes(block) for block in request.block_hashes]


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_two_pictures_of_one_size_part_at_their_beginning() -> None:
    plain, one, other = hashes_of(), hashes_of(feature("a")), hashes_of(feature("b"))

    assert num_shared(one, other) == _FIRST_UNIT_OF_IT
    assert num_shared(one, plain) == _FIRST_UNIT_OF_IT
    assert one == hashes_of(feature("a"))
    assert num_shared(one, hashes_of(feature("a"), salt="s")) == 0


def test_tokens_behind_the_last_picture_have_no_keys_of_their_own() -> None:
    """They are hashed in one go, as texts are; the chain carries the picture on."""
    init_none_hash(SHA, "0")
    one = hashes_of(feature("a"))
    last = SHA((one[4], tuple(_IDS[20:24]), None))

    assert one[5] == last


def test_a_request_crosses_processes_with_its_pictures_and_is_hashed_before_routing() -> None:
    codec = Codec()
    given = request_of(feature("a"), feature("b", 20, 1, 2))
    message = codec.decode_to_core(codec.encode(AddRequests([given])))
    assert isinstance(message, AddRequests)
    (received,) = message.requests

    spec, second = Request.from_engine_core_request(received, None).mm_features

    assert received == given
    assert (spec.identifier, spec.modality, spec.mm_position.length) == ("a" * 64, "image", 12)
    assert spec.data is not None
    assert (spec.data["grid"], spec.data["pixels"].shape) == ((3, 4), (2, 2, 3))
    assert second.mm_position.offset == 20
    hasher = get_request_block_hasher(_UNIT, SHA)
    init_none_hash(SHA, "0")

    def hash_prompt(request: EngineCoreRequest) -> Any:
        return Request.from_engine_core_request(request, hasher).block_hashes

    routed = with_hashes(request_of(feature("a")), hash_prompt)
    assert [bytes(block) for block in routed.block_hashes] == hashes_of(feature("a"))


def test_events_name_pictures_of_salted_requests_by_what_others_cannot_guess() -> None:
    starts = [0, 4, 8]
    plain = Request.from_engine_core_request(request_of(feature("a")), None)
    salted = Request.from_engine_core_request(request_of(feature("a"), salt="s"), None)
    other = Request.from_engine_core_request(request_of(feature("a"), salt="t"), None)

    told = event_extra_keys(plain, starts, 4)
    of_salt, of_other = event_extra_keys(salted, starts, 4), event_extra_keys(other, starts, 4)

    assert told == [None, (("a" * 64, 1),), (("a" * 64, -3),)]
    assert of_salt[1] is not None
    assert of_other[1] is not None
    ((name, place),) = of_salt[1]
    assert name.startswith("mm-sha256:")
    assert place == 1
    assert name != of_other[1][0][0]
    assert "a" * 64 not in str(of_salt)


def test_the_digest_of_a_handed_over_prefix_holds_its_pictures() -> None:
    def digest(num_tokens: int, *images: ImageFeature) -> str:
        return digest_prompt(_IDS[:num_tokens], None, [image.to_spec() for image in images])

    assert digest(24, feature("a")) != digest(24, feature("b"))
    assert digest(24, feature("a")) != digest(24)
    # A prefix that ends inside the picture depends on it; one that ends before it does not.
    assert digest(8, feature("a")) != digest(8, feature("b"))
    assert digest(5, feature("a")) == digest(5, feature("b")) == digest(5)
    # A prefix without pictures has the digest that it always had.
    assert digest(24) == digest_prompt(_IDS, None)


@pytest.mark.parametrize("num_tokens", [5, 6, 17, 24])
def test_fingerprints_part_where_the_pictures_begin(num_tokens: int) -> None:
    owner = bytes(16)
    one = prefix_digests(comparable_ids(_IDS[:num_tokens], [feature("a")]), owner)
    other = prefix_digests(comparable_ids(_IDS[:num_tokens], [feature("b")]), owner)

    assert (one == other).tolist() == [i < 5 for i in range(num_tokens)]
    assert comparable_ids(_IDS, []) is _IDS


def test_identity_is_of_all_that_the_tower_reads() -> None:
    qwen, gemma = qwen35_images(), gemma4_images()
    pixels = np.arange(96 * 96 * 3, dtype=np.uint8).reshape(96, 96, 3)
    size = qwen.sizes.fit(96, 96)
    changed = pixels.copy()
    changed[5, 5, 1] ^= 1
    identity = image_identity(pixels, size, qwen, "tower")
    others = [
        image_identity(changed, size, qwen, "tower"),
        image_identity(pixels.reshape(48, 192, 3), size, qwen, "tower"),
        image_identity(pixels.transpose(1, 0, 2).copy(), size, qwen, "tower"),
        image_identity(pixels, size, gemma, "tower"),
        image_identity(pixels, size, qwen, "another"),
        image_identity(pixels, qwen.sizes.fit(500, 500), qwen, "tower"),
    ]

    assert is_identity(identity)
    assert identity == image_identity(pixels.copy(), size, qwen, "tower")
    assert len({identity, *others}) == 7


def test_a_drafters_row_before_another_picture_is_stale() -> None:
    """Its checkpoint lies where the picture begins, so that the hash says nothing of it."""
    one = Request.from_engine_core_request(request_of(feature("a")), None).following_tokens
    other = Request.from_engine_core_request(request_of(feature("b")), None).following_tokens
    plain = Request.from_engine_core_request(request_of(), None)

    assert [a == b for a, b in zip(one, other, strict=True)] == [i != _SOFT for i in _IDS]
    assert one[5] == one[16] > 2**29
    assert one[5] < 2**31
    assert [one[i] for i in (0, 17)] == [_IDS[0], _IDS[17]]
    assert one[3:6] == [4, 5, one[5]]
    assert plain.following_tokens is plain.all_token_ids


def test_records_of_a_run_tell_pictures_apart() -> None:
    """Hashes do by themselves; the tokens behind units are told by the same words."""
    init_none_hash(SHA, "0")
    hasher = get_request_block_hasher(_UNIT, SHA)
    # The picture begins where unit 0 ends.
    moved = [feature(name, 4, 3, 4) for name in ("a", "b")]
    ids = [*_IDS[:4], *[_SOFT] * 12, *_IDS[16:]]
    requests = [
        Request.from_engine_core_request(
            msgspec.structs.replace(request_of(image), prompt_token_ids=ids), hasher
        )
        for image in moved
    ]
    chains = HashChains(_UNIT, keeps_tokens=True)

    first, second = (chains.prompt(request) for request in requests)

    assert (first.num_known, second.num_known) == (0, 1)
    tokens = [b64decode(units.next_tokens) for units in (first, second)]
    assert tokens[0][:4] != tokens[1][:4]


@pytest.mark.parametrize(
    ("other", "at"), [(("b", 5), 1), (("a", 5), None), (("b", 9), None), (None, None)]
)
def test_an_explanation_says_at_which_picture_two_prompts_part(other: Any, at: Any) -> None:
    def record(*images: ImageFeature, hashes: str) -> RecordedRequest:
        spec = [(image.offset, image.num_tokens, image.identifier[:16]) for image in images]
        added = Added(0, hashes, 0, 24, 4, Units("", 0, ""), images=spec)
        return RecordedRequest(added, [BlockHash(char.encode()) for char in hashes], {})

    old = record(feature("a"), hashes="abcdef")
    new = record(*([] if other is None else [feature(*other)]), hashes="avwxyz")

    pair = compare_recorded(old, new, _UNIT)

    assert (pair.shared_tokens, pair.parts_before, pair.parts_at_image) == (4, 8, at)
    assert ("picture 1" in "".join(format_pair(pair))) == (at == 1)
