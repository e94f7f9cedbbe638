"""The lines of a cache trace.

The first line of a file is a header, an object that people can read. Every other line is an array
that begins with a letter: what the scheduler was told, and what its steps brought, in order. Tokens
and texts are not in it. Prefixes are chained hashes of units, cut to 16 bytes; a line holds only
those behind the last one known already. With a drafter whose rows depend on the next token, that
token at each unit's end is there too, under a number that is drawn anew for every server process.
"""

from typing import Any

import msgspec

FORMAT = "vllm-cache-trace"
VERSION = 4
# Of records without tiers, without steps ahead, and without hits of prompts that are scored; they
# are read as ever.
OLD_VERSIONS = (1, 2, 3)
HASH_BYTES = 16


class Header(msgspec.Struct, kw_only=True):
    """What a file begins with.

    Attributes:
        format: Always ``FORMAT``.
        version: Of the form; another one is refused.
        server: Version of the server.
        hf_config: The model's config.json, as far as the cache depends on it.
        cache: Block size, blocks, bytes of one, interval, pins, dtypes, whether caching is on.
        scheduler: Fields of the scheduler's configuration.
        speculative: Fields of the drafter's configuration; None: no drafter.
        environment: Variables that the cache reads.
        groups: (block size, page bytes) by group, to check that the cache was rebuilt.
        hash_unit: Tokens under one hash.
        max_model_len: Longest request.
        tier: Settings of the tiers behind the pool ("extra": the connector's, without the folder's
            name) and "unix_s", when the record began; None: there are none.
        parallel: Fields of the parallel configuration that decide about sizes.
        images: How pictures are shown: "tokens" of the largest, whether a step holds all of one
            ("are_whole"), "row_bytes" of what a tower makes, whether it runs "beside" the steps;
            None: none are.
        part: Number of the file, from 0; a part above 0 goes on where the one before was full.
    """

    format: str
    version: int
    server: str
    hf_config: dict[str, Any]
    cache: dict[str, Any]
    scheduler: dict[str, Any]
    speculative: dict[str, Any] | None
    environment: dict[str, str]
    groups: list[tuple[int, int]]
    hash_unit: int
    max_model_len: int
    part: int = 0
    tier: dict[str, Any] | None = None
    parallel: dict[str, int] = msgspec.field(default_factory=dict)
    images: dict[str, int] | None = None


class Units(msgspec.Struct, array_like=True):
    """Hashes of consecutive units, and the numbers of the tokens behind them.

    Attributes:
        after: The last hash known already (base64), which says all before it; empty: none.
        num_known: How many units that is.
        hashes: The hashes behind it, joined, in base64.
        next_tokens: Four bytes for each unit of the sequence that a token follows, from the first
            not recorded yet on, in base64; empty without such a drafter.
    """

    after: str
    num_known: int
    hashes: str
    next_tokens: str = ""


class Added(msgspec.Struct, array_like=True, tag="A"):
    """A request was queued.

    Attributes:
        number: Stands for it in other lines.
        request_id: As the engine core knows it.
        time_us: Since the file's first part began.
        num_prompt_tokens: Of its prompt.
        max_tokens: Of its answer at most.
        units: Of its prompt.
        priority: Lower goes first, under that policy.
        skips_cache: Whether every position must be computed, whatever is known.
        is_blocked: Whether it waits for something other than room at first.
        boundaries: Offsets in the prompt that are worth a checkpoint.
        is_extra_answer: Whether it is a further answer to a prompt that another request brought.
        arrival_time: Of the front end, which orders requests of one priority.
        ttls: (offset in the prompt, seconds) of prefixes to hold; infinite ones are null.
        num_scores: Log probabilities that it wants of each prompt position, and which let it hit
            where they are known; None: it wants none.
        skips_insert: Whether it leaves nothing behind; of its units only those of others are told.
        junctions: Offsets in the prompt behind which others are known to go on otherwise.
        session: Number of its session; None: it was not named.
        stays_in_memory: Whether what it leaves goes to no disk.
        is_spare: Whether what it leaves goes before what others left.
        insert_end: Tokens up to which it leaves anything; None: all.
        images: Of each of its pictures the first token, how many tokens it has, and 16 hex digits
            that tell it from others.
    """

    number: int
    request_id: str
    time_us: int
    num_prompt_tokens: int
    max_tokens: int
    units: Units
    priority: int = 0
    skips_cache: bool = False
    is_blocked: bool = False
    boundaries: list[int] = []
    is_extra_answer: bool = False
    arrival_time: float = 0.0
    ttls: list[tuple[int, float | None]] = []
    num_scores: int | None = None
    skips_insert: bool = False
    junctions: list[int] = []
    session: int | None = None
    stays_in_memory: bool = False
    is_spare: bool = False
    insert_end: int | None = None
    images: list[tuple[int, int, str]] = []


class Ending(msgspec.Struct, array_like=True):
    """A request that ended, and the units of its answer.

    Attributes:
        number: The request.
        num_output_tokens: Of its answer.
        units: Behind its prompt's.
    """

    number: int
    num_output_tokens: int
    units: Units


class Told(msgspec.Struct, array_like=True):
    """Where the prompt tokens of a request came from, of runs with tiers.

    Attributes:
        number: The request.
        sources: Hit tokens by source.
        misses: Missed ones by reason.
    """

    number: int
    sources: dict[str, int]
    misses: dict[str, int]


class TierReport(msgspec.Struct, array_like=True):
    """What a step heard of the tiers.

    Attributes:
        received: Ids of requests whose prefixes came.
        failed: Ids of those whose prefixes did not.
        written: (sequence, workers) of objects that were synced.
        unwritten: The same of objects that could not be written.
        unsynced: Of those, sequences after whose failed sync nobody knows what the disk holds.
        corrupt: (whether in host memory, sequence) of objects that were wrong.
        failures: By request id, why its prefix did not come.
        num_failed_reads: Restores that the disk refused.
        read: By tier, bytes and seconds of restores.
    """

    received: list[str] = []
    failed: list[str] = []
    written: list[tuple[int, int]] = []
    unwritten: list[tuple[int, int]] = []
    unsynced: list[int] = []
    corrupt: list[tuple[bool, int]] = []
    failures: dict[str, str] = {}
    num_failed_reads: int = 0
    read: dict[str, tuple[int, float]] = {}


class Begun(msgspec.Struct, array_like=True, tag="B"):
    """A step was scheduled whose results come later; its fields are those of ``Step``."""

    time_us: int
    num_tokens: int
    admitted: list[tuple[int, int]] = []
    unblocked: list[int] = []
    num_preempted: int = 0
    told: list[Told] = []


class Step(msgspec.Struct, array_like=True, tag="S"):
    """One step, and what it brought.

    Attributes:
        time_us: When it was scheduled, since the first part began.
        duration_us: Until its tokens were taken in, from when those of the one before had been.
        num_tokens: That it computed.
        counts: (number, tokens) of requests that did not get as many as is usual: one where all
            known tokens are computed, else none.
        admitted: (number, cached tokens) of requests admitted for the first time.
        ended: Requests that ended by themselves.
        unblocked: Requests that waited for something else until then.
        drafts: (number, drafts) of requests that did not get as many as is usual.
        num_preempted: Requests that lost their blocks.
        arrived_us: When its results came; 0: not recorded.
        report: What it heard of the tiers; None: nothing.
        told: Of requests admitted for the first time, if there are tiers.
        is_begun: Whether it is the first ``Begun`` step whose results have not come; what it was
            scheduled with is there.
        made: Pictures that towers made beside the steps, as in ``Added.images``, or gave up.
    """

    time_us: int
    duration_us: int
    num_tokens: int
    counts: list[tuple[int, int]] = []
    admitted: list[tuple[int, int]] = []
    ended: list[Ending] = []
    unblocked: list[int] = []
    drafts: list[tuple[int, int]] = []
    num_preempted: int = 0
    arrived_us: int = 0
    report: TierReport | None = None
    told: list[Told] = []
    is_begun: bool = False
    made: list[tuple[str, bool]] = []


class Aborted(msgspec.Struct, array_like=True, tag="X"):
    """Requests that were ended from outside."""

    ended: list[Ending]
    time_us: int = 0


class Reset(msgspec.Struct, array_like=True, tag="R"):
    """The prefix cache was to be emptied.

    Attributes:
        resets_running: Whether running requests were set back first.
        done: Whether it was.
        time_us: When.
        resets_tiers: Whether what lies behind the pool was to be forgotten, too.
    """

    resets_running: bool
    done: bool
    time_us: int = 0
    resets_tiers: bool = False


class HeldSeen(msgspec.Struct, array_like=True, tag="H"):
    """Held prefixes were looked at; those whose time was over were let go of.

    Attributes:
        time_us: When.
        forgotten: Id of the one to let go of besides; empty: none.
    """

    time_us: int
    forgotten: str = ""


class SessionEnded(msgspec.Struct, array_like=True, tag="E"):
    """A session was said to be over.

    Attributes:
        time_us: When.
        session: Its number.
    """

    time_us: int
    session: int


class Closed(msgspec.Struct, array_like=True, tag="Z"):
    """The server ended; these requests were alive."""

    alive: list[Ending] = []


class DiskObject(msgspec.Struct, array_like=True):
    """An object of the disk tier.

    Attributes:
        kind: 1: rows, 2: a state.
        key: In base64.
        position: Tokens of the prefix at whose end it stands.
        num_bytes: Its size.
        sequence: Of its write.
        next_token: Number of the token that followed; -1: not known.
    """

    kind: int
    key: str
    position: int = 0
    num_bytes: int = 0
    sequence: int = 0
    next_token: int = -1


class DiskSeen(msgspec.Struct, array_like=True, tag="D"):
    """The disk is otherwise than it was for the last step.

    Attributes:
        time_us: When.
        is_open: Whether its objects can be found.
        is_opening: Whether they may be in a moment.
        is_digesting: Whether that takes long.
        is_writable: Whether more can be written.
        last_sequence: When it was opened: of its writes and uses.
        objects: When it was opened: what could be found.
        small: When it was opened: small files by name, hashes cut as everywhere.
        opened_bytes: When it was opened: bytes of what was there.
        max_bytes: When it was opened: the folder's limit; 0 in older records.
    """

    time_us: int
    is_open: bool
    is_opening: bool
    is_digesting: bool
    is_writable: bool
    last_sequence: int = 0
    objects: list[DiskObject] = []
    small: dict[str, str] = {}
    opened_bytes: int = 0
    max_bytes: int = 0


class DiskChange(msgspec.Struct, array_like=True):
    """What the disk's own thread did to what can be found; see ``StoreChange``."""

    after: int
    kind: str
    object: DiskObject


class DiskChanges(msgspec.Struct, array_like=True, tag="K"):
    """Changes since the last such line; each says itself when it was."""

    changes: list[DiskChange]


Event = (
    Added
    | Begun
    | Step
    | Aborted
    | Reset
    | HeldSeen
    | SessionEnded
    | Closed
    | DiskSeen
    | DiskChanges
)
