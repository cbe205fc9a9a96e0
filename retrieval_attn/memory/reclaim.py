"""Idle memory that prefills and batches take back: int8 rows, idle prefix cache entries. Imports no torch.

A holder keeps idle data as long as there is room, without a fixed share. Code that needs memory calls `reclaim` first.
Holders are weakly referenced.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from retrieval_attn.memory.units import show_bytes

log = logging.getLogger(__name__)


class Holder(Protocol):
    """Holds memory that it can free at any time, in any thread."""

    def reclaim(self, host: int, device: int) -> tuple[int, int]:
        """Free at least `host` and `device` bytes, or all idle ones. Returns the freed bytes of host and GPU memory."""
        ...

    def idle_device_bytes(self) -> int:
        """Return the bytes of GPU memory that `reclaim` could free now."""
        ...


_holders: list[weakref.ref[Holder]] = []
_lock = threading.RLock()  # `_remove` may be called where this thread holds it: whenever a holder is collected


def register(holder: Holder, *, first: bool = False) -> None:
    """Add a holder until it is collected. first: it gives up its memory before all that are registered now."""
    reference = weakref.ref(holder, _remove)
    with _lock:
        _holders.insert(0 if first else len(_holders), reference)


def _remove(reference: weakref.ref[Holder]) -> None:
    with _lock:
        if reference in _holders:
            _holders.remove(reference)


def _alive() -> Iterable[Holder]:
    with _lock:
        holders = [reference() for reference in tuple(_holders)]
    return [one for one in holders if one is not None]


def idle_device_bytes() -> int:
    """Return the bytes of GPU memory that `reclaim` could free now."""
    return sum(one.idle_device_bytes() for one in _alive())


def reclaim(*, host: int = 0, device: int = 0) -> tuple[int, int]:
    """Have holders free at least `host` bytes of host and `device` bytes of GPU memory, or all idle ones.

    Returns the freed bytes of each. GPU memory returns to torch's allocator, not to the driver.
    """
    freed_host = freed_device = 0
    for holder in _alive():
        need = max(0, host - freed_host), max(0, device - freed_device)
        if not any(need):
            break
        more_host, more_device = holder.reclaim(*need)
        freed_host, freed_device = freed_host + more_host, freed_device + more_device
    if freed_host or freed_device:
        log.info("freed %s of host and %s of GPU memory: idle texts", show_bytes(freed_host), show_bytes(freed_device))
    return freed_host, freed_device
