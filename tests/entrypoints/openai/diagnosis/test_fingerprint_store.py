"""Bounds of the store of fingerprints."""

from tests.entrypoints.openai.diagnosis.test_fingerprint import OWNER, fingerprint
from vllm.entrypoints.openai.diagnosis.fingerprint_store import FingerprintStore


def test_number_bytes_and_age_are_bounded_and_the_least_recently_used_goes() -> None:
    now = [0.0]
    one = fingerprint([1, 2, 3])
    store = FingerprintStore(3, 3 * one.num_bytes, 10.0, lambda: now[0])
    for name in "abc":
        store.put(name, one)
    assert store.find("a", OWNER) is one
    store.put("d", one)
    assert [store.find(name, OWNER) is None for name in "abcd"] == [False, True, False, False]
    store.put("e", fingerprint(list(range(500))))
    assert len(store) == 1
    now[0] = 10.5
    assert store.find("e", OWNER) is None
    assert len(store) == 0


def test_another_owner_finds_nothing() -> None:
    store = FingerprintStore(3, 10**6, 10.0)
    store.put("a", fingerprint([1, 2, 3]))
    assert store.find("a", bytes(16)) is None
    store.discard("a")
    store.discard("a")
    assert store.find("a", OWNER) is None
