"""A worker without a model: it plays scripted tokens and remembers what every KV row was made from.

``FakeExecutor`` believes nothing but the scheduler's messages. It keeps its own tokens and block
tables, and fails as soon as a step would read a row that was not computed from exactly the
request's own prefix, skip a token, or use a block that the messages never gave it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.v1.core.unit_cache_driver import RowMemory, split_rows
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput

# (request id, index of the output token) -> the token.
Script = Callable[[str, int], int]


def scripted(scripts: dict[str, Sequence[int]], default: int = 7) -> Script:
    """Play lists of tokens by request id; ``default`` beyond their ends."""

    def play(request_id: str, index: int) -> int:
        script = scripts.get(request_id, ())
        return script[index] if index < len(script) else default

    return play


def tags_of(tokens: Sequence[int], before: int = 0) -> list[int]:
    """Return per position a tag of the prefix that ends there, behind one with a tag."""
    tags: list[int] = []
    for token in tokens:
        before = hash((before, token))
        tags.append(before)
    return tags


class PageMemory:
    """Rows of whole-block groups: block id -> (group that wrote last, slot -> tag)."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._blocks: dict[int, tuple[int, dict[int, int]]] = {}

    def write(self, tables: list[list[int]], tags: list[int], start: int, end: int) -> None:
        """Store rows [start, end) in every group."""
        for group, spec in enumerate(self.specs):
            for row in range(start, end):
                block_id = tables[group][row // spec.block_size]
                assert block_id != 0, f"row {row} of group {group} would go to the null block"
                owner, rows = self._blocks.get(block_id, (group, {}))
                rows = rows if owner == group else {}
                rows[row % spec.block_size] = tags[row]
                self._blocks[block_id] = (group, rows)

    def forget(self, block_id: int) -> None:
        """Lose a block's rows."""
        self._blocks.pop(block_id, None)

    def read(self, tables: list[list[int]], tags: list[int], start: int, end: int) -> None:
        """Check every row that tokens [start, end) attend to."""
        for group, spec in enumerate(self.specs):
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, start - spec.sliding_window + 1)
            for index, begin, stop in split_rows(first, end, spec.block_size):
                block_id = tables[group][index]
                assert block_id != 0, f"row {begin} of group {group} is read from the null block"
                owner, rows = self._blocks[block_id]
                assert owner == group, f"block {block_id} holds rows of group {owner}"
                slot = begin % spec.block_size
                found = [rows.get(slot + i) for i in range(stop - begin)]
                assert found == tags[begin:stop], f"block {block_id} has rows of another prefix"


@dataclass
class WorkerRequest:
    """What a worker knows of a request."""

    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    preempted: bool = field(default=False)
    tagged: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)

    def tag(self, drafts: Sequence[int]) -> list[int]:
        """Return the tags of its tokens and of drafts behind them."""
        known = len(self.tagged)
        if self.tokens[:known] != self.tagged:
            known = 0
        self.tags[known:] = tags_of(self.tokens[known:], self.tags[known - 1] if known else 0)
        self.tagged[known:] = self.tokens[known:]
        return self.tags + tags_of(drafts, self.tags[-1] if self.tags else 0)


class FakeExecutor:
    """Runs steps.

    Args:
        config: The KV cache's groups.
        script: The tokens that the model samples.
        manager: The unit manager, when the config hits at one unit (for its geometry).
    """

    def __init__(self, config: KVCacheConfig, script: Script, manager: Any = None) -> None:
        self.script = script
        self.requests: dict[str, WorkerRequest] = {}
        self.rows = RowMemory(manager) if config.hit_unit is not None else None
        self.pages = PageMemory(config)
        self.num_steps = 0
        self.num_copies = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and return its tokens."""
        self.num_steps += 1
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
            if self.rows is not None:
                self.rows.forget(request_id)
        self._take_messages(output)
        self.num_copies += len(output.kv_cache_block_copies)
        if self.rows is not None:
            self.rows.copy(output.kv_cache_block_copies)
            self.rows.update_windows(output.window_tables)
        else:
            assert not output.kv_cache_block_copies
        scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values())
        assert all(count > 0 for count in scheduled.values())
        named = {data.req_id for data in output.scheduled_new_reqs}
        named |= set(output.scheduled_cached_reqs.req_ids)
        assert named == set(scheduled), "messages and scheduled tokens disagree"
        self._run_rows(output)
        req_ids = list(scheduled)
        tokens = [self._sample(req_id, output) for req_id in req_ids]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=tokens,
        )

    def _take_messages(self, output: SchedulerOutput) -> None:
        for req_id in output.preempted_req_ids or ():
            if req_id in self.requests:
                self.requests[req_id].preempted = True
                if self.rows is not None:
                    self.rows.forget(req_id)
        for data in output.scheduled_new_reqs:
            assert data.prompt_token_ids is not None
            assert data.req_id not in self.requests, f"{data.req_id} is new twice"
            self.requests[data.req_id] = WorkerRequest(
                tokens=list(data.prefill_token_ids or data.prompt_token_ids),
                num_prompt_tokens=len(data.prompt_token_ids),
                tables=[list(ids) for ids in data.block_ids],
                num_computed=data.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self.requests[req_id]
            blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                assert state.preempted, f"{req_id} resumes without a preemption"
                state.preempted = False
                assert blocks is not None
                state.tables = [list(ids) for ids in blocks]
                state.num_computed = cached.num_computed_tokens[index]
                assert cached.all_token_ids[req_id] == state.tokens
            else:
                assert not state.preempted, f"{req_id} goes on after a preemption"
                for table, new in zip(
                    state.tables, blocks or [[]] * len(state.tables), strict=True
                ):
                    table.extend(new)

    def _span(self, req_id: str, output: SchedulerOutput) -> tuple[int, int, list[int]]:
        """Return a request's first and last computed position, and its drafts."""
        state = self.requests[req_id]
        start = state.num_computed
        end = start + output.num_scheduled_tokens[req_id]
        drafts = list(output.scheduled_spec_decode_tokens.get(req_id, ()))
        assert end - len(drafts) <= len(state.tokens), f"{req_id} computes tokens it has not got"
        return start, end, drafts

    def _run_rows(self, output: SchedulerOutput) -> None:
        """Write all rows of the step, then read: a layer does so for the whole batch."""
        spans = []
        for req_id in output.num_scheduled_tokens:
            start, end, drafts = self._span(req_id, output)
            state = self.requests[req_id]
            spans.append((state, state.tag(drafts), start, end))
            if self.rows is not None:
                request: Any = SimpleNamespace(request_id=req_id)
                self.rows.run(request, spans[-1][1], start, end, tuple(state.tables))
        if self.rows is None:
            for state, tags, start, end in spans:
                self.pages.write(state.tables, tags, start, end)
            for state, tags, start, end in spans:
                self.pages.read(state.tables, tags, start, end)

    def _sample(self, req_id: str, output: SchedulerOutput) -> list[int]:
        """Sample where the step reaches the last known token; verify drafts before it."""
        _, end, drafts = self._span(req_id, output)
        state = self.requests[req_id]
        if end - len(drafts) < len(state.tokens):
            state.num_computed = end
            return []
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = self.script(req_id, len(state.tokens) - state.num_prompt_tokens)
            state.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
        state.num_computed = end - len(drafts) + len(sampled) - 1
        return sampled
