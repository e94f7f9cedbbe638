"""What ``kv_transfer_params`` of a request say, and what the prefilling engine answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from vllm.exceptions import UserInputError
from vllm.multimodal.inputs import MultiModalFeatureSpec

_FIELD = "kv_transfer_params"
_MAX_TOKENS = 2**40
_MAX_TEXT_CHARS = 256


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """A prefix that another engine holds for a request.

    Attributes:
        engine_id: The other engine.
        instance: Its run: another one knows nothing of the prefix.
        host: Where it answers.
        port: Where the first of its workers answers.
        lease: What it calls the prefix.
        num_tokens: Tokens of the prefix.
        digest: Of these tokens and what else must be equal; see ``digest_prompt``.
        next_token: The token its drafter saw behind the prefix; None: none, or not known.
    """

    engine_id: str
    instance: str
    host: str
    port: int
    lease: str
    num_tokens: int
    digest: str
    next_token: int | None = None

    def at_rank(self, rank: int) -> RemotePrefix:
        """Return the part of it that one of the engine's workers holds."""
        return replace(self, port=self.port + rank)

    def to_params(self, block_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return what the client hands on to the decoding engine.

        Args:
            block_ids: By group; for people and proxies who look at them, no engine does.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_instance": self.instance,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_request_id": self.lease,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_num_tokens": self.num_tokens,
            "remote_prompt_digest": self.digest,
            "remote_next_token": self.next_token,
        }


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What a request asks of its transfer.

    Attributes:
        gives: Whether its prompt's KV shall be held for another engine.
        takes: The prefix to load; None: there is none.
    """

    gives: bool = False
    takes: RemotePrefix | None = None


NO_WISH = TransferRequest()
# What a prefilling engine answers that has nothing to give: the other one computes all.
NOTHING_HELD = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}


def parse_params(params: Mapping[str, Any] | None) -> TransferRequest:
    """Read a request's ``kv_transfer_params``; fields nobody knows are left alone.

    Raises:
        UserInputError: A field is missing or of the wrong type.
    """
    if not params:
        return NO_WISH
    gives = _read(params, "do_remote_decode", bool, False)
    takes = _read(params, "do_remote_prefill", bool, False)
    if gives and takes:
        raise UserInputError(
            f"{_FIELD} sets both do_remote_decode and do_remote_prefill: set one of them.", _FIELD
        )
    if not takes:
        return TransferRequest(gives)
    prefix = RemotePrefix(
        engine_id=_read(params, "remote_engine_id", str),
        instance=_read(params, "remote_instance", str),
        host=_read(params, "remote_host", str),
        port=_read(params, "remote_port", int),
        lease=_read(params, "remote_request_id", str),
        num_tokens=_read(params, "remote_num_tokens", int),
        digest=_read(params, "remote_prompt_digest", str),
        next_token=None
        if params.get("remote_next_token") is None
        else _read(params, "remote_next_token", int),
    )
    _check(prefix)
    return TransferRequest(takes=prefix)


def _read(params: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = params.get(name, default)
    # Not isinstance: true is no number.
    if type(value) is not kind:
        raise UserInputError(
            f"{_FIELD}.{name} is {str(value)[:60]!r}, not of type {kind.__name__}: hand on what "
            "the prefilling server answered, unchanged.",
            _FIELD,
        )
    return value


def _check(prefix: RemotePrefix) -> None:
    texts = {k: v for k, v in asdict(prefix).items() if isinstance(v, str)}
    for name, text in texts.items():
        if not 0 < len(text) <= _MAX_TEXT_CHARS or not text.isprintable():
            raise UserInputError(
                f"{_FIELD}: {name} must have 1 to {_MAX_TEXT_CHARS} printable characters.", _FIELD
            )
    if not 1 <= prefix.port <= 65535:
        raise UserInputError(f"{_FIELD}.remote_port={prefix.port} is no port: 1 to 65535.", _FIELD)
    if not 0 < prefix.num_tokens <= _MAX_TOKENS:
        raise UserInputError(
            f"{_FIELD}.remote_num_tokens={prefix.num_tokens} must be above 0.", _FIELD
        )


def digest_prompt(
    token_ids: Sequence[int],
    cache_salt: str | None,
    mm_features: Sequence[MultiModalFeatureSpec] = (),
) -> str:
    """Return a digest of a prefix: two requests with the same one may share its rows.

    Args:
        token_ids: Of the prefix.
        cache_salt: Of the request.
        mm_features: Of the request; those that begin in the prefix count, each as a whole.
    """
    digest = sha256(repr(cache_salt).encode())
    digest.update(array("q", token_ids).tobytes())
    for feature in mm_features:
        if feature.mm_position.offset < len(token_ids):
            # Two pictures of one size have equal tokens.
            place = feature.mm_position
            digest.update(repr((feature.identifier, place.offset, place.length)).encode())
    return digest.hexdigest()
