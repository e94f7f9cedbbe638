"""Run real clients against a real server, and write docs/clients.md: ``make clients [ROWS=...]``.

    python -m tests.clients.run [--envs DIR] [--only NAME ...] [--write]

Every environment is made on demand from the pins of requirements/clients.txt and package.json and
kept; one whose packages cannot be had is skipped by name, which the page then says. The model says
a script: it calls a tool in every turn. A row fails with its client, with a status of the server's
that it does not expect, and where client and server count differently.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
NODE = "node"
# Rows that the server refuses once, and whose clients know what to do: a full context, a thread.
_REFUSED = ("overflow", "exec", "tool runner")
# Environment -> the files of rows that run in it.
ROWS: dict[str, tuple[str, ...]] = {
    "openai, anthropic": ("openai_py.py", "anthropic_py.py"),
    "openai-agents": ("agents_py.py",),
    "pydantic-ai": ("pydantic_ai_py.py",),
    "instructor": ("instructor_py.py",),
    "langchain": ("langchain_py.py",),
    "litellm": ("litellm_py.py",),
    NODE: ("openai_js.mjs", "ai_sdk.mjs", "codex.mjs"),
}


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
    pins = json.dumps(read_pins().get(name) or (HERE / "package.json").read_text("utf-8"))
    program = ["node"] if name == NODE else [str(folder / "bin" / "python")]
    if stamp.is_file() and stamp.read_text("utf-8") == pins:
        return program, ""
    print(f"Installing {name} into {folder}, once (a few minutes) ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if name == NODE:
        if shutil.which("npm") is None:
            return program, "npm is not there"
        shutil.copy(HERE / "package.json", folder / "package.json")
        commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]]
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
    program: list[str], file: str, envs: Path, server: ServerProcess, scratch: Path
) -> Iterator[Result]:
    """Run one file of rows; yield their results."""
    source = HERE / "rows" / file
    if file.endswith(".mjs"):
        # Node looks for packages beside the program.
        for path in (HERE / "rows").glob("*.mjs"):
            shutil.copy(path, envs / NODE / path.name)
        source = envs / NODE / file
    variables = {"CLIENTS_URL": server.url, "CLIENTS_HOME": str(scratch), "OPENAI_API_KEY": "none"}
    variables |= {"PYTHONPATH": str(HERE / "rows"), "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        [*program, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(scratch / f"{file}.log").open("w"),
        text=True,
        env={**os.environ, **variables},
    )
    about = {"package": file, "version": "?"}
    open_row, before = "", read_metrics(server)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            told = parse_line(line)
            if "package" in told:
                about = told
            elif "begin" in told:
                open_row, before = told["begin"], read_metrics(server)
                print("go", file=process.stdin, flush=True)
            elif "row" in told:
                open_row = ""
                yield checked(Result(**about, **told), before, read_metrics(server))
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


def read_metrics(server: ServerProcess) -> dict[str, int]:
    """Return the counters that rows are checked by, once nothing runs."""
    server.wait_idle()
    counters = {
        "cached": server.metric("vllm:prefix_cache_hits_total"),
        "tokens": server.metric("vllm:generation_tokens_total"),
    }
    for status in ("2xx", "4xx", "5xx"):
        counters[status] = sum(
            server.metric("http_requests_total", method="POST", status=status, handler=handler)
            for handler in ("/v1/chat/completions", "/v1/responses", "/v1/messages")
        )
    return {name: round(value) for name, value in counters.items()}


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


def make_page(results: list[Result], skipped: dict[str, str]) -> str:
    """Return the table of docs/clients.md."""
    lines = ["| client | row | | calls | tokens | cached | |", "|---|---|---|---|---|---|---|"]
    for result in results:
        mark = "works" if result.ok else "**fails**"
        said = (result.shown or result.error).replace("|", "\\|").replace("\n", " ")[:120]
        counts = [n or "" for n in (result.calls, result.server_tokens, result.server_cached)]
        cells = [f"{result.package} {result.version}", result.row, mark, *counts, said]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [f"| {name} | | skipped | | | | {why} |" for name, why in skipped.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is asked for; exit 1 where a row fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=Path, default=ROOT / ".venv-clients")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--write", action="store_true", help="write docs/clients.md")
    args = parser.parse_args()
    results: list[Result] = []
    skipped: dict[str, str] = {}
    # Codex wants its folder elsewhere than under /tmp.
    args.envs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.envs) as made:
        scratch = Path(made)
        write_scripted_v4(scratch / "checkpoint", AGENT_SCRIPT)
        flags = ("--served-model-name", "agent", "--max-model-len", "16384")
        server = ServerProcess(
            scratch / "log.txt",
            *flags,
            model=str(scratch / "checkpoint"),
            environment={"VLLM_CHECK_INVARIANTS": "0"},
        )
        with server:
            for name in args.only:
                program, why = make_environment(name, args.envs)
                if why:
                    skipped[name] = why
                    print(f"skipped: {name}: {why}", flush=True)
                    continue
                for file in ROWS[name]:
                    for result in run_rows(program, file, args.envs, server, scratch):
                        results.append(result)
                        print(json.dumps(vars(result), ensure_ascii=False), flush=True)
            assert "Traceback" not in server.log, server.log[-5000:]
    if args.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        page = before + BEGIN + make_page(results, skipped) + END + after
        PAGE.write_text(page, encoding="utf-8")
    failed = [f"{result.package}: {result.row}" for result in results if not result.ok]
    print(f"{len(results)} rows, {len(failed)} failed, {len(skipped)} environments skipped")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
