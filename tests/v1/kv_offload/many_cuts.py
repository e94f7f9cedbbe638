"""Power cuts by the thousand: is every acknowledged object there after each, bit for bit?

    python -m tests.v1.kv_offload.many_cuts [--cuts 10000] [--first 0]

Each trial runs a store on a simulated disk, cuts the power at a random call, keeps any subset of
the sectors that were not synced, starts again and checks. Stops at the first fault.
"""

import argparse
import json

from tqdm import tqdm

from tests.v1.kv_offload.store_driver import StoreDriver

CUTS_PER_SEED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    totals = {"cuts": 0, "acknowledged": 0, "checked": 0, "evicted": 0}
    for seed in tqdm(range(arguments.first, arguments.first + arguments.cuts // CUTS_PER_SEED)):
        driver = StoreDriver(seed)
        for _ in range(CUTS_PER_SEED):
            store = driver.store
            driver.cut(num_steps=12)
            totals["evicted"] += store.counts.evicted
        totals["cuts"] += CUTS_PER_SEED
        totals["acknowledged"] += driver.num_acknowledged
        totals["checked"] += driver.num_checked
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
