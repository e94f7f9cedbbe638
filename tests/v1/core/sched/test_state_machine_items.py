"""Random traffic of prompts with pictures: all end, no row is another picture's, rooms add up.

The worker makes pictures beside the steps, some later than others. Checked after every step: a
unit is found by the pictures it holds parts of (I8), no step ends inside one that stays whole
(I9), and no output in use is given up (I10).
"""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from tests.v1.core.sched.builders import make_request
from tests.v1.core.sched.fake_executor import FakeExecutor
from tests.v1.core.sched.test_state_machine import (
    ALPHABET,
    MAX_MODEL_LEN,
    SpeculativeTraffic,
    Traffic,
    UnitTraffic,
    run_traffic,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.tower_orders import TowerOrders
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

LONGEST = 30


class SeeingExecutor(FakeExecutor):
    """Makes pictures a step later, or when it likes; a row knows the picture it was made of."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.features: dict[str, list[MultiModalFeatureSpec]] = {}
        self.plain: dict[str, list[int]] = {}
        self.making: list[str] = []

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        given_up = [key for key in output.dropped_orders if key in self.making]
        done = self.making[: 1 + self.num_steps % 2]
        self.making = [key for key in self.making if key not in (*done, *given_up)]
        self.making += [order.key for order in output.tower_orders]
        result = super().execute(output)
        left = [(key, False) for key in given_up if key not in done]
        result.made_pictures = [*((key, True) for key in done), *left]
        return result

    def _take_messages(self, output: SchedulerOutput) -> None:
        for data in output.scheduled_new_reqs:
            self.features[data.req_id] = data.mm_features
            self.plain[data.req_id] = list(data.prompt_token_ids or ())
        for name, worker in self.requests.items():
            worker.tokens[: worker.num_prompt_tokens] = self.plain[name]
        super()._take_messages(output)
        for name, worker in self.requests.items():
            for feature in self.features[name]:
                place = feature.mm_position
                seen = [1000 + int(feature.identifier)] * place.length
                worker.tokens[place.offset : place.offset + place.length] = seen


class SeeingTraffic(Traffic):
    """Prompts of few tokens and few pictures, which share beginnings of both."""

    @initialize(data=st.data())
    def build(self, data: Any) -> None:
        super().build(data)
        limits = self.scheduler.limits
        others = (limits.max_num_seqs - 1) * (1 + limits.num_spec_tokens)
        self.longest = min(LONGEST, limits.max_num_tokens - others)
        self.is_whole = data.draw(st.booleans()) and self.longest > 0
        self.longest = max(1, self.longest)
        room = max(self.longest, data.draw(st.sampled_from((1, 40, 100))))
        self.scheduler._encoder = EncoderPlanner(
            EncoderCacheManager(room, Request.encoder_key),
            disable_chunked_mm_input=self.is_whole,
            compute_budget=room,
            orders=TowerOrders(),
        )
        old = self.executor
        self.executor = SeeingExecutor.__new__(SeeingExecutor)
        self.executor.__dict__ |= {**old.__dict__, "features": {}, "plain": {}, "making": []}

    @rule(
        length=st.integers(1, MAX_MODEL_LEN - 2),
        first=st.integers(0, ALPHABET - 1),
        pictures=st.lists(st.tuples(st.integers(0, 40), st.integers(1, LONGEST)), max_size=3),
        names=st.integers(0, 7),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
    )
    def add_seeing(
        self,
        length: int,
        first: int,
        pictures: list[tuple[int, int]],
        names: int,
        max_tokens: int,
        priority: int,
    ) -> None:
        features, at = [], 0
        for index, (gap, size) in enumerate(pictures):
            begin, end = at + gap, at + gap + min(size, self.longest)
            if end >= length:
                break
            data = MultiModalKwargsItem({"pixels": None})
            name = str(names >> index & 1)
            place = PlaceholderRange(begin, end - begin)
            features.append(MultiModalFeatureSpec(data, "image", f"{name}{end - begin}", place))
            at = end
        request_id = f"r{len(self.requests)}"
        request = make_request(
            request_id,
            [first] * length,
            max_tokens,
            block_size=self.unit,
            priority=priority,
            mm_features=features,
        )
        self.requests[request_id] = request
        self.delivered[request_id] = []
        self.scheduler.add_request(request)

    def check(self) -> None:
        super().check()
        encoder = self.scheduler._encoder
        assert encoder.cache.find_faults() == []
        assert set(encoder.orders._open) >= set(self.executor.making)
        for request in self.scheduler.running:
            end = request.num_computed_tokens
            for feature in request.mm_features if self.is_whole else ():
                place = feature.mm_position
                assert not place.offset < end < place.offset + place.length, "(I9)"


class SeeingUnitTraffic(SeeingTraffic):
    """With hits at one unit."""

    unit = UnitTraffic.unit
    kinds = UnitTraffic.kinds


class SeeingSpeculativeTraffic(SeeingTraffic):
    """With drafts."""

    drafts = SpeculativeTraffic.drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "examples"),
    [(SeeingTraffic, 12), (SeeingUnitTraffic, 4), (SeeingSpeculativeTraffic, 8)],
)
def test_traffic(machine: type[SeeingTraffic], examples: int) -> None:
    run_traffic(machine, examples)
