"""Prometheus: promtool reads the servers' metrics, and a Prometheus scrapes them."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import client
from client import URL, URL_WORKER, Row, run

ENVS = Path(os.environ.get("CLIENTS_ENVS", ".venv-clients")) / "prometheus"
_DEADLINE_S = 60.0


def _program(name: str) -> str:
    return shutil.which(name) or str(ENVS / "usr" / "bin" / name)


def _read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def checked(row: Row) -> None:
    for url in (URL, URL_WORKER):
        text = _read(f"{url}/metrics")
        done = subprocess.run(
            [_program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
        )
        # Names that dashboards know: with a colon, and a histogram's.
        said = (done.stdout + done.stderr).splitlines()
        assert said
        known = ("should not contain ':'", "vllm:iteration_tokens_total non-counter")
        other = [line for line in said if not any(word in line for word in known)]
        assert not other, other
    row.shown = f"{text.count('# TYPE')} metrics, clean but for known names"


def scraped(row: Row) -> None:
    targets = [url.removeprefix("http://") for url in (URL, URL_WORKER)]
    jobs = {"job_name": "vllm", "static_configs": [{"targets": targets}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [jobs]}
    port = client.free_port()
    with tempfile.TemporaryDirectory() as made:
        # JSON is YAML.
        (Path(made) / "config.yml").write_text(json.dumps(config))
        flags = [f"--config.file={made}/config.yml", f"--storage.tsdb.path={made}/data"]
        server = subprocess.Popen(
            [_program("prometheus"), *flags, f"--web.listen-address=127.0.0.1:{port}"],
            stderr=subprocess.DEVNULL,
        )
        try:
            found = _wait_for_both(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait(30)
    row.shown = f"{found} series of both servers"


def _wait_for_both(url: str) -> int:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            up = json.loads(_read(f'{url}/api/v1/query?query=sum(up{{job="vllm"}})'))
            ups = up["data"]["result"]
            if ups and ups[0]["value"][1] == "2":
                query = "count({__name__=~%22vllm:.*%22})"
                told = json.loads(_read(f"{url}/api/v1/query?query={query}"))
                return int(told["data"]["result"][0]["value"][1])
        except OSError:
            continue
    raise AssertionError("Prometheus did not find both servers up")


def _version() -> str:
    said = subprocess.run([_program("promtool"), "--version"], capture_output=True, text=True)
    return (said.stdout + said.stderr).split("version ")[1].split()[0].rstrip(",")


run({"promtool check metrics": checked, "scrapes": scraped}, "prometheus", _version())
