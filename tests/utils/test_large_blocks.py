"""Memory of large blocks goes back, in a process of its own, as the setting cannot be undone."""

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, threading
from vllm.utils.large_blocks import return_large_blocks

assert return_large_blocks()

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def work():
    # A small block behind each large one keeps the heap from shrinking.
    kept = []
    for size in range(1, 40):
        large = bytearray(size << 19)
        kept.append(bytearray(1 << 17))
        del large

before = rss()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(rss() - before)
"""
_HOLES = """
import resource
from vllm.utils.large_blocks import trim_heap

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

blocks = [bytearray(100_000) for _ in range(2000)]
full = rss()
kept = blocks[::50] + [blocks[-1]]
del blocks
assert trim_heap()
print(full - rss())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_blocks_leave_no_holes() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(found.stdout) < 40


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a call of glibc")
def test_holes_of_the_heap_go_back() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(found.stdout) > 150
