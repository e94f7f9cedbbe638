"""A KV connector that offers as many tokens as its extra config says."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ScriptedConnector(ExampleConnector):
    """Extra config: ``matched`` tokens beyond the local hit (None: not known yet), ``is_async``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.matched: int | None = extra.get("matched", 0)
        self.is_async: bool = extra.get("is_async", False)
        self.keeps_blocks: bool = extra.get("keeps_blocks", False)
        self.allocated: list[tuple[str, int]] = []
        self.finished: list[str] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.matched is None:
            return None, False
        room = max(0, request.num_tokens - num_computed_tokens - (0 if self.is_async else 1))
        return min(self.matched, room), self.is_async and self.matched > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.request_id)
        return self.keeps_blocks, {"blocks": len(block_ids)}


class LoadingConnector(ScriptedConnector):
    """Notes what it was told to load: (tokens, whether beside the steps) by request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loads: dict[str, tuple[int, bool]] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        room = request.num_tokens - num_computed_tokens - 1
        found = min(self.matched or 0, max(0, room))
        return found, self.is_async and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads[request.request_id] = num_external_tokens, self.is_async
