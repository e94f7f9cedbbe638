"""A client of a running server: the flags, and streams of text from it."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import httpx

from vllm.exceptions import EngineError, UserInputError
from vllm.utils.argparse_utils import human_int

DEFAULT_URL = "http://localhost:8000/v1"
_CONNECT_TIMEOUT_S = 10.0
# Where neither a flag nor the checkpoint says more. At temperature 1 a small model's answers are
# noise that does not end.
_USUAL_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}


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
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="Print token counts and the cached share to stderr. Default: in a conversation, not "
        "with --quick.",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the flags that ``sampling_of`` reads.

    Args:
        parser: Of the command.
        max_tokens: The default of ``--max-tokens``.
    """
    usual = "Default: what the checkpoint sets, else"
    temperature, top_p = _USUAL_SAMPLING["temperature"], _USUAL_SAMPLING["top_p"]
    parser.add_argument("--temperature", type=float, help=f"0 is greedy. {usual} {temperature}.")
    parser.add_argument("--top-p", type=float, help=f"{usual} {top_p}.")
    parser.add_argument("--seed", type=int, help="Makes an answer repeatable.")
    parser.add_argument(
        "--max-tokens",
        type=human_int,
        default=max_tokens,
        help=f"Tokens of an answer at most. Default: {max_tokens}.",
    )


def sampling_of(args: argparse.Namespace, client: "ApiClient") -> dict[str, Any]:
    """Return the sampling fields of requests: flags, then the checkpoint's, then the usual ones."""
    own = client.card.get("default_sampling_params") or {}
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "seed")}
    usual = {name: value for name, value in _USUAL_SAMPLING.items() if name not in own}
    asked = {name: value for name, value in given.items() if value is not None}
    return {**usual, **asked, "max_tokens": args.max_tokens}


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
        self._card: Mapping[str, Any] | None = None
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
        """The model that requests name: the server's first, where none was given.

        Raises:
            EngineError: The server cannot be reached, or refuses.
        """
        return self._model or str(self.card["id"])

    @property
    def card(self) -> Mapping[str, Any]:
        """What the server says of the model; asked once. Empty of one that it does not list.

        Raises:
            EngineError: The server cannot be reached, or refuses.
        """
        if self._card is None:
            with _reachable(self._url):
                response = self._http.get(f"{self._url}/models")
            _check(response)
            cards = response.json()["data"]
            wanted = cards[:1] if self._model is None else cards
            named = (card for card in wanted if self._model in (None, card["id"]))
            self._card = next(named, {})
        return self._card

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a whole answer.

        Raises:
            UserInputError: The server says the request is wrong.
            EngineError: The server cannot be reached, or refuses.
        """
        with _reachable(self._url):
            response = self._http.post(self._url + path, json={"model": self.model, **body})
        _check(response)
        answer: Mapping[str, Any] = response.json()
        return answer

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
