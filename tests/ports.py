"""Ports for the servers of tests.

They lie below those that the system gives to clients, and each test process takes from a range of
its own: what was free a moment ago is free still.
"""

import contextlib
import itertools
import os
import socket

_FIRST, _RANGE, _NUM_RANGES = 10_000, 1_200, 18
# Servers of several cores take the ports behind their own.
_APART = 8
_ROUNDS = itertools.count(os.getpid())


def free_ports(count: int = 1) -> int:
    """Return the first of so many ports in a row, at most 8, that nobody has."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    begin = _FIRST + int(worker or os.getpid()) % _NUM_RANGES * _RANGE
    while True:
        first = begin + next(_ROUNDS) * _APART % _RANGE
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
