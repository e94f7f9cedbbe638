"""What clients send that is put right for them, counted and said once."""

from prometheus_client import CollectorRegistry, Counter

from vllm.logger import init_logger
from vllm.parser.interface import MalformedCall
from vllm.tokenizers import ChatPrompt

logger = init_logger(__name__)

_MAX_SHOWN_CHARS = 80


class ClientMetrics:
    """Counts diagnoses, joined messages, billing lines left out, and requests that were dropped.

    Owns: its metrics in ``registry``, and what it has said already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._joined = Counter(
            "vllm:joined_messages",
            "Messages of chats that stand in the prompt as a part of another one, because the "
            "chat template would refuse or drop them.",
            registry=registry,
        )
        self._billing_lines = Counter(
            "vllm:billing_lines_left_out",
            "System texts whose billing line, different in each request, was left out.",
            registry=registry,
        )
        self._dropped = Counter(
            "vllm:dropped_requests",
            "Requests whose work was dropped because their client left.",
            registry=registry,
        )
        self._malformed = Counter(
            "vllm:malformed_tool_calls",
            "Calls in answers that could not be read and are told as text.",
            ["parser"],
            registry=registry,
        )
        self._diagnoses = Counter(
            "vllm:cache_diagnoses",
            "Prompts that were compared with an earlier one's, by what was answered.",
            ["api", "answer"],
            registry=registry,
        )
        self._said: set[str] = set()

    def note_prompt(self, prompt: ChatPrompt) -> None:
        """Count what was done to a chat that goes to the engine."""
        if prompt.joined:
            self._joined.inc(sum(len(places) - 1 for places in prompt.joined))
            self._say_once(
                "Messages are joined where the chat template would refuse or drop them: vllm "
                "render shows which, vllm:joined_messages_total counts them."
            )
        if prompt.left_out_billing_line:
            self._billing_lines.inc()
            self._say_once(
                "Claude Code's billing line is left out of system prompts: it changes with each "
                "request, and the prefix cache would find nothing behind it. "
                "--keep-billing-line keeps it."
            )

    def note_malformed_call(self, parser: str, call: MalformedCall) -> None:
        """Count a call that could not be read, and say why."""
        self._malformed.labels(parser).inc()
        logger.warning(
            "A tool call cannot be read by the parser %s and is told as text: %s. It begins %r; "
            "vllm parse shows how an answer is read.",
            parser,
            call.reason,
            call.text[:_MAX_SHOWN_CHARS],
        )

    def note_diagnosis(self, api: str, answer: object) -> None:
        """Count an answer to why a prompt missed."""
        self._diagnoses.labels(api, str(answer)).inc()

    def note_dropped(self) -> None:
        """Count a request whose client left."""
        self._dropped.inc()

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.info(what)
