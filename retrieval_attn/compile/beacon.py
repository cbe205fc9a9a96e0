"""Beacon: where threads of compiled code are, in words of memory that another process can look at.

A thread that answers a device writes what it does now, and since when. It is not asked: whoever looks needs neither
Python's lock nor the thread's attention, so that a thread that stands still can be seen (`stall_log.py`).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading

# Words of a slot; a slot has two cache lines.
(
    PHASE,  # what the thread does, below
    CALL,  # the number of the call that it does it for
    CALLS,  # how many calls the replay has
    GENERATION,  # the number of the replay
    SINCE,  # nanoseconds of the monotonic clock
    THREAD,  # the system's number of the thread
) = range(6)
IDLE, AWAITS_REQUEST, SEARCHES, COPIES, ANSWERS = range(5)
PHASES = ("idle", "waits for the device's request", "searches", "copies results", "writes the answer")
SLOTS, SLOT_WORDS = 32, 16
# Behind the slots: pools of threads, each the address of its control block, of its workers' words and their number.
POOLS, POOL_WORDS = 16, 4
# Behind the pools: the last look at which somebody here had Python's lock and said so.
HEARD = SLOTS * SLOT_WORDS + POOLS * POOL_WORDS
BYTES = 8 * (HEARD + 1)

_slots, _pools = itertools.count(), itertools.count()


def _shared() -> tuple[int, mmap.mmap]:
    if not hasattr(os, "memfd_create"):
        return -1, mmap.mmap(-1, BYTES)
    file = os.memfd_create("retrieval_attn-beacon")
    os.ftruncate(file, BYTES)
    return file, mmap.mmap(file, BYTES)


FILE, _memory = _shared()
"""File descriptor of the words, -1 where the system has no files in memory."""
_words = (ctypes.c_int64 * (BYTES // 8)).from_buffer(_memory)
_address = ctypes.addressof(_words)


def new_slot() -> int:
    """Address of a slot. The first is taken again after all the others: two threads at once are rare."""
    return _address + 8 * SLOT_WORDS * (next(_slots) % SLOTS)


def note_pool(control: int, busy: int, workers: int) -> None:
    """There is a pool of threads: addresses of its control block and of its workers' words, and how many these are."""
    at = SLOTS * SLOT_WORDS + POOL_WORDS * (next(_pools) % POOLS)
    _words[at : at + 3] = [control, busy, workers]


def note_heard(moment: int) -> None:
    """Python's lock was to be had after the look at a moment, in nanoseconds of the monotonic clock."""
    _words[HEARD] = moment


def note_thread(slot: int) -> None:
    """The calling thread is the one whose doings will be written in the slot at an address."""
    ctypes.c_int64.from_address(slot + 8 * THREAD).value = threading.get_native_id()


def slot_words(address: int) -> list[int]:
    """What is written in the slot at an address now."""
    return list((ctypes.c_int64 * SLOT_WORDS).from_address(address))
