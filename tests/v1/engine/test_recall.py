"""The embedded model recalls what a document says: through hits, turns, evictions and drafts.

A wrong row in a cache shows as a wrong answer here, and the last tests make sure of it: they spoil
one row of a cache after the document was read, and the answer goes wrong.
"""

import functools
import random
from dataclasses import dataclass

import pytest

from tests.v1.engine.test_cache_keeps_outputs import Session, make_core
from vllm.config import SpeculativeConfig
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.core import EngineCore
from vllm_ascend.platform import ReferencePlatform

pytestmark = pytest.mark.slow

NAMES = [
    "Mira",
    "Tolven",
    "Karesh",
    "Belmar",
    "Zorin",
    "Lunet",
    "Fadir",
    "Pelona",
    "Quista",
    "Ravel",
    "Sodim",
    "Tarek",
    "Ulmar",
    "Vesna",
    "Wilmo",
    "Yarel",
    "Zubin",
    "Arlo",
    "Bexley",
    "Corvin",
    "Dulcie",
    "Emeric",
    "Fintan",
    "Galen",
    "Hesper",
    "Ismay",
    "Jorvik",
    "Kestrel",
    "Lorcan",
    "Marek",
    "Nadir",
    "Odell",
    "Perrin",
    "Quill",
    "Roscoe",
    "Selwyn",
    "Tamsin",
    "Ursel",
    "Vidar",
    "Wendel",
]
FILLER = ("The old lamp is near the door.", "It rained all day.", "The garden is quiet.")


@dataclass(frozen=True)
class Document:
    """A text and the code of each name in it, in the order they are told."""

    text: str
    codes: dict[str, str]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


def document(seed: int, num_facts: int, num_fillers: int = 0) -> Document:
    """Facts first, then sentences that say nothing."""
    rng = random.Random(seed)
    codes = {name: f"{rng.randrange(10_000):04d}" for name in rng.sample(NAMES, num_facts)}
    told = [f"The access code of {name} is {code}." for name, code in codes.items()]
    return Document(" ".join([*told, *(rng.choice(FILLER) for _ in range(num_fillers))]), codes)


def question(name: str) -> str:
    return f"What is the access code of {name}?"


def prompt_of(doc: Document, name: str) -> list[int]:
    text = f"<｜begin▁of▁sentence｜><｜User｜>{doc.text} {question(name)}<｜Assistant｜></think>"
    return tokenizer().encode(text, add_special_tokens=False)


def next_turn(before: list[int], answer: list[int], name: str) -> list[int]:
    end = answer.index(1) + 1 if 1 in answer else len(answer)
    turn = f"<｜User｜>{question(name)}<｜Assistant｜></think>"
    return [*before, *answer[:end], *tokenizer().encode(turn, add_special_tokens=False)]


def says(session: Session, request_id: str, code: str) -> bool:
    text = tokenizer().decode(session.answers[request_id].tokens)
    return f" {code}." in text


def ask_all(core: EngineCore, doc: Document) -> tuple[float, int]:
    """Ask for some ten names, one by one: the share of right answers, cached tokens each."""
    session, right, cached = Session(core), 0, 0
    asked = list(doc.codes.items())[:: max(1, len(doc.codes) // 10)]
    for name, code in asked:
        request_id = session.add(prompt_of(doc, name), 14)
        session.run()
        right += says(session, request_id, code)
        stats = session.answers[request_id].stats
        assert stats is not None
        cached += stats.num_cached_tokens
    return right / len(asked), cached // len(asked)


def test_recall_in_reference_mode() -> None:
    core = make_core(32, num_blocks=2000, budget=2048, max_len=2048, platform=ReferencePlatform())
    right, cached = ask_all(core, document(2, *RANGES["indexer"]))
    assert cached > 0
    assert right >= 0.9


# Where the facts lie before the question: in the window, beyond it, far beyond.
RANGES = {"window": (5, 2), "c4": (20, 15), "indexer": (30, 90)}


@pytest.mark.parametrize(
    ("name", "unit"), [("window", 32), ("c4", 32), ("indexer", 32), ("indexer", 128)]
)
def test_recall_through_hits(name: str, unit: int) -> None:
    doc = document(2, *RANGES[name])
    core = make_core(unit, num_blocks=2000, budget=2048, max_len=2048)
    right, cached = ask_all(core, doc)
    num_tokens = len(prompt_of(doc, next(iter(doc.codes))))
    if num_tokens > 2 * unit:
        assert cached > 0.8 * (num_tokens - 2 * unit - 20)
    assert right >= 0.9


def test_recall_in_next_turns_and_with_evictions_and_preemptions() -> None:
    core = make_core(32, num_blocks=420, budget=256, max_len=1024)
    session, wanted = Session(core), {}
    docs = [document(seed, 20, 10) for seed in range(2, 5)]
    histories: list[list[int]] = []
    for doc in docs:
        first, second = list(doc.codes)[:2]
        prompt = prompt_of(doc, first)
        request_id = session.add(prompt, 14)
        wanted[request_id] = doc.codes[first]
        session.run()
        histories.append(next_turn(prompt, session.answers[request_id].tokens, second))
    for i in range(2, 5):
        asked = []
        for doc, history in zip(docs, histories, strict=True):
            request_id = session.add(history, 14)
            wanted[request_id] = doc.codes[list(doc.codes)[i - 1]]
            asked.append(request_id)
        session.run()
        histories = [
            next_turn(history, session.answers[request_id].tokens, list(doc.codes)[i])
            for doc, history, request_id in zip(docs, histories, asked, strict=True)
        ]
    right = sum(says(session, request_id, code) for request_id, code in wanted.items())
    assert right >= 0.9 * len(wanted)


def test_recall_with_drafts() -> None:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    core = make_core(32, num_blocks=2000, budget=2048, max_len=2048, speculative=speculative)
    right, cached = ask_all(core, document(6, 20, 15))
    assert cached > 0
    assert right >= 0.9


def spoil(core: EngineCore, caches: tuple[str, ...], positions: tuple[int, ...]) -> None:
    """Turn the rows of some tokens around, in the running request's blocks of some caches.

    Args:
        core: Runs one request.
        caches: Names of caches, or their ends.
        positions: Of the tokens.

    Mutates:
        The caches' pages.
    """
    scheduler = core.scheduler
    (request_id,) = scheduler.requests
    runner = core.executor._worker._runner
    tables, pages = runner._states.get(request_id).tables.views, runner._pool.layers
    spoilt = 0
    for table, group in zip(tables, scheduler.kv_cache_config.kv_cache_groups, strict=True):
        for name in group.layer_names:
            if not name.endswith(caches):
                continue
            rows = pages[name].shape[1]
            ratio = group.kv_cache_spec.block_size // rows
            for row in {position // ratio for position in positions}:
                block, offset = divmod(row, rows)
                pages[name][int(table.block_ids[block - table.base]), offset] *= -1
                spoilt += 1
    assert spoilt


def last_positions(prompt: list[int], word: str) -> tuple[int, ...]:
    """Where the tokens of a word stand that follows a space, the last time it is said."""
    ids = tokenizer().encode(f" {word}", add_special_tokens=False)
    at = max(i for i in range(len(prompt)) if prompt[i : i + len(ids)] == ids)
    return tuple(range(at, at + len(ids)))


C4_ENTRIES = ("layers.2.attn.mla", "layers.4.attn.mla")


@pytest.mark.parametrize(
    ("caches", "place", "fact"),
    [
        ((".window",), "window", 1),
        (C4_ENTRIES, "c4", 3),
        ((".indexer",), "indexer", 3),
    ],
    ids=["window", "entries", "index keys"],
)
def test_a_spoilt_row_is_heard(caches: tuple[str, ...], place: str, fact: int) -> None:
    doc = document(2, *RANGES[place])
    name, code = list(doc.codes.items())[fact]
    prompt = prompt_of(doc, name)
    heard = []
    for spoils in (False, True):
        core = make_core(32, num_blocks=2000, budget=2048, max_len=2048)
        session = Session(core)
        request_id = session.add(prompt, 14)
        session.step()
        if spoils:
            if place == "window":
                # What the document says is in entries too; what is asked is read from the window.
                spoil(core, caches, last_positions(prompt, name))
            else:
                at = last_positions(prompt, code)
                # An entry also holds the four tokens before its own: the next one has the code too.
                spoil(core, caches, tuple(range(at[0], at[1] + 5)))
        session.run()
        heard.append(says(session, request_id, code))
    assert heard == [True, False]


@pytest.mark.parametrize(
    "cache", ["layers.3.attn.mla", "layers.2.attn.state", "layers.4.attn.state"]
)
def test_other_rows_change_what_is_computed(cache: str) -> None:
    doc = document(2, *RANGES["c4"])
    prompt = prompt_of(doc, next(iter(doc.codes)))
    margins = []
    for spoils in (False, True):
        core = make_core(32, num_blocks=2000, budget=2048, max_len=2048)
        session = Session(core)
        request_id = session.add(prompt, 14)
        session.step()
        if spoils:
            last = len(prompt) - 1
            position = last - 128 if cache.endswith("mla") else last
            spoil(core, (cache,), (position,))
        session.run()
        margins.append(session.answers[request_id].margins)
    assert margins[0] != margins[1]
