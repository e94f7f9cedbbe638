"""How many hit tokens does MTP cost, on multi-turn, fan-out and resend traffic?

    python -m benchmarks.mtp_hits [--units 32 64 128] [--drafts 3] [--cases 60]

The control plane alone, with DeepSeek-V4-Flash's groups and room for everything: no token is lost
to eviction. Each kind of traffic runs without drafts, and with MTP under each answer to the stale
row: made anew, kept, or given up together with the boundary. Each draft stands with a chance of
70%, given the one before it.

* multi-turn: conversations of five turns; a turn sends everything before it and a new question;
* fan-out: six prompts that share a random number of tokens, and then differ;
* fan-out at a unit: the same, where the shared tokens are a whole number of units, the worst case;
* resend: a prompt sent twice, of random length, and of a whole number of units.

Prints a markdown table of hit tokens, and of tokens lost per hit; and one JSON line.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tqdm import tqdm

from benchmarks.prefix_driver import PrefixDriver
from benchmarks.result import print_result
from benchmarks.v4_cache import UNITS, flash_config
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.values.cache_settings import StaleRow
from vllm.v1.kv_cache_interface import KVCacheConfig

_VOCAB = 129_280
MAX_LEN = 16_000
# None: without drafts.
MODES: dict[str, StaleRow | None] = {
    "no drafts": None,
    "MTP, rebuild": StaleRow.REBUILD,
    "MTP, keep": StaleRow.KEEP,
    "MTP, drop": StaleRow.DROP,
}

# A prompt, the tokens of its answer, and whether the cache is emptied before it.
Sent = tuple[list[int], int, bool]
Traffic = Callable[[random.Random, int, int], Iterator[Sent]]


def draw(rng: random.Random, count: int) -> list[int]:
    """Return random token ids but 0, of which answers are made."""
    return rng.choices(range(1, _VOCAB), k=count)


def multi_turn(rng: random.Random, _unit: int, cases: int) -> Iterator[Sent]:
    """Yield the turns of conversations."""
    for _ in range(cases):
        tokens = draw(rng, rng.randint(20, 2000))
        for turn in range(5):
            num_answer = rng.randint(10, 400)
            yield tokens, num_answer, turn == 0
            tokens = [*tokens, *([0] * num_answer), *draw(rng, rng.randint(10, 300))]


def fan_out(rng: random.Random, _unit: int, cases: int) -> Iterator[Sent]:
    """Yield prompts that part at any token."""
    for _ in range(cases):
        yield from _part_from(rng, draw(rng, rng.randint(50, 3000)))


def fan_out_at_unit(rng: random.Random, unit: int, cases: int) -> Iterator[Sent]:
    """Yield prompts that part at the end of a unit."""
    for _ in range(cases):
        yield from _part_from(rng, draw(rng, rng.randint(1, 3000 // unit) * unit))


def _part_from(rng: random.Random, shared: list[int]) -> Iterator[Sent]:
    for branch in range(6):
        own = [branch + 1, *draw(rng, rng.randint(0, 300))]
        yield [*shared, *own], rng.randint(1, 60), branch == 0


def resend(rng: random.Random, _unit: int, cases: int) -> Iterator[Sent]:
    """Yield prompts of any length twice."""
    for _ in range(cases):
        tokens = draw(rng, rng.randint(40, 3000))
        yield tokens, 20, True
        yield tokens, 20, False


def resend_at_unit(rng: random.Random, unit: int, cases: int) -> Iterator[Sent]:
    """Yield prompts of whole units twice."""
    for _ in range(cases):
        tokens = draw(rng, rng.randint(2, 3000 // unit) * unit)
        yield tokens, 20, True
        yield tokens, 20, False


TRAFFIC: dict[str, Traffic] = {
    "multi-turn": multi_turn,
    "fan-out": fan_out,
    "fan-out at a unit": fan_out_at_unit,
    "resend": resend,
    "resend of whole units": resend_at_unit,
}


def make_config(unit: int, *, has_drafter: bool) -> KVCacheConfig:
    """Return the cache, the MTP block's group marked if it runs."""
    config = flash_config(unit, 8192)
    groups = [
        replace(g, is_eagle_group=has_drafter and any(n.startswith("mtp.") for n in g.layer_names))
        for g in config.kv_cache_groups
    ]
    return replace(config, kv_cache_groups=groups)


def serve(
    traffic: Traffic, unit: int, mode: StaleRow | None, num_drafts: int, cases: int
) -> list[int]:
    """Return the hit of every request."""
    driver = PrefixDriver(
        make_config(unit, has_drafter=mode is not None),
        MAX_LEN,
        num_drafts=num_drafts if mode is not None else 0,
        stale_row=mode or StaleRow.KEEP,
    )
    hasher = get_request_block_hasher(unit, sha256)
    hits = []
    for number, (tokens, num_answer, is_first) in enumerate(
        traffic(random.Random(unit), unit, cases)
    ):
        if is_first:
            driver.manager.new_step_starts()
            assert driver.manager.reset_prefix_cache()
        hits.append(driver.serve(str(number), tokens, hasher, num_answer).hit_tokens)
    return hits


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", nargs="+", type=int, choices=UNITS, default=list(UNITS))
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--cases", type=int, default=60)
    args = parser.parse_args(argv)
    init_none_hash(sha256)
    values: dict[str, dict[str, dict[str, float]]] = {}
    print("| traffic | unit | hits | hit tokens | " + " | ".join(list(MODES)[1:]) + " |")
    print("|---|--:|--:|--:|" + "--:|" * (len(MODES) - 1))
    for name, traffic in TRAFFIC.items():
        for unit in tqdm(args.units, desc=name, disable=None):
            hits = {
                label: serve(traffic, unit, mode, args.drafts, args.cases)
                for label, mode in MODES.items()
            }
            row = values[f"{name} {unit}"] = {
                label: {"hits": sum(h > 0 for h in of_mode), "hit_tokens": sum(of_mode)}
                for label, of_mode in hits.items()
            }
            base = row["no drafts"]
            cells = [
                f"{(base['hit_tokens'] - row[label]['hit_tokens']) / base['hits']:.2f}"
                for label in list(MODES)[1:]
            ]
            print(
                f"| {name} | {unit} | {base['hits']} | {base['hit_tokens']} | "
                + " | ".join(cells)
                + " |"
            )
    print_result("mtp_hits", vars(args), values)


if __name__ == "__main__":
    main()
