"""One cache: the modules that a reader opens are those that serve, and nothing stands twice."""

import importlib
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import combinations
from types import CodeType, FrameType
from typing import Protocol

import pytest

import vllm.v1.core
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.coordinator_interface import Coordinator
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.pool.block_index import BlockIndex
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.whole_block.coordinator import KVCacheCoordinator
from vllm.v1.core.whole_block.manager_base import SingleTypeKVCacheManager

# What a request that is served must go through, whatever the rules of its hits.
SERVING = {
    "kv_cache_manager": {"look_up", "allocate_slots", "_fit", "record_admission"},
    "kv_cache_coordinator": {"plan", "commit", "commit_step", "take_step_work", "free"},
    "single_type_kv_cache_manager": {"blocks_below", "blocks_for", "drop_below", "insert"},
    "block_pool": {"get_new_blocks", "free_blocks", "touch", "get_num_free_blocks"},
    "kv_cache_utils": {"hash_new_blocks", "generate_block_hash_extra_keys"},
}
# Two rules of hits, one mechanism: what they disagree on implements one of these.
PROTOCOLS: tuple[type, ...] = (Coordinator, BlockIndex, RetentionPolicy)
# Layers that hand verbs on to the next one: the manager, what knows all groups, one group.
LAYERS: tuple[tuple[type, ...], ...] = (
    (KVCacheManager,),
    (CheckpointCoordinator, KVCacheCoordinator),
    (SingleTypeKVCacheManager,),
)
# So many verbs in common make two classes of no common base the same thing twice.
MAX_SHARED_METHODS = 6


@contextmanager
def executed() -> Iterator[dict[str, set[str]]]:
    """Gather by module of v1/core the functions that run; bodies of classes do not count."""
    found: dict[str, set[str]] = defaultdict(set)
    prefix = vllm.v1.core.__path__[0]

    def note(frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and code.co_filename.startswith(prefix):
            found[code.co_filename.rsplit("/", 1)[1].removesuffix(".py")].add(code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_the_five_modules_serve_a_request_of_deepseek_v4() -> None:
    session = Session(make_core(32, num_blocks=400, budget=256))
    prompt = [5 + i % 90 for i in range(300)]
    session.add(prompt, 40)
    with executed() as found:
        while session.core.scheduler.has_unfinished_requests():
            session.step()
        session.add(prompt, 4)
        while session.core.scheduler.has_unfinished_requests():
            session.step()
    stats = session.answers["q1"].stats
    assert stats is not None
    assert stats.num_cached_tokens == 288
    for module, functions in SERVING.items():
        assert functions <= found[module], (module, functions - found[module])


def _classes() -> list[type]:
    found = {}
    for info in pkgutil.walk_packages(vllm.v1.core.__path__, "vllm.v1.core."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == info.name:
                found[f"{info.name}.{value.__name__}"] = value
    return list(found.values())


def _public_methods(cls: type) -> set[str]:
    def is_verb(name: str, value: object) -> bool:
        return not name.startswith("_") and isinstance(
            value, Callable | classmethod | staticmethod | property
        )

    return {name for base in cls.__mro__[:-1] for name, v in vars(base).items() if is_verb(name, v)}


def _is_named_by_a_protocol(verbs: set[str]) -> bool:
    return any(verbs <= _public_methods(protocol) for protocol in PROTOCOLS)


def _hand_on(one: type, other: type) -> bool:
    layers = [
        {i for i, layer in enumerate(LAYERS) if issubclass(cls, layer)} for cls in (one, other)
    ]
    return all(layers) and layers[0] != layers[1]


def _are_related(one: type, other: type) -> bool:
    shared = set(one.__mro__) & set(other.__mro__) - {object}
    return any(
        base.__module__.startswith("vllm.") for base in shared if base not in (*PROTOCOLS, Protocol)
    )


def test_no_class_has_a_twin() -> None:
    # An enumeration's verbs are those of its members' type.
    classes = [
        cls
        for cls in _classes()
        if not getattr(cls, "_is_protocol", False) and not issubclass(cls, Enum)
    ]
    assert {KVCacheManager, BlockPool} <= set(classes)
    # The encoder's caches share the interface's verbs, and no behaviour: one shares, one does not.
    encoder = {"EncoderCacheManager", "EncoderDecoderCacheManager"}
    twins = []
    for one, other in combinations(classes, 2):
        if _are_related(one, other) or _hand_on(one, other):
            continue
        if {one.__name__, other.__name__} == encoder:
            continue
        shared = _public_methods(one) & _public_methods(other)
        if len(shared) >= MAX_SHARED_METHODS and not _is_named_by_a_protocol(shared):
            twins.append((one.__name__, other.__name__, sorted(shared)))
    assert not twins


def test_no_name_stands_for_two_classes() -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for cls in _classes():
        names[cls.__name__].append(cls.__module__)
    assert not {name: places for name, places in names.items() if len(places) > 1}
