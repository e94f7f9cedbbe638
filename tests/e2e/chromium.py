"""A headless Chromium, driven over its DevTools protocol; tests skip where there is none."""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell")
PROGRAM = next(filter(None, map(shutil.which, _NAMES)), None)
_DEADLINE_S = 90.0
# From an answer to "go there" to the new page.
_NAVIGATION_S = 15.0
_FIRST_PAGE = "about:blank"
# It asks for nothing outside this machine: its own services are off.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Chromium:
    """One page of one browser.

    Args:
        folder: An empty one, for its profile.
        width: Of the window, in pixels.
        height: Of the window.
    """

    def __init__(self, folder: Path, width: int = 1480, height: int = 1000) -> None:
        assert PROGRAM is not None
        flags = [*_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        self._ids = count(1)
        # Errors of scripts, and what the console was told as one.
        self.errors: list[str] = []
        with ExitStack() as stack:
            log = stack.enter_context((folder / "chromium.log").open("w"))
            self._process = stack.enter_context(
                subprocess.Popen(
                    [PROGRAM, *flags, _FIRST_PAGE],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
            stack.callback(self._end)
            address = self._find_page(folder / "DevToolsActivePort")
            self._socket = stack.enter_context(connect(address, max_size=1 << 26, proxy=None))
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self._stack = stack.pop_all()

    def _find_page(self, port_file: Path) -> str:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if port_file.exists() and (text := port_file.read_text()):
                port = text.split("\n")[0]
                with httpx.Client(trust_env=False, timeout=60) as client:
                    pages = client.get(f"http://127.0.0.1:{port}/json").json()
                found = [page for page in pages if page["type"] == "page"]
                if found:
                    return str(found[0]["webSocketDebuggerUrl"])
            time.sleep(0.05)
        raise RuntimeError("Chromium did not start")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        # Debian's program is a script that waits for the browser: a signal for it alone would leave
        # the browser running.
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_DEADLINE_S))
            self._note(message)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))

    def open(self, url: str) -> None:
        """Go to a page.

        The browser gives a navigation up that begins while its first page still loads: nobody is
        asked for the page then, and it is told to go there again.
        """
        deadline = time.monotonic() + _DEADLINE_S
        while error := self._navigate(url):
            assert time.monotonic() < deadline, f"{url} was not opened: {error}"
            time.sleep(0.1)

    def _navigate(self, url: str) -> str | None:
        """Go to a page; return why the browser did not."""
        error: str | None = self.call("Page.navigate", url=url).get("errorText")
        patience = time.monotonic() + _NAVIGATION_S
        while error is None and self.evaluate("location.href") == _FIRST_PAGE:
            if time.monotonic() > patience:
                error = f"still at {_FIRST_PAGE}"
            time.sleep(0.05)
        return error

    def evaluate(self, script: str, *, waits: bool = False) -> Any:
        """Return the value of an expression in the page, or of what it promises."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=waits
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true; return it."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"{script} never came true: {self.errors}"
            time.sleep(0.05)
        return value

    def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        """Type a text into a field as a person would, and press Enter if asked to."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        if enter:
            self.press("Enter")

    def press(self, name: str) -> None:
        """Press a key that has a name: Enter, Escape, Tab."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        fields = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        text = "\r" if name == "Enter" else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def show(self, width: int, height: int, *, dark: bool) -> None:
        """Give the page a window and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write the window, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
