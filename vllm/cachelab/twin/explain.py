"""``vllm cache explain``: why a recorded request hit what it hit, and no more.

The run is replayed to the moment the request was admitted, which tells what each group held; its
units are watched on the way, which tells when they left; remedies are named only where a replay
with them hits. Of other requests nothing is told but how many there were.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.trace.events import Begun, Step
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.pairs import PromptPair, compare_recorded, format_pair
from vllm.cachelab.twin.rebuild import check_rebuilt, environment_of, settings_of
from vllm.cachelab.twin.remedies import Counterfactuals
from vllm.cachelab.twin.spans import Span, spans_of
from vllm.cachelab.twin.trace_file import CacheTrace, RecordedRequest, read_trace
from vllm.cachelab.twin.watch import Loss, PrefixWatch
from vllm.exceptions import ConfigError
from vllm.v1.messages import EVICTED, STATE_EVICTED, WINDOW_EVICTED


@dataclass(slots=True)
class Explanation:
    """What is to be told of one request.

    Attributes:
        request_id: As its client knows it.
        prompt_tokens: Of its prompt.
        cached_tokens: Of those, hit: the boundary where it resumed.
        dense_match_tokens: How far the groups that keep every token matched together.
        group_matches: The same by group.
        checkpoints: Where window state was held, within that.
        partial_checkpoints: Those of them that lack the rows of some layers.
        spans: The rest.
        comparison: With an earlier request; None: nobody asked.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    dense_match_tokens: int
    group_matches: dict[int, int] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    partial_checkpoints: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    comparison: PromptPair | None = None


class Explainer:
    """Explains requests of one trace.

    Owns: the replays it needed.

    Args:
        trace: What was recorded.
        finds_remedies: Whether to look for remedies, which takes a replay for each that is tried.
    """

    def __init__(self, trace: CacheTrace, *, finds_remedies: bool = True) -> None:
        self._trace = trace
        self._finds_remedies = finds_remedies
        self.counterfactuals = Counterfactuals(trace)

    def explain(self, request_id: str) -> Explanation:
        """Explain one request.

        Raises:
            ConfigError: It is not in the trace, or was never admitted.
        """
        recorded = self._trace.find(request_id)
        number = recorded.added.number
        unit = self._trace.header.hash_unit
        # As far as a lookup goes: the last token is always computed.
        num_units = (recorded.added.num_prompt_tokens - 1) // unit
        watch = PrefixWatch(recorded.hashes[:num_units], unit)
        twin = ExactTwin(self._trace, watch=watch)
        lazy = twin.engine.lazy_group_ids
        matches: dict[int, int] = {}
        held: list[int] = []
        partial: list[int] = []
        for position, event in enumerate(self._trace.events):
            watch.at_event = position
            if isinstance(event, Begun | Step):
                matches, held = watch.dense_matches(), watch.checkpoints()
                partial = watch.partial_checkpoints(lazy)
            twin.feed(event)
            if number in twin.result.misses:
                break
        else:
            raise ConfigError(f"request {request_id!r} was never admitted: it computed nothing.")
        stats = twin.result.misses[number]
        made = Explanation(
            recorded.response_id,
            stats.num_prompt_tokens,
            stats.num_cached_tokens,
            stats.dense_match_tokens,
            matches,
            [p for p in held if p <= stats.dense_match_tokens],
            [p for p in partial if p <= stats.dense_match_tokens],
            spans_of(stats),
        )
        self._add_causes(made, watch)
        self._add_remedies(made, recorded)
        return made

    def _add_causes(self, made: Explanation, watch: PrefixWatch) -> None:
        for span in made.spans:
            if span.reason in (EVICTED, WINDOW_EVICTED, STATE_EVICTED):
                windows = span.reason != EVICTED
                begin = span.begin - span.begin % self._trace.header.hash_unit
                loss = watch.last_loss(begin, span.end, of_windows=windows)
                if loss is not None:
                    span.lost = self._describe(loss, watch.at_event)

    def _describe(self, loss: Loss, now: int) -> dict[str, Any]:
        """Say when an entry left and what was going on; other requests are only counted."""
        events = self._trace.events
        then, admitted_at = events[loss.at_event], events[now]
        made: dict[str, Any] = {
            "cause": "reset" if loss.is_reset else "its memory was needed",
            "seconds_before": round((_time_us(admitted_at) - _time_us(then)) / 1e6, 3),
        }
        if isinstance(then, Begun | Step):
            made |= {"step_tokens": then.num_tokens, "requests_admitted": len(then.admitted)}
        since = [e for e in events[loss.at_event : now] if isinstance(e, Begun | Step)]
        made["requests_admitted_since"] = sum(len(step.admitted) for step in since)
        return made

    def _add_remedies(self, made: Explanation, recorded: RecordedRequest) -> None:
        if not self._finds_remedies:
            return
        for span in made.spans:
            if span.lost is not None and span.lost["cause"] == "reset":
                continue
            span.remedy = self.counterfactuals.find(
                recorded.added.number, span.reason, span.end - span.begin, made.cached_tokens
            )


def _time_us(event: object) -> int:
    return int(getattr(event, "time_us", 0))


def format_explanation(made: Explanation) -> Iterator[str]:
    """Yield lines for people."""
    share = 100 * made.cached_tokens / max(1, made.prompt_tokens)
    yield f"{made.request_id}: {made.cached_tokens} of {made.prompt_tokens} hit ({share:.1f}%)"
    yield f"  resumed at token {made.cached_tokens}; dense rows matched {made.dense_match_tokens}"
    for group, matched in made.group_matches.items():
        yield f"  group {group}: {matched} tokens"
    if made.checkpoints:
        yield f"  window state at tokens {', '.join(map(str, made.checkpoints))}"
    if made.partial_checkpoints:
        yield f"    of lower layers alone at {', '.join(map(str, made.partial_checkpoints))}"
    for span in made.spans:
        yield f"  {span.begin}..{span.end}: {span.reason} ({span.end - span.begin} tokens)"
        if span.lost is not None:
            lost = span.lost
            yield (
                f"    left {lost['seconds_before']} s before ({lost['cause']}); "
                f"{lost['requests_admitted_since']} requests were admitted since"
            )
        if span.remedy is not None:
            yield f"    remedy: {span.remedy.text}; then {span.remedy.cached_tokens} hit"
    if made.comparison is not None:
        yield from format_pair(made.comparison)


def to_json(made: Explanation) -> dict[str, Any]:
    """Return an explanation as an object; a remedy keeps only what it has."""
    raw = asdict(made)
    for span in raw["spans"]:
        if span["remedy"] is not None:
            span["remedy"] = {k: v for k, v in span["remedy"].items() if v is not None}
    if raw["comparison"] is None:
        del raw["comparison"]
    return raw


def load(args: argparse.Namespace) -> CacheTrace:
    """Read a trace, and refuse one whose cache cannot be rebuilt."""
    trace = read_trace(args.trace, is_strict=args.strict)
    settings: SimSettings = settings_of(trace.header)
    with environment_of(trace.header):
        check_rebuilt(trace.header, settings)
    return trace


def run_explain(args: argparse.Namespace) -> int:
    """Explain a request of a trace, or of a live server; returns the exit code."""
    if args.trace is None:
        # Late: only this way needs a client.
        from vllm.cachelab.twin.ask_server import fetch_explanation  # noqa: PLC0415

        raw: Mapping[str, Any] = fetch_explanation(
            args.url, args.request_id, args.api_key, args.earlier_id
        )
        print(json.dumps(raw, indent=2))
        return 0
    trace = load(args)
    made = Explainer(trace, finds_remedies=args.remedies).explain(args.request_id)
    if args.earlier_id is not None:
        earlier, own = trace.find(args.earlier_id), trace.find(args.request_id)
        made.comparison = compare_recorded(earlier, own, trace.header.hash_unit)
    if args.json:
        print(json.dumps(to_json(made)))
    else:
        print("\n".join(format_explanation(made)))
    return 0
