"""How a server is run: sockets, TLS, logs, limits, and what its metrics show."""

import json
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.e2e.collector import Collector
from tests.e2e.server_process import NO_TLS, ServerProcess

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "The garden is quiet. " * 20, "max_tokens": 3, "temperature": 0}
KEY = {"Authorization": "Bearer secret"}

# What panels of dashboards ask for, as type: {metrics}; histograms with all their series.
DASHBOARDS = {
    "gauge": """num_requests_running num_requests_waiting num_requests_waiting_by_reason
        kv_cache_usage_perc cache_config_info engine_sleep_state gpu_cache_usage_perc""",
    "counter": """prefix_cache_queries prefix_cache_hits external_prefix_cache_queries
        external_prefix_cache_hits prompt_tokens generation_tokens prompt_tokens_by_source
        prompt_tokens_cached prompt_tokens_cached_by_source request_success num_preemptions
        admission_rejections mm_cache_queries mm_cache_hits spec_decode_num_drafts
        spec_decode_num_draft_tokens spec_decode_num_accepted_tokens gpu_prefix_cache_queries
        gpu_prefix_cache_hits""",
    "histogram": """time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
        request_inference_time_seconds request_prompt_tokens request_generation_tokens
        request_max_num_generation_tokens request_params_n request_params_max_tokens
        iteration_tokens_total request_prefill_kv_computed_tokens request_num_preemptions
        kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds
        time_per_output_token_seconds""",
}
# Nothing is evicted, drafted, or loaded by a connector here: these may be empty.
QUIET = {"kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"}
QUIET |= {"kv_block_reuse_gap_seconds"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where spans go."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def operated(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[ServerProcess]:
    """A server with all of it but TLS."""
    flags = ["--root-path", "/llm", "--log-format", "json", "--api-key", "secret"]
    flags += ["--guard-metrics", "--disable-access-log-for-endpoints", "/health,/ready"]
    flags += ["--kv-cache-metrics", "--kv-cache-metrics-sample", "1"]
    flags += ["--show-hidden-metrics-for-version", "0.1", "--enable-log-requests"]
    flags += ["--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--async-scheduling"]
    flags += ["--calculate-kv-scales"]
    flags += ["--admin-api-key", "root", "--enable-per-request-metrics"]
    log = tmp_path_factory.mktemp("operated") / "log.txt"
    flags += ["--otlp-traces-endpoint", collector.endpoint]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    with ServerProcess(log, *flags, environment=environment) as server:
        yield server


def _scrape(server: ServerProcess) -> str:
    url = server.url + "/llm/metrics"
    response = httpx.get(url, headers=KEY, timeout=60, verify=NO_TLS)
    assert response.status_code == 200
    return response.text


def _value(text: str, series: str) -> float:
    found = [line for line in text.splitlines() if line.startswith(series)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_no_panel_is_empty(operated: ServerProcess) -> None:
    for _ in range(2):
        assert operated.post("/llm" + COMPLETIONS, SHORT, headers=KEY).status_code == 200
    text = _scrape(operated)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    for kind, names in DASHBOARDS.items():
        for name in names.split():
            full = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
            assert kinds.get(full) == kind, full
            series = f"{full}_count" if kind == "histogram" else full
            labels = [line for line in text.splitlines() if line.startswith(series + "{")]
            assert labels, series
            assert all('engine="0"' in x and 'model_name="deepseek-v4"' in x for x in labels)
            if kind == "histogram" and name not in QUIET:
                assert _value(text, series) > 0, series
    for name in ("prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"):
        assert _value(text, f"vllm:{name}_total") > 0, name
    for kind in ("http_requests_total", "http_request_duration_seconds_count"):
        assert _value(text, kind + '{handler="/v1/completions"') >= 2
    assert "process_resident_memory_bytes" in text


def test_sources_and_reasons_have_their_labels(operated: ServerProcess) -> None:
    text = _scrape(operated)
    for name, label, values in (
        ("prompt_tokens_by_source_total", "source", "local_compute local_cache_hit"),
        ("prompt_tokens_cached_by_source_total", "source", "device host p2p disk"),
        ("request_success_total", "finished_reason", "stop length abort error repetition"),
        ("num_requests_waiting_by_reason", "reason", "capacity deferred"),
        ("admission_rejections_total", "reason", "max_num_queued_reqs"),
    ):
        for value in values.split():
            assert re.search(rf'^vllm:{name}{{.*{label}="{value}".*}}', text, re.MULTILINE), value


def test_keys_guard_metrics_too_and_the_root_path_may_be_stripped(operated: ServerProcess) -> None:
    assert operated.get("/metrics").status_code == 401
    assert operated.get("/llm/metrics").status_code == 401
    for path in ("/v1/models", "/llm/v1/models"):
        assert httpx.get(operated.url + path, headers=KEY, timeout=60).status_code == 200


def test_the_operator_has_a_key_and_routes(operated: ServerProcess) -> None:
    answer = operated.post("/reset_prefix_cache", None, headers={"x-api-key": "root"})
    assert answer.json() == {"success": True}
    assert operated.post("/llm/reset_prefix_cache", None, headers=KEY).status_code == 403
    assert '"root"' not in operated.log


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_tells_its_times(operated: ServerProcess, path: str, streams: bool) -> None:
    body = {**SHORT, "messages": [{"role": "user", "content": "x"}], "stream": streams}
    response = operated.post("/llm" + path, body, headers=KEY)
    if streams:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        told = [json.loads(event).get("metrics") for event in events]
        assert told[:-1] == [None] * (len(told) - 1)
        metrics = told[-1]
    else:
        metrics = response.json()["metrics"]
        assert metrics["num_generation_tokens"] == response.json()["usage"]["completion_tokens"]
    first, others = metrics["time_to_first_token_ms"], ("queue_time_ms", "prefill_time_ms")
    assert 0 < sum(metrics[name] for name in others) <= first + 1
    assert metrics["decode_time_ms"] >= metrics["mean_itl_ms"] > 0


def test_every_line_is_json_and_names_its_request(operated: ServerProcess) -> None:
    headers = {**KEY, "X-Request-Id": "trace-me"}
    response = operated.post("/llm" + COMPLETIONS, SHORT, headers=headers)
    assert response.headers["x-request-id"] == "trace-me"
    _wait_for(lambda: '" 200' in operated.log)
    records = [json.loads(line) for line in operated.log.splitlines()]
    assert {record["process"] for record in records} == {"APIServer", "EngineCore"}
    mine = [record for record in records if record["request_id"] == "trace-me"]
    assert mine[0]["message"].startswith("Received request")
    assert f"POST /llm{COMPLETIONS}" in mine[-1]["message"]
    assert not [r for r in records if '"GET /health' in r["message"]]
    (ignored,) = [r for r in records if "--calculate-kv-scales" in r["message"]]
    assert ignored["level"] == "WARNING"


def test_a_full_queue_turns_requests_away(operated: ServerProcess) -> None:
    url = operated.url + COMPLETIONS
    endless: dict[str, Any] = {**SHORT, "max_tokens": 8000, "ignore_eos": True}
    rejected = 'vllm:admission_rejections_total{engine="0",model_name="deepseek-v4"'
    before = _value(_scrape(operated), rejected)
    with httpx.stream("POST", url, json={**endless, "stream": True}, headers=KEY, timeout=60):
        # One runs; one may wait; the next is told to come back.
        waiting = threading.Thread(
            target=lambda: httpx.post(url, json=SHORT, headers=KEY, timeout=120), daemon=True
        )
        waiting.start()
        _wait_for(lambda: _value(_scrape(operated), "vllm:num_requests_waiting{") == 1)
        response = operated.post(COMPLETIONS, SHORT, headers=KEY)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "--max-num-queued-reqs" in response.json()["error"]["message"]
    waiting.join(60)
    assert not waiting.is_alive()
    assert _value(_scrape(operated), rejected) == before + 1


def test_a_request_leaves_a_span_with_its_cached_tokens(
    operated: ServerProcess, collector: Collector
) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {**KEY, "X-Request-Id": "spanned", "traceparent": f"00-{trace_id}-{parent_id}-01"}
    body = {**SHORT, "n": 2, "temperature": 1.0}
    assert operated.post("/llm" + COMPLETIONS, SHORT, headers=KEY).status_code == 200
    usage = operated.post("/llm" + COMPLETIONS, body, headers=headers).json()["usage"]

    def mine() -> list[Any]:
        return [span for span in collector.spans if span.parent_span_id.hex() == parent_id]

    _wait_for(lambda: bool(mine()))
    (span,) = mine()
    assert span.trace_id.hex() == trace_id
    values = {a.key: a.value for a in span.attributes}
    assert "spanned" in values["gen_ai.request.id"].string_value
    counts = {
        name: values[f"gen_ai.usage.{name}"].int_value
        for name in ("prompt_tokens", "completion_tokens", "cache_read.input_tokens")
    }
    assert counts == {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    assert counts["cache_read.input_tokens"] > 0


class TlsUnixServer(ServerProcess):
    """A server that speaks TLS on a Unix socket."""

    def __init__(self, log_path: Path, uds: str, trust: ssl.SSLContext, *flags: str) -> None:
        self._transport: dict[str, Any] = {"uds": uds, "verify": trust}
        super().__init__(log_path, "--uds", uds, *flags)

    def get(self, path: str) -> httpx.Response:
        """GET a path."""
        if not Path(self._transport["uds"]).exists():  # httpx leaks a socket that meets no file
            raise httpx.ConnectError("no socket yet")
        with httpx.Client(transport=httpx.HTTPTransport(**self._transport), timeout=60) as client:
            return client.get("https://localhost" + path)


@pytest.fixture
def authority() -> trustme.CA:
    """Signs certificates."""
    return trustme.CA()


def _write_certificate(authority: trustme.CA, folder: Path) -> None:
    """Write a new certificate with its key."""
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "new.pem"))
    (folder / "new.pem").replace(folder / "cert.pem")


def test_tls_on_a_unix_socket_with_a_certificate_that_changes(authority: trustme.CA) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        _write_certificate(authority, folder)
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        authority.issue_cert("client@example.org").configure_cert(trust)
        flags = ["--ssl-certfile", str(folder / "cert.pem"), "--enable-ssl-refresh"]
        flags += ["--ssl-ca-certs", str(folder / "ca.pem"), "--ssl-cert-reqs", "2"]
        uds = str(folder / "s")
        with TlsUnixServer(folder / "log.txt", uds, trust, *flags) as server:
            assert server.get("/v1/models").json()["data"][0]["id"] == "deepseek-v4"
            # Without a certificate of one's own there is no connection.
            anonymous = ssl.create_default_context()
            authority.configure_trust(anonymous)
            with (
                httpx.Client(transport=httpx.HTTPTransport(uds=uds, verify=anonymous)) as client,
                pytest.raises(httpx.HTTPError),
            ):
                client.get("https://localhost/health")
            _write_certificate(authority, folder)
            _wait_for(lambda: "was read again" in server.log)
            assert server.get("/health").status_code == 200
        assert "https://localhost" in (folder / "log.txt").read_text()
