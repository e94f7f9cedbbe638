"""Run real clients against a real server, and write docs/clients.md: ``make clients [ROWS=...]``.

    python -m tests.clients.run [--envs DIR] [--only NAME ...] [--write]

Every environment is made on demand from the pins of requirements/clients.txt and package.json and
kept; one whose packages cannot be had is skipped by name, which the page then says. Two servers:
the model of one calls a tool in every turn, that of the other does what clients with tools and
formats of their own hope for (``worker_model``). A row fails with its client, with a status of the
servers' that it does not expect, and where client and servers count differently.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.clients import worker_model
from tests.e2e.collector import Collector
from tests.e2e.conftest import AGENT_SCRIPT
from tests.e2e.scripted_checkpoint import write_scripted_v4
from tests.e2e.server_process import ServerProcess

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PINS = ROOT / "requirements" / "clients.txt"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
_INSTALL_TIMEOUT_S = 900
# Ends a hang and says nothing of speed.
_ROWS_TIMEOUT_S = 600
_IDLE_TIMEOUT_S = 60.0
_BUSY = [(f"vllm:num_requests_{state}",) for state in ("running", "waiting")]
_HANDLERS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/decisions", "/v1/embeddings", "/v1/files", "/v1/batches"),
    *("/v2/embed", "/v1/rerank", "/v2/rerank"),
)
NODE, PROMPTFOO = "node", "promptfoo"
PROMETHEUS, TEMPLATES = "prometheus", "axolotl, oumi, trl"
# Environments of Node's packages, and the files of their pins.
MANIFESTS = {NODE: HERE / "package.json", PROMPTFOO: HERE / "promptfoo.json"}
# Their rows run where this project is installed.
_OWN_PYTHON = (PROMETHEUS, TEMPLATES, PROMPTFOO)
# Rows that a server refuses once or more, and whose clients know what to do: a full context, a
# thread, a wrong key, an image.
_REFUSED = ("overflow", "tool runner", "refused")
# Environment -> the files of rows that run in it.
ROWS: dict[str, tuple[str, ...]] = {
    "openai, anthropic": ("openai_py.py", "anthropic_py.py"),
    "openai-agents": ("agents_py.py",),
    "pydantic-ai": ("pydantic_ai_py.py",),
    "instructor": ("instructor_py.py",),
    "huggingface_hub": ("huggingface_py.py",),
    "langchain": ("langchain_py.py",),
    "litellm": ("litellm_py.py",),
    "cohere": ("cohere_py.py",),
    "llama-index": ("llama_index_py.py",),
    "dspy": ("dspy_py.py",),
    "haystack": ("haystack_py.py",),
    "autogen": ("autogen_py.py",),
    "smolagents": ("smolagents_py.py",),
    "outlines, guidance": ("outlines_py.py", "guidance_py.py"),
    "aider": ("aider_py.py",),
    "lm-eval": ("lm_eval_py.py",),
    "guidellm": ("guidellm_py.py",),
    "aiperf": ("aiperf_py.py",),
    PROMETHEUS: ("prometheus_py.py",),
    TEMPLATES: ("templates_py.py",),
    PROMPTFOO: ("promptfoo_py.py",),
    NODE: ("openai_js.mjs", "ai_sdk.mjs", "coding_agents.mjs"),
}
# The OpenTelemetry sink is ours, and reads with that package; it gets what both servers send.
SINK = "opentelemetry-proto"


@dataclass(frozen=True)
class Servers:
    """What rows talk to.

    Attributes:
        agent: Calls a tool in every turn.
        worker: Does what a client's own tools and formats ask for; wants a key.
        folder: The first one's checkpoint, whose tokenizer some clients read.
    """

    agent: ServerProcess
    worker: ServerProcess
    folder: Path


@dataclass
class Result:
    """What became of one row.

    Attributes:
        statuses: Of the server's answers, by how many there were.
        server_cached: Prompt tokens that the server read from its cache meanwhile.
        server_tokens: Tokens that it generated.
    """

    package: str
    version: str
    row: str
    ok: bool
    error: str = ""
    calls: int = 0
    cached: int = 0
    tokens: int = 0
    shown: str = ""
    statuses: dict[str, int] = field(default_factory=dict)
    server_cached: int = 0
    server_tokens: int = 0


def read_pins() -> dict[str, list[str]]:
    """Return the requirements of every Python environment."""
    pins: dict[str, list[str]] = {}
    name = ""
    for line in PINS.read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"# \[(.+)\]", line):
            name = head[1]
        elif requirement := line.partition("#")[0].strip():
            pins.setdefault(name, []).append(requirement)
    return pins


def make_environment(name: str, envs: Path) -> tuple[list[str], str]:
    """Make an environment, unless it is there; return its interpreter and why it cannot be had."""
    folder = envs / name.replace(", ", "-")
    stamp = folder / ".pins"
    pins = json.dumps(read_pins().get(name, []))
    if name in MANIFESTS:
        pins = json.dumps(MANIFESTS[name].read_text("utf-8"))
    # The packages' own Node: newer ones than some systems have are asked for.
    node = folder / "node_modules" / ".bin" / "node"
    program = [str(node)] if name == NODE else [str(folder / "bin" / "python")]
    if name in _OWN_PYTHON:
        program = [sys.executable]
    if stamp.is_file() and stamp.read_text("utf-8") == pins:
        return program, ""
    print(f"Installing {name} into {folder}, once (a few minutes) ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if name in MANIFESTS:
        if shutil.which("npm") is None:
            return program, "npm is not there"
        shutil.copy(MANIFESTS[name], folder / "package.json")
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        # Of what it asks for besides, its database alone is needed, which is pinned.
        commands = [install if name == NODE else [*install, "--omit=optional", "--ignore-scripts"]]
    elif name == PROMETHEUS:
        if shutil.which("promtool") is None and shutil.which("apt-get") is None:
            return program, "neither promtool nor apt-get is there"
        # Unpacked beside the rest: needs no rights, and changes nothing of the system.
        fetch = f"cd {folder} && apt-get download prometheus && dpkg -x prometheus_*.deb ."
        commands = [] if shutil.which("promtool") else [["sh", "-c", fetch]]
    elif name == TEMPLATES:
        # Templates alone: what these packages need to run is large.
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        unpack = f"cd {folder} && for w in *.whl; do {sys.executable} -m zipfile -e $w .; done"
        commands = [[*fetch, *read_pins()[name]], ["sh", "-c", unpack]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, *read_pins()[name]]]
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return program, f"{' '.join(command[:4])} took longer than {_INSTALL_TIMEOUT_S} s"
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[
                -1
            ]
            return program, last[:200]
    stamp.write_text(pins, encoding="utf-8")
    return program, ""


def run_rows(
    program: list[str], file: str, envs: Path, servers: Servers, scratch: Path
) -> Iterator[Result]:
    """Run one file of rows; yield their results."""
    source = HERE / "rows" / file
    if file.endswith(".mjs"):
        # Node looks for packages beside the program.
        for path in (HERE / "rows").glob("*.mjs"):
            shutil.copy(path, envs / NODE / path.name)
        source = envs / NODE / file
    is_own = program == [sys.executable]
    search_path = f"{Path(program[0]).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = {
        "PATH": search_path,
        "CLIENTS_URL": servers.agent.url,
        "CLIENTS_WORKER_URL": servers.worker.url,
        "CLIENTS_HOME": str(scratch),
        "CLIENTS_TOKENIZER": str(servers.folder),
        "CLIENTS_ENVS": str(envs),
        "OPENAI_API_KEY": "none",
        "PYTHONPATH": f"{HERE / 'rows'}{os.pathsep}{ROOT}" if is_own else str(HERE / "rows"),
        "NO_PROXY": "127.0.0.1",
    }
    process = subprocess.Popen(
        [*program, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(scratch / f"{file}.log").open("w"),
        text=True,
        env={**os.environ, **variables},
    )
    about = {"package": file, "version": "?"}
    open_row, before = "", read_metrics(servers)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            told = parse_line(line)
            if "package" in told:
                about = told
            elif "begin" in told:
                open_row, before = told["begin"], read_metrics(servers)
                print("go", file=process.stdin, flush=True)
            elif "row" in told:
                open_row = ""
                yield checked(Result(**about, **told), before, read_metrics(servers))
                print("go", file=process.stdin, flush=True)
    finally:
        try:
            process.wait(_ROWS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    if open_row or process.returncode:
        why = f"ended with {process.returncode}: {(scratch / f'{file}.log').read_text()[-500:]}"
        yield Result(**about, row=open_row or "start", ok=False, error=why)


def parse_line(line: str) -> dict[str, Any]:
    """Return what a row tells in a line; nothing for lines of the client's own."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def read_metrics(servers: Servers) -> dict[str, int]:
    """Return the counters that rows are checked by, of both servers, once nothing runs."""
    counters = dict.fromkeys(("cached", "tokens", "2xx", "4xx", "5xx"), 0.0)
    for server in (servers.agent, servers.worker):
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while any((series := read_series(server)).get(name, 0) for name in _BUSY):
            assert time.monotonic() < deadline, f"{server.url} is not idle"
            time.sleep(0.1)
        for key, value in series.items():
            name, *labels = key
            if name == "vllm:prefix_cache_hits_total":
                counters["cached"] += value
            elif name == "vllm:generation_tokens_total":
                counters["tokens"] += value
            elif name == "http_requests_total" and labels and labels[0] in _HANDLERS:
                counters[labels[1]] += value
    return {name: round(value) for name, value in counters.items()}


def read_series(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """Return the sums of a server's series by name; answers to POST by route and status, too."""
    sums: dict[tuple[str, ...], float] = {}
    for line in server.get("/metrics").text.splitlines():
        found = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if found is None:
            continue
        key: tuple[str, ...] = (found[1],)
        if found[1] == "http_requests_total":
            labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            if labels["method"] == "POST":
                key = (found[1], labels["handler"], labels["status"])
        sums[key] = sums.get(key, 0.0) + float(found[3])
    return sums


def read_sink(sink: Collector) -> Result:
    """Return the row of the spans that the servers have sent."""
    names = {span.name for span in sink.spans}
    kinds = {a.key for span in sink.spans for a in span.attributes}
    wanted = {"gen_ai.request.id", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"}
    missing = sorted(wanted - kinds)
    error = f"{len(sink.spans)} spans lack {missing}" if missing else ""
    told = f"{len(sink.spans)} spans, {', '.join(sorted(names))}"
    return Result(SINK, version(SINK), "spans of all rows", not error, error, shown=told)


def checked(result: Result, before: dict[str, int], after: dict[str, int]) -> Result:
    """Complete a result by what the server counted; it fails where the two do not fit."""
    delta = {name: after[name] - before[name] for name in after}
    result.statuses = {name: delta[name] for name in ("2xx", "4xx", "5xx") if delta[name]}
    result.server_cached, result.server_tokens = delta["cached"], delta["tokens"]
    expects_refusal = any(word in result.row for word in _REFUSED)
    faults = []
    if delta["5xx"] or (delta["4xx"] and not expects_refusal):
        faults.append(f"statuses {result.statuses}")
    if result.tokens and result.tokens > delta["tokens"]:
        faults.append(f"the client counts {result.tokens} tokens, the server {delta['tokens']}")
    if result.cached > delta["cached"]:
        faults.append(f"the client counts {result.cached} cached, the server {delta['cached']}")
    if result.ok and faults:
        result.ok, result.error = False, "; ".join(faults)
    return result


def make_page(results: list[Result], skipped: dict[str, str], old: str = "") -> str:
    """Return the table of docs/clients.md.

    Args:
        results: Of the rows that ran.
        skipped: Environments that cannot be had, and why.
        old: The table before; its rows of packages that did not run stay.
    """
    rows: dict[str, list[str]] = {}
    for line in old.splitlines()[2:]:
        cell = line.split("|")[1].strip()
        rows.setdefault(cell if "| skipped |" in line else cell.rpartition(" ")[0], []).append(line)
    for name in [*(result.package for result in results), *skipped]:
        rows.pop(name, None)
    for result in results:
        mark = "works" if result.ok else "**fails**"
        said = " ".join((result.shown or result.error).split()).replace("|", "\\|")[:120]
        counts = [n or "" for n in (result.calls, result.server_tokens, result.server_cached)]
        cells = [f"{result.package} {result.version}", result.row, mark, *counts, said]
        rows.setdefault(result.package, []).append(f"| {' | '.join(map(str, cells))} |")
    for name, why in skipped.items():
        rows.setdefault(name, []).append(f"| {name} | | skipped | | | | {why} |")
    head = ["| client | row | | calls | tokens | cached | |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *(line for listed in rows.values() for line in listed)]) + "\n"


@contextmanager
def start_servers(scratch: Path, sink: Collector) -> Iterator[Servers]:
    """Run both servers while the ``with`` block does."""
    write_scripted_v4(scratch / "checkpoint", AGENT_SCRIPT)
    worker_model.write_worker(scratch / "worker")
    shared = ("--otlp-traces-endpoint", sink.endpoint)
    agent = ServerProcess(
        scratch / "agent.txt",
        *("--served-model-name", "agent", "--max-model-len", "16384"),
        *("--enable-tokenizer-info-endpoint", "--batch-dir", str(scratch / "batches"), *shared),
        model=str(scratch / "checkpoint"),
        environment={"VLLM_CHECK_INVARIANTS": "0", "OTEL_SERVICE_NAME": "agent"},
    )
    worker = ServerProcess(
        scratch / "worker.txt",
        *("--served-model-name", "worker", "--api-key", worker_model.API_KEY),
        *("--chat-template", str(scratch / "worker" / "template.jinja"), *shared),
        model=str(scratch / "worker"),
        environment={"VLLM_CHECK_INVARIANTS": "0", "VLLM_CPU_KVCACHE_SPACE": "0.5"},
    )
    with agent, worker:
        yield Servers(agent, worker, scratch / "checkpoint")


def main() -> None:
    """Run what is asked for; exit 1 where a row fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=Path, default=ROOT / ".venv-clients")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument(
        "--write", action="store_true", help="write docs/clients.md; rows that did not run stay"
    )
    args = parser.parse_args()
    results: list[Result] = []
    skipped: dict[str, str] = {}
    # Codex wants its folder elsewhere than under /tmp.
    args.envs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.envs) as made, Collector() as sink:
        scratch = Path(made)
        with start_servers(scratch, sink) as servers:
            for name in args.only:
                program, why = make_environment(name, args.envs)
                if why:
                    skipped[name] = why
                    print(f"skipped: {name}: {why}", flush=True)
                    continue
                for file in ROWS[name]:
                    for result in run_rows(program, file, args.envs, servers, scratch):
                        results.append(result)
                        print(json.dumps(vars(result), ensure_ascii=False), flush=True)
        # Servers send the last spans when they end; rows of templates ask them nothing.
        if any(result.statuses for result in results):
            results.append(read_sink(sink))
        for server in (servers.agent, servers.worker):
            assert "Traceback" not in server.log, server.log[-5000:]
    if args.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        old, _, after = rest.partition(END)
        page = before + BEGIN + make_page(results, skipped, old) + END + after
        PAGE.write_text(page, encoding="utf-8")
    failed = [f"{result.package}: {result.row}" for result in results if not result.ok]
    print(f"{len(results)} rows, {len(failed)} failed, {len(skipped)} environments skipped")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
