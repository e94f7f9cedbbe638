"""``/`` and ``/cache``: the page's parts, its policy, and what it is told before it asks."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.openai.operations_args import OperationsArgs

_PAGES = Path(str(files("vllm.entrypoints.openai.pages")))
_PARTS = ["/", "/cache", *(f"/ui/{path.name}" for path in sorted(_PAGES.glob("*.[hcj]*")))]


@pytest.mark.parametrize("path", _PARTS)
async def test_it_needs_no_key_and_has_a_policy(path: str, serve: Callable[..., Any]) -> None:
    served = serve(api_keys=("k",))
    response = await served.client.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    kind = kinds[path.rpartition(".")[2] if "." in path else "html"]
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"


def test_it_needs_nothing_from_elsewhere_and_writes_no_markup() -> None:
    assert len(_PARTS) >= 8
    for path in _PAGES.glob("*.[hcj]*"):
        text = path.read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
        # A name of a kind of element, which nobody asks for.
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        # Names and answers come from others: nothing of theirs may become markup or code.
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, path.name
        # The key is this tab's; a policy without "unsafe" takes neither of the others.
        assert 'localStorage.setItem("key' not in text
        if path.suffix == ".html":
            assert not re.search(r"\sstyle=|\son[a-z]+=", text)
            assert all(
                not body.strip() for body in re.findall(r"<script[^>]*>(.*?)</script>", text)
            )
    html = (_PAGES / "page.html").read_text("utf-8")
    linked = re.findall(r"(?:src|href)=\"(?!data:|#)([^\"]+)\"", html)
    assert sorted(linked) == ["ui/page.css", "ui/page.js"]


def test_every_element_that_a_script_names_is_in_the_page() -> None:
    html = (_PAGES / "page.html").read_text("utf-8")
    known = set(re.findall(r"\sid=\"([^\"]+)\"", html))
    for path in _PAGES.glob("*.js"):
        named = set(re.findall(r"\$\(\"([^\"]+)\"\)", path.read_text("utf-8")))
        assert named <= known, path.name


async def test_nothing_of_it_is_there_without_it(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    served = serve(operations=OperationsArgs(serves_page=False))
    for path in (*_PARTS, "/ui/settings", "/cache/events"):
        assert (await served.client.get(path)).status_code == 404, path


@pytest.mark.parametrize(
    ("dev", "admin", "seen_by"),
    [("0", None, "off"), ("1", None, "open"), ("0", "a", "operator"), ("1", "a", "operator")],
)
async def test_it_is_told_who_may_see_the_cache(
    dev: str,
    admin: str | None,
    seen_by: str,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., Any],
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev)
    served = serve(api_keys=("k",), operations=OperationsArgs(admin_key=admin))
    told = (await served.client.get("/ui/settings")).json()
    assert told == {"needs_key": True, "cache": seen_by, "reasons": False, "records": False}


@pytest.mark.parametrize("path", ["/ui/", "/ui/x.js", "/ui/__init__.py", "/ui/..%2fapp.py"])
async def test_nothing_else_is_shown(path: str, serve: Callable[..., Any]) -> None:
    assert (await serve().client.get(path)).status_code == 404
