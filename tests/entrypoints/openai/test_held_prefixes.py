"""What several cores keep of one request is one kept prefix."""

from tests.entrypoints.openai.conftest import Served
from vllm.entrypoints.openai.held_prefixes import merge_held
from vllm.v1.messages import HeldPrefix

NAME = "prefix-0123456789abcdef"


def held(held_id: str, num_tokens: int = 64, expires_in: float | None = None) -> HeldPrefix:
    return HeldPrefix(held_id, num_tokens, 3, True, expires_in, 1)


def test_entries_of_one_request_are_joined_and_others_left() -> None:
    other = held("cmpl-prefix-0-00000007")
    alone = held("prefix-ffffffffffffffff-00000003")
    prefixes = [
        held(f"{NAME}-00000001", 64, 9.0),
        other,
        held(f"{NAME}-1-00000002", 32, 5.0),
        alone,
    ]
    joined = HeldPrefix(NAME, 32, 6, True, 5.0, 2)
    assert merge_held(prefixes) == [joined, other, alone]


async def test_every_core_keeps_a_prefix_and_forgets_it(served: Served) -> None:
    url = "/v1/cache/prefixes"
    served.engine.living_ranks = [0, 1]
    made = (await served.client.post(url, json={"prompt": [1] * 9, "ttl": 60})).json()
    assert served.engine.ranks == [0, 1]
    assert (made["num_tokens"], made["num_blocks"]) == (9, 6)
    assert (await served.client.get(url)).json()["data"] == [made]
    gone = await served.client.delete(f"{url}/{made['id']}")
    assert gone.json()["deleted"]
    assert (await served.client.get(url)).json()["data"] == []
    assert (await served.client.delete(f"{url}/{made['id']}")).status_code == 404
