"""Requests no server should be sent: made at random from a seed and a server's own schema.

Each is written to a socket as bytes, so that those which are no HTTP can be among them.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NASTY_TEXTS = (
    *("", "\x00", "\ud800", "\ufeff", "\u202e", "é" * 300, "a" * 70_000, "{{7*7}}", "%s%n%s"),
    *("<|im_start|>system", "<｜begin▁of▁sentence｜>", "../../etc/passwd", "'; DROP TABLE x;--"),
)
_NASTY_NUMBERS = (0, -1, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400)
_NASTY_OTHERS = (None, True, False, [], {}, [[]], [None], {"": {}}, [{}, 1, "x"])
_BODY = {"model": "deepseek-v4", "prompt": "x", "max_tokens": 2}
_MESSAGES = [{"role": "user", "content": "x"}]
_UNKNOWN_PATHS = ("/", "/v1", "/v1/nothing", "/../etc/passwd", "/%00", "/v1/models/%F0%9F", "//")
_RAW = (
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 64, b"GET\r\n\r\n", b"\r\n\r\n"),
    *(b"POST /v1/completions HTTP/1.1\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
)


@dataclass(frozen=True, slots=True)
class Rubbish:
    """One request.

    Attributes:
        kind: Of rubbish.
        data: What is written to the connection.
        leaves: Whether the client closes without reading the answer.
    """

    kind: str
    data: bytes
    leaves: bool = False


class RubbishMaker:
    """Makes requests, the same ones for the same seed and schema.

    Args:
        schema: A server's OpenAPI document; its routes with a body get most of the rubbish.
        seed: Of the random numbers.
    """

    def __init__(self, schema: Mapping[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._routes = [path for path, methods in schema["paths"].items() if "post" in methods]
        self._all_paths = list(schema["paths"])
        self._fields = _find_fields(schema)
        self._kinds: tuple[Callable[[], Rubbish], ...] = (
            *(self._wrong_value,) * 6,
            *(self._noise, self._cut, self._deep, self._huge, self._twice, self._encoding),
            *(self._wrong_method, self._unknown_path, self._header, self._raw, self._leaves),
        )

    def make(self) -> Rubbish:
        """Return the next one."""
        return self._random.choice(self._kinds)()

    def _route(self) -> str:
        return self._random.choice(self._routes)

    def _good_body(self) -> dict[str, Any]:
        """Return a body that some routes would take."""
        return {**_BODY, "messages": _MESSAGES, "input": "x", "tokens": [1, 2]}

    def _nasty(self) -> Any:
        pool = self._random.choice((_NASTY_TEXTS, _NASTY_NUMBERS, _NASTY_OTHERS))
        value: Any = self._random.choice(pool)
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            value = self._random.choice(([value], {"type": value}, {"text": value}, [value] * 20))
        return value

    def _wrong_value(self) -> Rubbish:
        """One to three fields hold what they should not."""
        path, body = self._route(), self._good_body()
        names = [*self._fields.get(path, ()), "messages", "tools", "response_format"]
        for name in self._random.sample(names, k=min(len(names), self._random.randint(1, 3))):
            body[name] = self._nasty()
        return Rubbish("wrong value", _post(path, json.dumps(body).encode()))

    def _noise(self) -> Rubbish:
        return Rubbish("noise", _post(self._route(), self._random.randbytes(200)))

    def _cut(self) -> Rubbish:
        whole = json.dumps(self._good_body()).encode()
        return Rubbish("cut", _post(self._route(), whole[: self._random.randrange(len(whole))]))

    def _deep(self) -> Rubbish:
        depth = self._random.choice((100, 1_000, 100_000))
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}")))
        field = self._random.choice(("prompt", "messages", "tools", "metadata"))
        inner = opening * depth + "1" + closing * depth
        return Rubbish("deep", _post(self._route(), f'{{"{field}": {inner}}}'.encode()))

    def _huge(self) -> Rubbish:
        size = self._random.choice((100_000, 1_000_000))
        value: Any = self._random.choice(("word " * (size // 5), [1] * (size // 3), "[" * size))
        field = self._random.choice(("prompt", "model", "tokens", "stop", "user"))
        body = json.dumps({**self._good_body(), field: value}).encode()
        return Rubbish("huge", _post(self._route(), body))

    def _twice(self) -> Rubbish:
        body = b'{"prompt": "x", "prompt": 5, "max_tokens": 1, "max_tokens": "1", "a": NaN}'
        return Rubbish("twice", _post(self._route(), body))

    def _encoding(self) -> Rubbish:
        text = json.dumps(self._good_body())
        kind = self._random.choice(("text/plain", "application/x-www-form-urlencoded", "", "é"))
        encoding = self._random.choice(("utf-16", "utf-32", "latin-1"))
        return Rubbish("encoding", _post(self._route(), text.encode(encoding), kind))

    def _wrong_method(self) -> Rubbish:
        method = self._random.choice(("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"))
        return Rubbish("method", _request(method, self._random.choice(self._all_paths)))

    def _unknown_path(self) -> Rubbish:
        path = self._random.choice((*_UNKNOWN_PATHS, "/" + "a" * 5_000))
        return Rubbish("path", _request(self._random.choice(("GET", "POST")), path))

    def _header(self) -> Rubbish:
        name = self._random.choice(("X-Request-Id", "Authorization", "traceparent", "Accept"))
        value = self._random.choice(("", "\x01", "é", "z" * 5_000, "Bearer", "00-0-0-0", "*/*;q=x"))
        body = json.dumps(self._good_body()).encode()
        return Rubbish("header", _post(self._route(), body, headers={name: value}))

    def _raw(self) -> Rubbish:
        return Rubbish("raw", self._random.choice(_RAW), leaves=True)

    def _leaves(self) -> Rubbish:
        body = {**self._good_body(), "stream": True, "max_tokens": 200}
        return Rubbish("leaves", _post(self._route(), json.dumps(body).encode()), leaves=True)


def _find_fields(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the fields of each route's body."""
    models = schema.get("components", {}).get("schemas", {})
    fields = {}
    for path, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        model = models.get(reference.rpartition("/")[2], {})
        fields[path] = [name for name in model.get("properties", {}) if name != "max_tokens"]
    return fields


def _post(
    path: str,
    body: bytes,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    given = {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}
    return _request("POST", path, given) + body


def _request(method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
