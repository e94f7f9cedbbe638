"""From the pieces of an answer to the items of a response, and the events that tell of them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from vllm.entrypoints.openai.errors import HttpError
from vllm.entrypoints.openai.opaque_reasoning import seal_reasoning
from vllm.entrypoints.openai.protocol.responses import ChatTokenLogprob, unix_now
from vllm.entrypoints.openai.responses import events
from vllm.entrypoints.openai.responses.bodies import (
    FunctionCallItem,
    IncompleteDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningTextPart,
    ResponseBody,
    ResponseFailure,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.diagnostics import Diagnosis
from vllm.entrypoints.openai.responses.input_items import new_item_id
from vllm.parser.pieces import (
    ContentText,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    settle_thoughts,
)


class ResponseBuilder:
    """Builds one response; every step returns the events that a stream shows.

    Events hold snapshots: what happens later does not change them.

    Owns: the response, its open item and the numbers of its events.

    Args:
        body: The response before its first token.
        seals_reasoning: Whether reasoning also comes in its opaque form.
        namespaces: Namespace and name of functions that have one, by their names for the model.
        new_id: Makes the ids of items, by type.
    """

    def __init__(
        self,
        body: ResponseBody,
        *,
        seals_reasoning: bool = False,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        new_id: Callable[[str], str] = new_item_id,
    ) -> None:
        self._body = body
        self._seals_reasoning = seals_reasoning
        self._new_id = new_id
        self._namespaces = namespaces
        self._item: OutputItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._num_events = 0

    @property
    def body(self) -> ResponseBody:
        """The response as it is; items that are not complete are not in it."""
        return self._body

    def queue(self) -> list[events.Event]:
        """Tell that a background response was taken and waits."""
        self._body = replace(self._body, status="queued")
        return self._number(
            [
                events.ResponseCreated(response=self._body),
                events.ResponseQueued(response=self._body),
            ]
        )

    def start(self) -> list[events.Event]:
        """Tell that the engine has it."""
        was_queued = self._body.status == "queued"
        self._body = replace(self._body, status="in_progress")
        begun: list[events.Event] = [events.ResponseInProgress(response=self._body)]
        if not was_queued:
            begun.insert(0, events.ResponseCreated(response=self._body))
        return self._number(begun)

    def add(
        self, pieces: Sequence[Piece], logprobs: Sequence[ChatTokenLogprob] = ()
    ) -> list[events.Event]:
        """Take in the next pieces.

        Args:
            pieces: In their order.
            logprobs: Of the tokens behind their content; they go with its first piece.
        """
        out: list[events.Event] = []
        for piece in settle_thoughts(pieces):
            match piece:
                case ReasoningText(text):
                    out += self._add_reasoning(text)
                case ContentText(text):
                    out += self._add_text(text, list(logprobs))
                    logprobs = ()
                case ToolCallStart(_, call_id, name):
                    out += self._close("completed")
                    out += self._open(self._call_item(call_id, name))
                case ToolCallArguments(_, text):
                    out += self._add_arguments(text)
                case ToolCallEnd(_, is_whole):
                    out += self._close("completed" if is_whole else "incomplete")
        return self._number(out)

    def _call_item(self, call_id: str, name: str) -> FunctionCallItem:
        item = FunctionCallItem(self._new_id("function_call"), call_id, name)
        if name in self._namespaces:
            item.namespace, item.name = self._namespaces[name]
        return item

    def finish(
        self,
        finish_reason: str | None,
        usage: ResponseUsage,
        diagnosis: Diagnosis | None = None,
        stop_reason: int | str | None = None,
    ) -> list[events.Event]:
        """End the response as the engine did.

        Args:
            finish_reason: "length", "repetition": it is incomplete; all others: it is complete.
            usage: Of the whole response.
            diagnosis: What its prompt missed in the cache; None: nobody asked.
            stop_reason: What the engine says besides.
        """
        self._body = replace(self._body, prompt_cache_diagnostics=diagnosis)
        is_cut = finish_reason in ("length", "repetition")
        out = self._close("incomplete" if is_cut else "completed")
        if is_cut:
            details = IncompleteDetails()
            if isinstance(stop_reason, str):
                details.stop_reason = stop_reason
            self._body = replace(
                self._body, status="incomplete", incomplete_details=details, usage=usage
            )
            out.append(events.ResponseIncomplete(response=self._body))
        else:
            self._body = replace(
                self._body, status="completed", completed_at=unix_now(), usage=usage
            )
            out.append(events.ResponseCompleted(response=self._body))
        return self._number(out)

    def fail(self, error: HttpError) -> list[events.Event]:
        """End the response with an error, in the API's words for whose it is."""
        out = self._close("incomplete")
        self._body = replace(self._body, status="failed", error=_failure(error))
        return self._number([*out, events.ResponseFailed(response=self._body)])

    def cancel(self) -> list[events.Event]:
        """End the response because its client wants no more of it."""
        out = self._close("incomplete")
        self._body = replace(self._body, status="cancelled")
        # The SDK has no event of its own for this; the response's status tells.
        return self._number([*out, events.ResponseFailed(response=self._body)])

    def _number(self, out: list[events.Event]) -> list[events.Event]:
        for event in out:
            event.sequence_number = self._num_events
            self._num_events += 1
        return out

    @property
    def _index(self) -> int:
        return len(self._body.output)

    def _open(self, item: OutputItem) -> list[events.Event]:
        self._item = item
        self._texts.clear()
        self._logprobs.clear()
        return [events.ItemAdded(output_index=self._index, item=item)]

    def _add_reasoning(self, text: str) -> list[events.Event]:
        out: list[events.Event] = []
        item = self._item
        if not isinstance(item, ReasoningItem):
            out += self._close("completed")
            item = ReasoningItem(self._new_id("reasoning"))
            out += self._open(item)
            part = ReasoningTextPart()
            out.append(events.PartAdded(item_id=item.id, output_index=self._index, part=part))
        self._texts.append(text)
        delta = events.ReasoningDelta(item_id=item.id, output_index=self._index, delta=text)
        return [*out, delta]

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[events.Event]:
        out: list[events.Event] = []
        item = self._item
        if not isinstance(item, MessageItem):
            out += self._close("completed")
            item = MessageItem(self._new_id("message"))
            out += self._open(item)
            part = OutputText()
            out.append(events.PartAdded(item_id=item.id, output_index=self._index, part=part))
        self._texts.append(text)
        self._logprobs += logprobs
        delta = events.TextDelta(
            item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs
        )
        return [*out, delta]

    def _add_arguments(self, text: str) -> list[events.Event]:
        assert self._item is not None, "arguments come between a call's start and its end"
        self._texts.append(text)
        return [events.ArgumentsDelta(item_id=self._item.id, output_index=self._index, delta=text)]

    def _close(self, status: str) -> list[events.Event]:
        """End the open item, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return []
        text = "".join(self._texts)
        item_id, index = item.id, self._index
        out: list[events.Event]
        if isinstance(item, FunctionCallItem):
            item = replace(item, arguments=text, status=status)
            out = [
                events.ArgumentsDone(
                    item_id=item_id, output_index=index, name=item.name, arguments=text
                )
            ]
        elif isinstance(item, ReasoningItem):
            thought = ReasoningTextPart(text)
            sealed = seal_reasoning(text) if self._seals_reasoning else None
            item = replace(item, content=[thought], status=status, encrypted_content=sealed)
            out = [
                events.ReasoningDone(item_id=item_id, output_index=index, text=text),
                events.PartDone(item_id=item_id, output_index=index, part=thought),
            ]
        else:
            logprobs = list(self._logprobs)
            said = OutputText(text, logprobs=logprobs)
            item = replace(item, content=[said], status=status)
            out = [
                events.TextDone(item_id=item_id, output_index=index, text=text, logprobs=logprobs),
                events.PartDone(item_id=item_id, output_index=index, part=said),
            ]
        out.append(events.ItemDone(output_index=index, item=item))
        self._body = replace(self._body, output=[*self._body.output, item])
        return out


def _failure(error: HttpError) -> ResponseFailure:
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return ResponseFailure(error.message, codes.get(error.status, "server_error"), error.param)
