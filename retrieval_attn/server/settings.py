"""Settings: what a server is told when it starts, beside the model and the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass, fields

from retrieval_attn.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """name: of the model, as clients know it. body_bytes: of a request, at most. waiting_requests, waiting_tokens: that
    may wait for their first token; more are told to come again. wait_seconds: that one may have to wait for its first
    token, as expected from the pace of late; who had to wait longer is told to come again. deadline_seconds: from a
    request to its last token. drain_seconds: for answers under way when the server is told to end. answer_tokens: of an
    answer whose request says nothing about it. choices: `n` of a request, at most. connections: of one address, at
    most. allowed_hosts: names of this server in requests without a key, beside those of this machine; "*": any. cors:
    origins of web pages that may use it from a browser, such as https://chat.example. parse_special: words of special
    tokens in raw prompts become these tokens. Raises ConfigError for a number below 1, a name with "@", or an origin
    with a path.
    """

    name: str
    body_bytes: int = 64 << 20
    waiting_requests: int = 256
    waiting_tokens: int = 4 << 20
    wait_seconds: float = 60.0
    deadline_seconds: float = 600.0
    drain_seconds: float = 30.0
    answer_tokens: int = 1024
    choices: int = 16
    connections: int = 512
    allowed_hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    parse_special: bool = False

    def __post_init__(self) -> None:
        if not self.name or "@" in self.name:
            raise ConfigError(
                f'A model\'s name must not be empty or have "@", got {self.name!r}: MODEL@CONTEXT names a context.'
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 1:
                raise ConfigError(f"{field.name} must be at least 1, got {value!r}.")
        for origin in self.cors:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ConfigError(f"--cors needs an origin, SCHEME://HOST or SCHEME://HOST:PORT, or *; got {origin!r}.")

    @property
    def held_body_bytes(self) -> int:
        """Of all bodies that are read or parsed at a time."""
        return 4 * self.body_bytes
