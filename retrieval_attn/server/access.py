"""Access to a server: API keys, the address that it listens on, allowed Host and Origin headers. Imports no torch."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from retrieval_attn.errors import ConfigError
from retrieval_attn.server.failure import ApiError

VARIABLE = "RETRIEVAL_ATTN_API_KEY"
MIN_LENGTH = 8


@dataclass(frozen=True)
class Caller:
    """A caller of the API. namespace: the prefix cache is shared within it only, so response times reveal nothing of
    other callers' prompts. admin: may change saved contexts and read metrics.
    """

    name: str
    namespace: str
    admin: bool


ANYBODY = Caller("anybody", "", True)
"""The caller of a server without keys, which listens on this machine only."""


class ApiKey(NamedTuple):
    """A key and its caller."""

    key: str
    caller: Caller


class Keys:
    """API keys of a server. False without keys: every caller is then `ANYBODY`."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        """Raises ConfigError for a key that is too short or given twice."""
        self._callers: list[tuple[bytes, Caller]] = []
        for key, caller in keys:
            if len(key) < MIN_LENGTH:
                raise ConfigError(f"A key needs at least {MIN_LENGTH} characters, {caller.name!r} has {len(key)}.")
            digest = _digest(key)
            if any(known == digest for known, _ in self._callers):
                raise ConfigError(f"The key of {caller.name!r} is given twice; give each caller its own key.")
            self._callers.append((digest, caller))

    @classmethod
    def of(cls, file: str | Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        """Load the keys of a file, and an admin's key from RETRIEVAL_ATTN_API_KEY.

        A line of the file is KEY, KEY NAME or KEY NAME admin; # begins a comment. Callers of one name share a prefix
        cache. Raises ConfigError for any other line, OSError.
        """
        keys: list[ApiKey] = []
        if environment.get(VARIABLE):
            keys.append(ApiKey(environment[VARIABLE], Caller("environment", "key:environment", True)))
        for number, line in enumerate(Path(file).read_text(encoding="utf-8-sig").splitlines() if file else (), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 3 or words[2:] not in ([], ["admin"]):
                raise ConfigError(
                    f"{file}, line {number}: needs KEY, KEY NAME or KEY NAME admin; got {len(words)} words."
                )
            name = words[1] if len(words) > 1 else f"line {number}"
            keys.append(ApiKey(words[0], Caller(name, f"key:{name}", words[2:] == ["admin"])))
        if file and not keys:
            raise ConfigError(f"{file} has no key; write one per line, or leave out --api-key-file.")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller for an Authorization header, None if the key is unknown. Compares all keys in any case."""
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
    """Hash a key: comparing digests of one length reveals nothing about the key's length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


BACKLOG = 1024
_NETLOC = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+?)\.?)(?::[0-9]{1,5})?")


class Address(NamedTuple):
    """Address of a listening socket; port 0 for a free one."""

    host: str
    port: int


def require_safe_host(host: str, *, has_keys: bool) -> None:
    """Raise ConfigError if other machines can reach the host and no key is required."""
    if not has_keys and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines send requests, and no request needs a key: give --api-key-file or "
            "RETRIEVAL_ATTN_API_KEY, or listen on 127.0.0.1."
        )


def listening(address: Address) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address is in use or not of this machine."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"Cannot listen on {address.host} port {address.port}: {error.strerror}; give another --port or --host."
        ) from error
    found.listen(BACKLOG)
    return found


class AllowedHosts:
    """Host names and origins that a server without keys accepts.

    Any web page can make a browser send requests to this server, through a name that resolves to this machine (DNS
    rebinding) or across origins. Without keys, the checks of Host and Origin prevent that.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """names: accepted besides those of this machine; "*" for all. origins: such as https://chat.example."""
        self._names = {name.lower() for name in (*names, socket.gethostname())}
        self._origins = {origin.lower() for origin in origins}

    def check(self, host: bytes, origins: Sequence[bytes]) -> None:
        """Check the Host header ("" for none) and the Origin headers. Raises ApiError 403."""
        given = host.decode("latin-1")
        if given and not self._knows(given):
            raise ApiError(
                403, f"This server has no keys and accepts only host names of this machine, but the Host header is "
                f"{given[:80]!r}. Start it with --allowed-host NAME, or with keys.", code="host_not_allowed",
            )  # fmt: skip
        for origin in (one.decode("latin-1") for one in origins):
            netloc = origin.partition("://")[2]
            if origin.lower() not in self._origins and netloc.lower() != given.lower() and not _is_local(netloc):
                raise ApiError(
                    403, f"This server has no keys and refuses requests of pages of {origin[:80]!r}. Start it with "
                    "--cors ORIGIN, or with keys.", code="origin_not_allowed",
                )  # fmt: skip

    def _knows(self, netloc: str) -> bool:
        return "*" in self._names or _name_of(netloc) in self._names or _is_local(netloc)


def _name_of(netloc: str) -> str:
    """Return the name in NAME or NAME:PORT, "" for anything else."""
    found = _NETLOC.fullmatch(netloc.lower())
    return "" if found is None else (found["v6"] or found["name"])


def _is_local(netloc: str) -> bool:
    name = _name_of(netloc)
    return name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
