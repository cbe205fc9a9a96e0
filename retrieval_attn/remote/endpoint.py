"""Endpoint: where a server with OpenAI's API is, by which key, and what it said went wrong."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from retrieval_attn.errors import ConfigError

__all__ = ["Endpoint", "http_client", "refusal"]

KEY_VARIABLE = "OPENAI_API_KEY"
MOST_SHOWN = 300
"""Characters of what a server says that a message repeats."""


@dataclass(frozen=True)
class Endpoint:
    """base: without a slash at its end, and with the version, as in "http://127.0.0.1:8000/v1"."""

    base: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """The server at a URL, with or without /v1; its key is that of the environment variable OPENAI_API_KEY.

        Raises ConfigError for what is no URL of http or https.
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
        """Of every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def at(self, path: str) -> str:
        """The URL of something of the API, as "chat/completions"."""
        return f"{self.base}/{path}"


def http_client() -> ModuleType:
    """httpx. Raises ConfigError where it is not installed."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("requests to a server need httpx, which is not installed; pip install httpx") from None
    return httpx


def refusal(body: bytes | str) -> str:
    """What a server says is wrong: the message of OpenAI's errors, or its whole answer, on one line."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    error = found.get("error", found.get("detail")) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    said = " ".join(str(message or text).split())
    return said if len(said) <= MOST_SHOWN else f"{said[: MOST_SHOWN - 3]}..."
