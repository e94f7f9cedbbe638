import time
import uuid
from dataclasses import replace

import msgspec
import pytest
import zmq

from tests.ports import free_ports
from tests.v1.engine.fakes import FakeExecutor, build_fake_core, scripted_token
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm.exceptions import CheckpointError, ConfigError, InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore


def request(request_id="r", prompt=(1, 2, 3), **params) -> EngineCoreRequest:
    params.setdefault("max_tokens", 4)
    return EngineCoreRequest(request_id, list(prompt), SamplingParams(**params), arrival_time=0.0)


def add(core: EngineCore, *requests: EngineCoreRequest) -> None:
    for r in requests:
        core.add_request(core.make_request(r))


def run(core: EngineCore, max_steps: int = 100):
    """Step until nothing is left; return tokens and finish reason by request."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for _ in range(max_steps):
        if not core.has_work():
            return tokens, reasons
        outputs, _ = core.step()
        for output in (o for client in outputs.values() for o in client.outputs):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    raise AssertionError("the core never becomes idle")


def test_a_request_runs_to_its_length(config):
    core = build_fake_core(config())
    add(core, request())
    vocab = core.executor._vocab_size
    expected = [scripted_token([1, 2, 3], i, None, vocab) for i in range(4)]
    assert run(core) == ({"r": expected}, {"r": FinishReason.LENGTH})


def test_workers_hear_of_a_finished_request_in_a_step_without_tokens(config):
    core = build_fake_core(config())
    add(core, request())
    run(core)
    assert core.executor.finished == ["r"]
    assert not core.has_work()
    assert core.step() == ({}, False)


def test_a_core_that_failed_waits_for_no_transfer(config):
    raw = {"kv_connector": "TcpConnector", "kv_role": "kv_producer", "kv_port": free_ports()}
    transfer = KVTransferConfig.from_dict(raw)
    core = build_fake_core(replace(config(crash_at=2), kv_transfer_config=transfer))
    wish = {"kv_transfer_params": {"do_remote_decode": True}}
    add(core, request(prompt=[5] * 40, max_tokens=1, extra_args=wish))
    core.step()
    assert core.scheduler.connector.hooks.has_pending_work()
    with pytest.raises(RuntimeError):
        core.step()
    # A further step would raise once more, and the executor would never be shut down.
    core.executor._prompts["r"] = []
    core.shutdown()
    assert core.executor.num_steps == 2
    assert core.executor._prompts == {}


def test_prompts_longer_than_a_step_are_chunked(config):
    core = build_fake_core(config(max_num_batched_tokens=32))
    prompt = list(range(100))
    add(core, request(prompt=prompt, max_tokens=1))
    assert run(core)[0]["r"] == [scripted_token(prompt, 0, None, core.executor._vocab_size)]
    # Four chunks, and the step that tells the worker of the end.
    assert core.executor.num_steps == 5


def test_an_abort_frees_the_blocks_at_once(config):
    core = build_fake_core(config())
    add(core, request(max_tokens=100), request("other", prompt=(9, 9), max_tokens=2))
    core.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    core.abort_requests(["r", "unknown"])
    assert pool.get_num_free_blocks() > before
    tokens, _ = run(core)
    assert list(tokens) == ["other"]
    assert "r" in core.executor.finished


def test_a_resend_is_served_from_the_cache_and_a_reset_forgets_it(config):
    core = build_fake_core(config())
    prompt = [5] * 40

    def cached() -> int:
        add(core, request(prompt=prompt))
        outputs, _ = core.step()
        (output,) = outputs[0].outputs
        run(core)
        assert output.prefill_stats is not None
        return output.prefill_stats.num_cached_tokens

    assert [cached(), cached()] == [0, 32]
    assert core.reset_prefix_cache()
    assert cached() == 0


def test_a_reset_of_an_idle_core_is_published_at_once(config):
    endpoint = f"inproc://{uuid.uuid4()}"
    events = KVEventsConfig(True, endpoint=endpoint)
    core = build_fake_core(replace(config(), kv_events_config=events))
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(endpoint)
        time.sleep(0.03)  # a publisher looks for new subscriptions every few milliseconds
        add(core, request(prompt=[5] * 40))
        run(core)
        assert core.reset_prefix_cache()
        core.scheduler.shutdown()  # sends what is queued
        batches = []
        while not batches or batches[-1].events != [AllBlocksCleared()]:
            payload = socket.recv_multipart()[2]
            batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))
    assert isinstance(batches[0].events[0], BlockStored)


def test_a_taken_events_address_is_an_error_before_the_model_loads(config):
    taken = KVEventsConfig(True, endpoint=f"inproc://{uuid.uuid4()}")
    first = build_fake_core(replace(config(), kv_events_config=taken))
    with pytest.raises(ConfigError, match="cannot be opened"):
        EngineCore(replace(config(), kv_events_config=taken), pytest.fail)
    first.shutdown()


def test_a_core_that_cannot_start_leaves_its_events_address_free(config):
    events = replace(config(), kv_events_config=KVEventsConfig(True, endpoint="inproc://again"))

    def fail(_config):
        raise CheckpointError("no weights")

    for _ in range(2):
        with pytest.raises(CheckpointError):
            EngineCore(events, fail)


def test_the_description_of_the_kv_cache(config):
    vllm_config = config(num_blocks=33)
    core = build_fake_core(vllm_config)
    info = core.get_kv_cache_info()
    assert vllm_config.cache_config.num_gpu_blocks == info.num_blocks == 33
    assert (info.block_size, info.unit, info.smallest_reusable_prefix) == (16, 16, 16)
    assert info.max_model_len == 256
    assert info.max_concurrency == pytest.approx(33 * 16 / 256, rel=0.1)
    assert info.capacity_tokens == int(info.max_concurrency * 256)
    assert info.capacity_bytes == 33 * info.groups[0].page_size_bytes
    assert [(g.block_size, g.num_layers, g.sliding_window) for g in info.groups] == [(16, 1, None)]


def test_invariants_are_checked_after_every_step(config):
    core = build_fake_core(config())
    checks = []

    def check(num_computed=None):
        if num_computed is not None:
            return  # the scheduler's own
        checks.append(core.executor.num_steps)
        if len(checks) == 3:
            raise InvariantError("I1: blocks do not add up")

    core.scheduler.kv_cache_manager.check_invariants = check
    add(core, request())
    with pytest.raises(InvariantError, match="I1"):
        run(core)
    assert checks == [1, 2, 3]


def test_invariants_are_not_checked_unless_asked(config, monkeypatch):
    monkeypatch.delenv("VLLM_CHECK_INVARIANTS")
    core = build_fake_core(config())
    checks = []
    core.scheduler.kv_cache_manager.check_invariants = lambda *_: checks.append(1)
    add(core, request())
    run(core)
    assert checks == []


def test_the_state_at_death_names_a_broken_invariant(config):
    core = build_fake_core(config())
    add(core, request(max_tokens=9), request("b"))
    core.step()
    assert core.describe_state().startswith("2 requests ran, 0 waited, KV cache usage 3.")

    def check(num_computed=None):
        raise InvariantError("I1: blocks do not add up")

    core.scheduler.kv_cache_manager.check_invariants = check
    assert core.describe_state().endswith("broken invariant: I1: blocks do not add up")


def test_too_little_memory_is_a_config_error_that_releases_the_device(config, monkeypatch):
    released = []
    monkeypatch.setattr(FakeExecutor, "shutdown", lambda self: released.append(self))
    with pytest.raises(ConfigError, match="max seq len"):
        build_fake_core(config(num_blocks=3))
    assert len(released) == 1


def test_start_errors_pass_through(config):
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        build_fake_core(config(start_error="checkpoint"))


def test_the_log_says_what_was_started(config, caplog):
    caplog.set_level("INFO", logger="vllm")
    vllm_config = config()
    vllm_config.model_config.is_embedded = True
    build_fake_core(vllm_config)
    text = caplog.text
    for part in (
        "small checkpoint embedded in the package",
        "KV cache size:",
        "bytes a token in rows of ",
        "Maximum concurrency for 256 tokens per request:",
        "Smallest reusable prefix: 16 tokens",
        "max_num_seqs=8",
    ):
        assert part in text
