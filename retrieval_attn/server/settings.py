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
    answer whose request says nothing about it. choices: `n` of a request, at most. Raises ConfigError for a value below
    1, or a name with "@".
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

    def __post_init__(self) -> None:
        if not self.name or "@" in self.name:
            raise ConfigError(
                f'A model\'s name must not be empty or have "@", got {self.name!r}: MODEL@CONTEXT names a context.'
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not value >= 1:
                raise ConfigError(f"{field.name} must be at least 1, got {value!r}.")
