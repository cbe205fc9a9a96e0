"""Traffic: copies under way from one device to the host, which hold its memory; LayerStats: counters of a layer."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from retrieval_attn.offload.threads import take_turns_often, wait_for


@dataclass
class LayerStats:
    """Counters of one layer since its cache was made. Seconds are wall clock, bytes are host memory read.

    host_seconds: retrieved attention as a whole; search_seconds and attend_seconds: its phases inside.
    copy_seconds, index_seconds: copying keys to the host and building indexes (with a GPU: in threads, while it
    computes); wait_seconds: prefill blocked by the host.
    """

    index_seconds: float = 0.0
    copy_seconds: float = 0.0
    wait_seconds: float = 0.0
    host_seconds: float = 0.0
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
    keys_scanned: int = 0
    bytes_read: int = 0

    def add(self, other: LayerStats) -> None:
        """Add every field of `other`."""
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))


BACKLOG = 8
"""Layers that may wait for their indexes, with their training data in memory, before prefill waits."""


class Leaving(Protocol):
    """One layer's work, as far as the traffic of its device goes."""

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""

    def leaving(self) -> list[Future[None]]:
        """Return the copies that still read the device's memory."""

    def building(self) -> list[Future[None]]:
        """Indexes that are not built yet."""


class Traffic:
    """The works under way from one device, in order.

    Who does a work keeps it, and its threads do: here it would keep the keys of its layer after a context is gone.
    """

    def __init__(self) -> None:
        self._works: list[weakref.ref[Leaving]] = []
        self._lock = threading.Lock()

    def add(self, work: Leaving) -> None:
        """`work` begins to copy from the device."""
        with self._lock:
            self._works = [one for one in self._works if one() is not None] + [weakref.ref(work)]

    def make_room(self, alone: bool = False, earlier: int = 1) -> float:
        """Wait before a layer takes memory for its keys: `earlier` layers before it may still be copied (alone: none
        may), and few may wait for their indexes. Returns the seconds waited. What went wrong is left to the work's own
        `finish`.
        """
        began = time.perf_counter()
        works = self._under_way()
        leaving = [left for work in works if (left := work.leaving())]
        before = leaving if alone else leaving[:-earlier]
        wait_for(future for left in before for future in left)
        building = [future for work in works for future in work.building()]
        wait_for(building[: max(0, len(building) - BACKLOG)])
        return time.perf_counter() - began if before or building[BACKLOG:] else 0.0

    def drain(self) -> None:
        """Wait until nothing is being copied from the device any more, so that the memory is free."""
        concurrent.futures.wait([future for work in self._under_way() for future in work.leaving()])

    def _under_way(self) -> list[Leaving]:
        with self._lock:
            works = [work for one in self._works if (work := one()) is not None and not work.done]
            self._works = [weakref.ref(work) for work in works]
            return works


@functools.cache
def traffic(device: torch.device) -> Traffic:
    """The traffic of `device`, which all caches on it share: they share its memory."""
    if device.type == "cuda":
        take_turns_often()
    return Traffic()
