"""A client of a running server: the flags, and streams of text from it."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import httpx

from vllm.exceptions import EngineError, UserInputError

DEFAULT_URL = "http://localhost:8000/v1"
_CONNECT_TIMEOUT_S = 10.0


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``ApiClient.from_args`` reads."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"Where the server's API is. Default: {DEFAULT_URL}."
    )
    parser.add_argument(
        "--model-name", "--model", help="A name the server knows. Default: its first."
    )
    parser.add_argument("--api-key", help="Default: OPENAI_API_KEY, if set.")
    parser.add_argument(
        "--stats", action="store_true", help="Print token counts, cached ones too, to stderr."
    )


class ApiClient:
    """One server, and one of its models.

    Owns: the HTTP client.

    Args:
        url: Of the API, up to ``/v1``.
        model: A served name; None: the server's first.
        api_key: Sent with every request, if given.
        transport: Of the HTTP client; None: the network.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Between two tokens anything may happen; only a connection must come soon.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._url = url.rstrip("/")
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)
        self._model = model
        self.usage: Mapping[str, Any] | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Take the client out of parsed arguments."""
        return cls(args.url, args.model_name, args.api_key or os.environ.get("OPENAI_API_KEY"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The model that requests name; asked of the server once, where none was given.

        Raises:
            EngineError: The server cannot be reached, or refuses.
        """
        if self._model is None:
            with _reachable(self._url):
                response = self._http.get(f"{self._url}/models")
            _check(response)
            self._model = str(response.json()["data"][0]["id"])
        return self._model

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the choices' chunks of a streamed answer; its usage is in ``usage`` afterwards.

        Raises:
            UserInputError: The server says the request is wrong.
            EngineError: The server cannot be reached, refuses, or breaks off.
        """
        options = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        with (
            _reachable(self._url),
            self._http.stream("POST", self._url + path, json={**options, **body}) as response,
        ):
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise EngineError(f"The server broke off: {chunk['error']['message']}")
                self.usage = chunk.get("usage") or self.usage
                yield from chunk["choices"]


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    """Turn faults of the connection into an error that says what to do."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        advice = (
            "set SSL_CERT_FILE to a file of the authority that signed it."
            if "CERTIFICATE_VERIFY_FAILED" in str(error)
            else "is a server running there? 'vllm serve' starts one; --url says where it is."
        )
        raise EngineError(
            f"No answer from {url} ({str(error) or type(error).__name__}): {advice}"
        ) from error


def _check(response: httpx.Response) -> None:
    """Raise the error that a response carries, if it is one."""
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:500] or response.reason_phrase
    told = f"The server answered {response.status_code}: {message}"
    if response.status_code < 500:
        raise UserInputError(told)
    raise EngineError(told)
