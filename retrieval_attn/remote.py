"""Client side of a server with OpenAI's API: its address and key, models, streamed answers and errors. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from retrieval_attn.errors import ConfigError, RetrievalAttentionError

KEY_VARIABLE = "OPENAI_API_KEY"
MOST_SHOWN = 300
"""Characters of a server's error that a message quotes."""


class RemoteError(RetrievalAttentionError):
    """A server cannot be reached or refuses a request; the message quotes its answer."""


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a server. base: URL with the version and no trailing slash: "http://127.0.0.1:8000/v1"."""

    base: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Return the server at a URL, with or without /v1, with the key in the environment variable OPENAI_API_KEY.

        Raises ConfigError for a URL that is not http or https.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"--url {url!r} must be the address of a server, such as http://127.0.0.1:8000/v1")
        base = url.rstrip("/")
        if not parts.path.strip("/"):
            base += "/v1"
        return cls(base, os.environ.get(KEY_VARIABLE) or None)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def at(self, path: str) -> str:
        """Return the URL of a path of the API, such as "chat/completions"."""
        return f"{self.base}/{path}"


class Usage(NamedTuple):
    """Token counts of an answer. cached_tokens: prompt tokens found in the prefix cache."""

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int


class Delta(NamedTuple):
    """One line of a streamed answer.

    text: of the first choice. finish: reason of the end, "" before it. error: the server's error, "" without one.
    done: the stream has ended.
    """

    text: str = ""
    finish: str = ""
    usage: Usage | None = None
    error: str = ""
    done: bool = False


def http_client() -> ModuleType:
    """Import httpx. Raises ConfigError if it is not installed."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("requests to a server need httpx, which is not installed; pip install httpx") from None
    return httpx


def refusal(body: bytes | str) -> str:
    """Return a server's error on one line: the message of OpenAI's error object, or the whole body."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    error = found.get("error", found.get("detail")) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    line = " ".join(str(message or text).split())
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN - 3]}..."


def model_names(endpoint: Endpoint, timeout: float = 60.0) -> list[str]:
    """Return the ids that `GET /v1/models` lists, at least one. timeout: seconds.

    Raises RemoteError; ConfigError if httpx is not installed.
    """
    httpx = http_client()
    url = endpoint.at("models")
    try:
        response = httpx.get(url, headers=endpoint.headers, timeout=timeout)
    except httpx.HTTPError as error:
        raise RemoteError(
            f"cannot reach {url} ({type(error).__name__}: {error}); check that a server is running there"
        ) from None
    if response.status_code != 200:
        raise RemoteError(f"{url} answered {response.status_code}: {refusal(response.content)}")
    try:
        names = [str(one["id"]) for one in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        raise RemoteError(f"{url} returned no list of models, but {refusal(response.content)}") from None
    if not names:
        raise RemoteError(f"{url} lists no model; name one with --model")
    return names


def read_delta(line: str) -> Delta | None:
    """Parse a line of server-sent events of a chat or completion. Return None for a line without data.

    A line that cannot be parsed is returned as an error: the rest of the answer would have a gap.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return Delta(done=True)
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return Delta(error=f"a line that is no JSON object: {data[:80]!r}")
    if found.get("error"):
        return Delta(error=refusal(data))
    text = finish = ""
    for choice in found.get("choices") or []:
        if isinstance(choice, dict) and not choice.get("index"):
            text, finish = _text(choice), choice.get("finish_reason") or ""
    return Delta(text, finish, read_usage(found.get("usage")))


def read_usage(found: Any) -> Usage | None:
    """Parse the member "usage" of an answer. Return None if it is missing."""
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(found.get("prompt_tokens")), _count(found.get("completion_tokens")), _count(cached))


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
