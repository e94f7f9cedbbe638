"""What a client may say of a request, beside its prompt and its sampling parameters.

    body of the API --same name--> RequestOptions --whole--> engine --whole--> Request in the core

To add an option: a field of the API's body (``protocol/requests.py``), a field of the same name
here, with what it means and what is refused, and its use: ``request.options.<name>``. Whatever lies
between hands options on whole.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Self

import msgspec

from vllm.exceptions import UserInputError
from vllm.inputs import MAX_CACHE_BOUNDARIES

_MAX_SALT_CHARS = 128
# Characters that keys of external caches (paths, addresses) cannot carry.
_SALT_FORBIDDEN = "@/\\\0"
_IN_MEMORY = "in_memory"
_RETENTIONS = (_IN_MEMORY, "24h")


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wanted of a prompt in place of an answer: vectors, as the output matrix reads them.

    Attributes:
        all_rows: Whether every token's vector is wanted. What the cache holds is of no use then;
            else the last token's is, which is computed in any case.
        logit_ids: Tokens whose logits are wanted in place of the vector; empty: the vector is.
    """

    all_rows: bool = False
    logit_ids: list[int] = []


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one request.

    Attributes:
        priority: Lower runs earlier, with priority scheduling.
        cache_salt: Prefixes are reused only under equal salts.
        cache_boundaries: Offsets in the prompt, in tokens, that are worth a checkpoint.
        cache_junctions: Offsets behind which other requests of the same caller are known to go on
            otherwise: a checkpoint is left there at first sight, however much it weighs.
        cache_ttls: For some boundaries, how many seconds their prefix shall be kept at least.
        trace_headers: Of the caller's trace.
        data_parallel_rank: The engine core that shall run it; None: any.
        prompt_cache_key: What requests share that shall meet on one engine core; None: nothing.
        skip_cache_insert: Whether it reads what is cached and leaves nothing behind.
        cache_insert_end: Tokens up to which it may leave anything; None: all that it computes.
        session_id: The conversation or agent that it is of; None: it does not say.
        prompt_cache_retention: "in_memory": it goes to no disk; "24h", a maximum, or None: it may.
        pooling: What is wanted in place of an answer; None: an answer is.
        is_spare: Whether what it leaves in the cache goes before what others left.
    """

    priority: int = 0
    cache_salt: str | None = None
    cache_boundaries: list[int] = []
    cache_junctions: list[int] = []
    cache_ttls: dict[int, float] = {}
    trace_headers: dict[str, str] | None = None
    data_parallel_rank: int | None = None
    prompt_cache_key: str | None = None
    skip_cache_insert: bool = False
    cache_insert_end: int | None = None
    session_id: str | None = None
    prompt_cache_retention: str | None = None
    pooling: PoolingParams | None = None
    is_spare: bool = False

    def over(self, others: RequestOptions) -> Self:
        """Return these options, with others' where these say nothing."""
        taken = {
            name: getattr(others, name)
            for name in others.__struct_fields__
            if getattr(self, name) == getattr(NO_OPTIONS, name)
        }
        return self.replace(**taken)

    def replace(self, **fields: Any) -> Self:
        """Return these options with other values."""
        return msgspec.structs.replace(self, **fields)

    @property
    def stays_in_memory(self) -> bool:
        """Whether what it leaves may not go to a disk."""
        return self.prompt_cache_retention == _IN_MEMORY

    @property
    def routing_key(self) -> int | None:
        """64 bits of what requests share that shall meet, the same in every process."""
        if self.prompt_cache_key is None:
            return None
        digest = blake2b(self.prompt_cache_key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    # ---- what is refused ---------------------------------------------------------------------

    def check(self, *, has_priorities: bool, num_cores: int = 1) -> None:
        """Refuse what no prompt could have.

        Args:
            has_priorities: Whether the scheduler looks at priorities.
            num_cores: Engine cores of this server.

        Raises:
            UserInputError: An option is wrong; ``param`` names it.
        """
        if self.priority and not has_priorities:
            raise UserInputError(
                f"priority={self.priority} has no effect with the scheduling policy 'fcfs': leave "
                "it out, or start the server with --scheduling-policy priority.",
                "priority",
            )
        if not -(2**31) <= self.priority < 2**31:
            raise UserInputError(
                f"priority={self.priority} must be a signed 32-bit integer.", "priority"
            )
        _check_salt(self.cache_salt)
        if self.prompt_cache_retention not in (None, *_RETENTIONS):
            raise UserInputError(
                f"prompt_cache_retention={self.prompt_cache_retention[:60]!r} is unknown: use "
                f"{' or '.join(_RETENTIONS)}.",
                "prompt_cache_retention",
            )
        check_data_parallel_rank(self.data_parallel_rank, num_cores)

    def check_offsets(self, num_prompt_tokens: int) -> None:
        """Refuse offsets that a prompt does not have.

        Raises:
            UserInputError: There are too many, or one lies outside.
        """
        if self.skip_cache_insert and self.cache_ttls:
            raise UserInputError(
                "skip_cache_insert=true (or Cache-Control: no-store) with a ttl: one "
                "asks to keep nothing, the other to keep a prefix. Leave one of them out.",
                "skip_cache_insert",
            )
        for name in ("cache_boundaries", "cache_junctions"):
            offsets: list[Any] = getattr(self, name)
            if len(offsets) > MAX_CACHE_BOUNDARIES:
                raise UserInputError(
                    f"{name} holds {len(offsets)} offsets: give at most {MAX_CACHE_BOUNDARIES}.",
                    name,
                )
            for offset in offsets:
                if type(offset) is not int or not 0 < offset <= num_prompt_tokens:
                    raise UserInputError(
                        f"{name} holds {offset!r}: give offsets in tokens, from 1 to the prompt's "
                        f"{num_prompt_tokens}.",
                        name,
                    )


def session_number(session_id: str, tenant: str | None, cache_salt: str | None) -> int:
    """Return what stands for a session of a tenant under a salt, the same in every process."""
    named = msgspec.json.encode((session_id, tenant, cache_salt))
    return int.from_bytes(blake2b(named, digest_size=6).digest(), "little")


# Options do not change: one object serves all requests without.
NO_OPTIONS = RequestOptions()


def _check_salt(salt: Any) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 1 <= len(salt) <= _MAX_SALT_CHARS:
        raise UserInputError(
            f"cache_salt must be a text of 1 to {_MAX_SALT_CHARS} characters.", "cache_salt"
        )
    if any(char in _SALT_FORBIDDEN for char in salt):
        raise UserInputError("cache_salt must not contain '@', '/', '\\' or NUL.", "cache_salt")


def check_data_parallel_rank(rank: int | None, num_cores: int) -> None:
    """Refuse an engine core that there is not.

    Raises:
        UserInputError: The rank is out of range.
    """
    if rank is not None and not 0 <= rank < num_cores:
        raise UserInputError(
            f"X-data-parallel-rank: {rank} is out of range: this server has engine cores 0 to "
            f"{num_cores - 1}.",
            "X-data-parallel-rank",
        )
