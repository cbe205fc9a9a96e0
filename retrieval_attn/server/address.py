"""Address: where a server listens, and to whom it may without keys. Light: what is wrong with it is said at once."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from retrieval_attn.errors import ConfigError

__all__ = ["Address", "listening", "require_safe_host"]

BACKLOG = 1024


class Address(NamedTuple):
    """Where a server listens; port 0: one that is free."""

    host: str
    port: int


def require_safe_host(host: str, *, has_keys: bool) -> None:
    """Raise ConfigError for a host that others reach, where nobody needs a key."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not has_keys:
        raise ConfigError(
            f"--host {host} lets other machines ask, and nobody needs a key: give --api-key-file or "
            "RETRIEVAL_ATTN_API_KEY, or listen on 127.0.0.1."
        )


def listening(address: Address) -> socket.socket:
    """A socket there. Raises ConfigError where another program listens, or the address is not this machine's."""
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
