"""Keys: who may ask, told by the key that a request brings; kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrieval_attn.errors import ConfigError

__all__ = ["VARIABLE", "Caller", "Keys"]

VARIABLE = "RETRIEVAL_ATTN_API_KEY"
MIN_LENGTH = 8


@dataclass(frozen=True)
class Caller:
    """Who asks. namespace: what is read for them is shared within it alone, so that nobody learns from the time of an
    answer what others asked. admin: may change saved contexts and see metrics.
    """

    name: str
    namespace: str
    admin: bool


ANYBODY = Caller("anybody", "", True)
"""Everybody, where there are no keys: the server then listens to this machine alone."""


class Keys:
    """See the module. False where there are none: then everybody is `ANYBODY`."""

    def __init__(self, keys: Sequence[tuple[str, Caller]] = ()) -> None:
        """Raises ConfigError for a key that is too short, or that is there twice."""
        self._callers: list[tuple[bytes, Caller]] = []
        for key, caller in keys:
            if len(key) < MIN_LENGTH:
                raise ConfigError(f"A key needs at least {MIN_LENGTH} characters, {caller.name!r} has {len(key)}.")
            digest = _digest(key)
            if any(known == digest for known, _ in self._callers):
                raise ConfigError(f"The key of {caller.name!r} is there twice; give each caller one of its own.")
            self._callers.append((digest, caller))

    @classmethod
    def of(cls, file: str | Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        """Keys of a file, and the one of RETRIEVAL_ATTN_API_KEY, an admin's.

        A line of the file is KEY, KEY NAME or KEY NAME admin; # begins a comment. Callers with one name share what is
        read for them. Raises ConfigError for another line, OSError.
        """
        keys: list[tuple[str, Caller]] = []
        if environment.get(VARIABLE):
            keys.append((environment[VARIABLE], Caller("environment", "key:environment", True)))
        for number, line in enumerate(Path(file).read_text(encoding="utf-8-sig").splitlines() if file else (), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 3 or words[2:] not in ([], ["admin"]):
                raise ConfigError(
                    f"{file}, line {number}: needs KEY, KEY NAME or KEY NAME admin; got {len(words)} words."
                )
            name = words[1] if len(words) > 1 else f"line {number}"
            keys.append((words[0], Caller(name, f"key:{name}", words[2:] == ["admin"])))
        if file and not keys:
            raise ConfigError(f"{file} has no key; write one on a line, or leave the file out to serve this machine.")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller | None:
        """Who brings this header, "Bearer KEY"; None: nobody who is known. All keys are compared, whichever fits."""
        if not self._callers:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _digest(key: str) -> bytes:
    """Digests have one length: comparing them tells nothing about a key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
