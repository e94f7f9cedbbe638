"""Which replica gets a request: pure functions of numbers.

A replica is an engine core, of one server (``-dp``) or of a fleet. The one with the longest cached
prefix gets a request, unless it is overloaded or another one costs less:

    cost = 2 * tokens to compute there
           + price * tokens it must evict for them
           + tokens to restore there from a tier / 8
           + prompt tokens that it has yet to compute for others
           + 32 * requests it has

    price = 2 * (tokens it computed lately / what one of them computed on average, at most 2)^2

What is computed twice is lost for everybody, what waits only for those behind it: therefore the 2.

What is evicted is lost only if somebody comes back for it, the less likely the longer nobody did.
One cache of all the memory would evict what was used longest ago anywhere; separate ones do nearly
the same if all fill their memory equally fast. So memory costs more where more was computed lately,
and conversations that are new, or whose rows are gone, go where it costs least. Nor does a first
replica that caches a common system prompt draw every conversation while others stand empty.

A request may carry a key that related requests share (``prompt_cache_key``). Every key has an order
of replicas of its own (``find_order``), which needs no memory: all front ends agree on it, and a
replica that comes or goes moves only its own keys. The key decides among those that cache as much
of the prompt and cost about the same, so that it overrules neither the cache nor the load.

Numbers of all replicas are arrays: a choice among a thousand takes some tens of microseconds.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# What is computed again is lost throughput, what waits is only late.
_WORK_WEIGHT = 2
# Rows come from a host or a disk about so many times as fast as they are computed.
_RESTORE_SPEED = 8
# A running request slows a step about as much as so many prompt tokens.
_TOKENS_PER_REQUEST = 32
# Requests by which a replica may lead before it counts as overloaded, however few the others have.
_MIN_LEAD = 8
# What a key may cost: so many requests before the new one, and a quarter of its computed tokens.
_KEY_REQUESTS = 4
_KEY_WORK_SHARE = 4
# Of the price of memory: how it grows with what was computed lately, and its bound.
_PRICE_POWER = 2
_MAX_SHARE = 2.0
_NEVER = np.float64(2.0**62)

Counts = npt.NDArray[np.int64]
Amounts = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Loads(NamedTuple):
    """What is known of all replicas when a request comes, whatever it asks; by rank.

    Attributes:
        serves: Whether it may get requests.
        num_requests: Requests it has, running and waiting.
        standing_costs: What these add to the cost of any other there (``find_standing_cost``).
        unused_tokens: Tokens that fit in memory which caches nothing yet.
        recent_tokens: Prompt tokens computed there lately, in any unit.
        eviction_prices: What a token costs that is evicted there.
    """

    serves: Flags
    num_requests: Counts
    standing_costs: Counts
    unused_tokens: Counts
    recent_tokens: Amounts
    eviction_prices: Amounts

    @classmethod
    def of(cls, num_replicas: int, unused_tokens: int = 0) -> "Loads":
        """Return idle replicas that all serve."""
        return cls(
            serves=np.ones(num_replicas, np.bool_),
            num_requests=np.zeros(num_replicas, np.int64),
            standing_costs=np.zeros(num_replicas, np.int64),
            unused_tokens=np.full(num_replicas, unused_tokens),
            recent_tokens=np.zeros(num_replicas),
            eviction_prices=np.full(num_replicas, float(_WORK_WEIGHT)),
        )


def find_standing_cost(num_requests: int, backlog_tokens: int) -> int:
    """Return what a replica's requests add to the cost of any other there.

    Args:
        num_requests: That it has, running and waiting.
        backlog_tokens: Prompt tokens that it has yet to compute for them.
    """
    return _TOKENS_PER_REQUEST * num_requests + backlog_tokens


def find_eviction_prices(recent_tokens: Amounts, mean: float) -> Amounts:
    """Return what a token costs that is evicted; see the module.

    Args:
        recent_tokens: Prompt tokens computed on each replica lately.
        mean: Of those that serve; 0: nobody computed any, and all prices are 2.
    """
    if not mean:
        return np.full(len(recent_tokens), float(_WORK_WEIGHT))
    shares: Amounts = np.minimum(recent_tokens, _MAX_SHARE * mean) / mean
    shares **= _PRICE_POWER
    shares *= _WORK_WEIGHT
    return shares


def find_eviction_price(recent_tokens: float, mean: float) -> float:
    """Return what a token costs that is evicted on one replica: as ``find_eviction_prices``."""
    share = min(recent_tokens, _MAX_SHARE * mean) / mean if mean else 1.0
    return float(_WORK_WEIGHT * share**_PRICE_POWER)


def _all_serve(loads: Loads) -> bool:
    # The place of an extreme is found in a tenth of the time of the extreme.
    return bool(loads.serves[loads.serves.argmin()])


def find_limit(loads: Loads, max_num_seqs: int) -> int:
    """Return how many requests are too many for a replica.

    These are 8 and twice as many as the least busy one has, or all that a replica runs at a time
    while another one runs fewer: more wait, and elsewhere they need not.

    Args:
        loads: Of all; at least one serves.
        max_num_seqs: Requests that a replica runs at a time.
    """
    numbers = loads.num_requests
    if not _all_serve(loads):
        numbers = numbers[loads.serves]
    least = int(numbers[numbers.argmin()])
    limit = least + max(_MIN_LEAD, least)
    return min(limit, max_num_seqs) if least < max_num_seqs else limit


def costs(
    loads: Loads, cached_tokens: Counts, num_prompt_tokens: int, restorable: Counts | None = None
) -> Amounts:
    """Return what a prompt costs on each replica, in tokens; see the module.

    Args:
        loads: Of all.
        cached_tokens: Of the prompt, tokens that need not be computed there.
        num_prompt_tokens: Of the prompt.
        restorable: Of the others, tokens that a replica need not compute but must fetch from a
            slower tier; None: there is no such tier.
    """
    fresh = num_prompt_tokens - cached_tokens
    # In place: arrays of all replicas are most of what a decision costs.
    evicted = fresh - loads.unused_tokens
    np.maximum(evicted, 0, out=evicted)
    total = evicted * loads.eviction_prices
    if restorable is not None:
        fresh -= restorable
    fresh *= _WORK_WEIGHT
    if restorable is not None:
        fresh += restorable // _RESTORE_SPEED
    fresh += loads.standing_costs
    total += fresh
    return total


def choose(
    loads: Loads,
    cached_tokens: Counts,
    num_prompt_tokens: int,
    max_num_seqs: int,
    restorable: Counts | None = None,
    key: int | None = None,
) -> int:
    """Return the rank that gets a request.

    Of equal costs the longer prefix wins, then the replica that has computed less lately. With a
    key the first in its order wins of those that cost at most four requests and a quarter of the
    tokens to compute more than the cheapest, and have cached no less.

    Args:
        loads: Of all; at least one serves.
        cached_tokens: As of ``costs``.
        num_prompt_tokens: Of the prompt.
        max_num_seqs: Requests that a replica runs at a time.
        restorable: As of ``costs``.
        key: 64 bits that related requests share; None: there is none.
    """
    prices = costs(loads, cached_tokens, num_prompt_tokens, restorable)
    limit = find_limit(loads, max_num_seqs)
    if key is None and _all_serve(loads):
        # Most often the cheapest is able: then the others need not be looked at.
        rank = _find_best(loads, cached_tokens, prices)
        if loads.num_requests[rank] < limit:
            return rank
    np.putmask(prices, ~((loads.num_requests < limit) & loads.serves), _NEVER)
    rank = _find_best(loads, cached_tokens, prices)
    if key is None:
        return rank
    work = num_prompt_tokens - cached_tokens[rank]
    most = prices[rank] + _KEY_REQUESTS * _TOKENS_PER_REQUEST + work // _KEY_WORK_SHARE
    # Those that are not able have a price beyond every limit.
    suits = np.flatnonzero((prices <= most) & (cached_tokens >= cached_tokens[rank]))
    return int(suits[find_order(key, suits).argmax()])


def _find_best(loads: Loads, cached_tokens: Counts, prices: Amounts) -> int:
    """Return the cheapest rank; of equal ones the longer prefix, then who computed less lately."""
    first = prices.argmin()
    equal = prices == prices[first]
    if np.count_nonzero(equal) == 1:
        return int(first)
    best = equal.nonzero()[0]
    known = cached_tokens[best]
    longest = known == known[known.argmax()]
    if not longest[longest.argmin()]:
        best = best[longest]
    return int(best[loads.recent_tokens[best].argmin()])


def find_order(key: int, ranks: Counts) -> npt.NDArray[np.uint64]:
    """Return how well replicas suit a key: the highest first; as good as drawn for each pair.

    Args:
        key: 64 bits.
        ranks: Of the replicas.
    """
    # The finaliser of SplitMix64; products wrap.
    mixed = ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
