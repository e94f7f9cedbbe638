"""Prefill apart from decode on one machine: a prefill server, a decode server and the proxy.

    python examples/disaggregated/serve.py --model deepseek-v4 --port 8000 -- --block-size 32
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "The capital of", "max_tokens": 8}'

What follows ``--`` are flags of both servers. Ctrl-C ends all three.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_PROXY = Path(__file__).with_name("proxy.py")


def server_command(
    model: str, port: int, transfer: dict[str, object], flags: list[str]
) -> list[str]:
    """Return the command of one server."""
    command = [sys.executable, "-m", "vllm", "serve", model, "--port", str(port)]
    return [*command, "--kv-transfer-config", json.dumps(transfer), *flags]


def wait_until_up(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until a server answers; ends the program if it does not start."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{url} did not start: its process exited with {process.returncode}.")
        try:
            if httpx.get(url + "/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(0.2)
    raise SystemExit(f"{url} did not start within {_START_TIMEOUT_S:g} s.")


def main() -> None:
    """Start all, wait for a signal or for one of them to end, stop all."""
    parser = argparse.ArgumentParser(description="Prefill apart from decode on one machine.")
    parser.add_argument("--model", default="deepseek-v4")
    parser.add_argument("--port", type=int, default=8000, help="Of the proxy.")
    parser.add_argument("--prefill-port", type=int, default=8100)
    parser.add_argument("--decode-port", type=int, default=8200)
    parser.add_argument("--kv-port", type=int, default=14579)
    parser.add_argument("flags", nargs="*", help="After --: flags of both servers.")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gives = {"kv_connector": "TcpConnector", "kv_role": "kv_producer", "kv_port": args.kv_port}
    # Compared with at start: a decode server of another model or block size does not come up.
    peers = {"peers": [f"127.0.0.1:{args.kv_port}"]}
    takes = {
        "kv_connector": "TcpConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": peers,
    }
    urls = [f"http://127.0.0.1:{port}" for port in (args.prefill_port, args.decode_port, args.port)]
    proxy = [sys.executable, str(_PROXY), "--port", str(args.port)]
    commands = [
        server_command(args.model, args.prefill_port, gives, args.flags),
        server_command(args.model, args.decode_port, takes, args.flags),
        [*proxy, "--prefill", urls[0], "--decode", urls[1]],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, url in zip(commands, urls, strict=True):
            processes.append(subprocess.Popen(command, env=os.environ, start_new_session=True))
            wait_until_up(processes[-1], url)
        print(f"Ready: {urls[2]}/v1", flush=True)
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    finally:
        # The proxy first: nothing new comes to servers that end.
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
