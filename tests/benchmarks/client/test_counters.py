"""What a server's counters say of a load."""

import pytest

from tests.benchmarks.stub_server import Stub, serving
from vllm.benchmarks.client.counters import counted_between, read_miss_tokens
from vllm.benchmarks.client.dialects import DIALECTS
from vllm.benchmarks.client.target import Target, open_session

PAGE = """# TYPE vllm:prefix_cache_miss_tokens_total counter
vllm:prefix_cache_miss_tokens_total{engine="0",reason="first_seen"} 40.0
vllm:prefix_cache_miss_tokens_total{engine="1",reason="first_seen"} 2.0
vllm:prefix_cache_miss_tokens_total{engine="0",reason="evicted"} 7.0
vllm:prefix_cache_miss_tokens_created{engine="0",reason="evicted"} 1.7e9
# TYPE other counter
other_total{reason="first_seen"} 5.0
"""


@pytest.mark.parametrize(
    ("page", "counted"),
    [
        (PAGE, {"first_seen": 42, "evicted": 7}),
        ("other_total 5.0\n", None),
        ("<html>no metrics {</html>", None),
        (None, None),
    ],
)
async def test_misses_are_summed_over_engines(
    page: str | None, counted: dict[str, int] | None
) -> None:
    stub = Stub(lambda _: [])
    if page is not None:
        stub.metrics = lambda _: page
    async with serving(stub), open_session(0) as session:
        assert await read_miss_tokens(session, Target(stub.url, DIALECTS["openai"])) == counted


def test_growth_comes_most_first() -> None:
    before = {"first_seen": 40, "evicted": 7, "partial": 1}
    after = {"first_seen": 50, "evicted": 107, "partial": 1, "new": 3}
    grown = counted_between(before, after)
    assert grown is not None
    assert list(grown.items()) == [("evicted", 100), ("first_seen", 10), ("new", 3)]


def test_a_server_that_began_anew_or_does_not_count_is_unknown() -> None:
    assert counted_between({"evicted": 7}, {"evicted": 6}) is None
    assert counted_between(None, {"evicted": 6}) is None
    assert counted_between({"evicted": 6}, None) is None
