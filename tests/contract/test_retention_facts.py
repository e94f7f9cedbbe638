"""What sparse prefix-cache retention keeps, case by case, through the real KVCacheManager."""

import pytest

from tests.v1.core.cache_helpers import (
    cached_indices,
    free_ids,
    ids,
    make_config,
    make_manager,
    make_request,
    run_prompt,
    start,
)
from tests.v1.core.specs import chunked, full, mla, swa, swa_mla
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager

ENV = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@pytest.fixture(autouse=True)
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)


def hybrid(num_blocks: int = 200, swa_eagle: bool = False, **window: int) -> KVCacheManager:
    """Full attention of block 32 and a window of block 8, by default of 8 tokens."""
    spec = swa(**{"block_size": 8, "sliding_window": 8, **window})
    config = make_config(num_blocks, [full(block_size=32), spec], [1] if swa_eagle else [])
    return make_manager(config, use_eagle=False)


@pytest.mark.parametrize(
    ("num_tokens", "interval", "expected"),
    [
        (64, None, {3, 7}),
        (128, "64", {7, 11, 15}),
        (128, "0", {11}),
    ],
)
def test_hybrid_cached_window_blocks(
    num_tokens: int, interval: str | None, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if interval is not None:
        monkeypatch.setenv(ENV, interval)
    manager = hybrid()
    request = make_request("0", range(num_tokens), 8)
    start(manager, request)
    assert cached_indices(manager, request, 1) == expected


def test_hybrid_caches_only_up_to_the_last_scheduler_block() -> None:
    manager = hybrid(block_size=16, sliding_window=32)
    request = make_request("0", range(112), 16)
    start(manager, request)
    assert cached_indices(manager, request, 1) == set(range(6))


def test_latest_only_replays_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "0")
    manager = hybrid()
    request = make_request("0", range(128), 8)
    start(manager, request)
    manager.free(request)
    kept = manager.block_pool.get_cached_block(request.block_hashes[11], [1])
    assert kept is not None
    assert kept[0].ref_cnt == 0

    again = make_request("1", range(128), 8)
    hit, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 96
    assert len(hit.blocks[1]) == 12
    shorter = make_request("2", [*range(96), 7, 7], 8)
    assert manager.get_computed_blocks(shorter)[1] == 96
    prefix = make_request("3", range(96), 8)
    assert manager.get_computed_blocks(prefix)[1] == 0


def test_latest_only_with_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "0")
    manager = hybrid(swa_eagle=True)
    request = make_request("0", range(127), 8)
    start(manager, request)
    assert cached_indices(manager, request, 1) == {11, 12}
    manager.free(request)
    hit, num_hit = manager.get_computed_blocks(make_request("1", range(127), 8))
    assert num_hit == 96
    assert [len(group) for group in hit.blocks] == [3, 12]


@pytest.mark.parametrize("interval", ["33", "-32"])
def test_bad_interval(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, interval)
    with pytest.raises(ValueError, match="non-negative") as error:
        hybrid()
    assert "multiple of scheduler_block_size" in str(error.value)


@pytest.mark.parametrize("interval", ["0", "32", "64", "-16"])
def test_interval_without_a_window_group(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, interval)
    for specs in ([full()], [full(block_size=32), chunked(block_size=32)]):
        with pytest.raises(ValueError, match=r"no sliding-window .*SlidingWindowSpec"):
            make_manager(make_config(10, specs))


@pytest.mark.parametrize("interval", ["none", "auto"])
def test_nothing_to_choose_without_a_window_group(
    interval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, interval)
    manager = make_manager(make_config(10, [full()]))
    assert manager.coordinator.retention_interval is None
    request = make_request("0", range(64), 16)
    start(manager, request)
    assert cached_indices(manager, request, 0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("variable", "field", "expected"),
    [
        (None, None, {3, 7, 11, 15}),
        ("none", None, {3, 7, 11, 15}),
        ("auto", None, {11}),
        (" AUTO ", None, {11}),
        ("0", None, {11}),
        ("0", "none", {3, 7, 11, 15}),
        ("0", 64, {7, 11, 15}),
        ("64", 0, {11}),
        (None, "auto", {11}),
        (None, "64", {7, 11, 15}),
        ("33", 0, {11}),
    ],
)
def test_where_the_interval_comes_from(
    variable: str | None,
    field: int | str | None,
    expected: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(ENV, variable)
    config = make_config(200, [full(block_size=32), swa(block_size=8, sliding_window=8)])
    config.prefix_cache_retention_interval = field
    manager = make_manager(config)
    request = make_request("0", range(128), 8)
    start(manager, request)
    assert cached_indices(manager, request, 1) == expected


@pytest.mark.parametrize(
    ("interval", "expected", "num_hit"),
    [("64", {3, 7, 11, 14, 15}, 240), ("0", {14}, 240), (None, set(range(16)), 240)],
)
def test_pure_sliding_window(
    interval: str | None, expected: set[int], num_hit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interval is not None:
        monkeypatch.setenv(ENV, interval)
    manager = make_manager(make_config(100, [swa(block_size=16, sliding_window=16)]))
    assert isinstance(manager.coordinator, UnitaryKVCacheCoordinator)
    request = make_request("0", range(256), 16)
    start(manager, request)
    assert cached_indices(manager, request, 0) == expected
    manager.free(request)
    assert manager.get_computed_blocks(make_request("1", range(256), 16))[1] == num_hit


def test_interval_survives_recycling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "1024")
    specs = [
        mla(block_size=256, compress_ratio=4),
        swa_mla(block_size=64, sliding_window=512),
        swa_mla(block_size=8, sliding_window=128),
        swa_mla(block_size=4, sliding_window=8),
    ]
    manager = make_manager(make_config(800, specs), max_model_len=4096, max_num_batched_tokens=512)

    def probe(name: str) -> None:
        hit, num_hit = manager.get_computed_blocks(make_request(name, range(1800), 4))
        assert num_hit == 1024
        assert [len(group) for group in hit.blocks] == [4, 16, 128, 256]

    first = make_request("0", range(4096), 4)
    run_prompt(manager, first, 512)
    manager.free(first)
    probe("probe0")
    other = make_request("1", range(10_000, 14_096), 4)
    run_prompt(manager, other, 512)
    manager.free(other)
    probe("probe1")
    manager.check_invariants()


def test_drafter_hits_with_dense_tails() -> None:
    manager = hybrid(swa_eagle=True)
    start(manager, make_request("0", range(128), 8))
    num_hit = manager.get_computed_blocks(make_request("1", range(128), 8))[1]
    assert num_hit > 0
    assert num_hit % 32 == 0


def test_drafter_caches_the_block_after_the_boundary() -> None:
    manager = hybrid(swa_eagle=True)
    request = make_request("0", range(40), 8)
    start(manager, request)
    assert cached_indices(manager, request, 1) == {3, 4}
    assert manager.get_computed_blocks(make_request("1", range(41), 8))[1] == 32


def test_siblings_of_a_drafters_group_share_its_mask() -> None:
    window = swa(block_size=8, sliding_window=8)
    config = make_config(200, [full(block_size=32), window, window], [2])
    manager = make_manager(config)
    assert [m.use_eagle for m in manager.coordinator.single_type_managers] == [False, True, True]
    request = make_request("0", range(72), 8)
    start(manager, request)
    for group_id in (1, 2):
        assert {4, 8} <= cached_indices(manager, request, group_id)
    assert manager.get_computed_blocks(make_request("1", range(73), 8))[1] == 64


def test_a_lost_window_block_lowers_the_hit() -> None:
    manager = hybrid(block_size=16, sliding_window=32)
    request = make_request("0", range(7 * 16), 16)
    start(manager, request)
    probe = make_request("1", range(7 * 16), 16)
    assert manager.get_computed_blocks(probe)[1] == 6 * 16
    table = manager.get_blocks("0").blocks[1]
    manager.evict_blocks({table[5].block_id})
    assert manager.get_computed_blocks(probe)[1] == 4 * 16


@pytest.mark.parametrize("interval", [None, "0", "64"])
def test_freed_window_blocks_scratch_before_cached(
    interval: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interval is not None:
        monkeypatch.setenv(ENV, interval)
    manager = hybrid()
    request = make_request("0", range(128), 8)
    start(manager, request)
    table = list(manager.get_blocks("0").blocks[1])
    hashed = {block.block_id for block in table if block.block_hash is not None}
    unhashed = {block.block_id for block in table if block.block_hash is None}
    assert hashed
    assert unhashed
    manager.free(request)
    order = free_ids(manager)
    assert max(map(order.index, unhashed)) < min(map(order.index, hashed))
    assert set(order[: len(unhashed)]) == unhashed
    assert manager.get_computed_blocks(make_request("1", range(128), 8))[1] == 96


def test_a_moving_window_frees_scratch_to_the_front() -> None:
    manager = hybrid()
    request = make_request("0", range(128), 8)
    manager.allocate_slots(request, 64)
    table = list(manager.get_blocks("0").blocks[1])
    request.num_computed_tokens = 64
    manager.coordinator.remove_skipped_blocks("0", 64)
    # Window 8: token 64 needs 57..63, so blocks 0..6 are skipped; of them 3 is cached.
    order = free_ids(manager)
    assert order[:6] == [table[i].block_id for i in (6, 5, 4, 2, 1, 0)]
    assert order[-1] == table[3].block_id
    assert ids(manager.get_blocks("0").blocks[1])[:7] == [0] * 7


def test_admission_counts_a_window_once() -> None:
    # 64 full blocks, and of the window what a step of 64 tokens holds: ceil((32-1+64)/8)+1 = 13.
    config = make_config(64 + 13 + 1, [full(block_size=8), swa(block_size=8, sliding_window=32)])
    manager = make_manager(config, max_model_len=512, max_num_batched_tokens=64)
    request = make_request("0", range(512), 8)
    assert manager.allocate_slots(request, 64, full_sequence_must_fit=True) is not None
    small = make_manager(
        make_config(5, [full(block_size=8), swa(block_size=8, sliding_window=32)]),
        max_model_len=512,
        max_num_batched_tokens=64,
    )
    refused = make_request("1", range(256), 8)
    assert small.allocate_slots(refused, 16, full_sequence_must_fit=True) is None
    assert small.block_pool.get_num_free_blocks() == 4
