"""Threads allocate from one arena, in a process that said so before they started."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from retrieval_attn.server.heap import GROWN_BYTES, HeapWatch

SCRIPT = """
import ctypes, os, sys, threading
from retrieval_attn.server.heap import use_one_arena

did = use_one_arena() if "one" in sys.argv else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
together = threading.Barrier(4)

def work():
    together.wait()
    assert libc.malloc(100_000)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
read, write = os.pipe()
libc.fdopen.restype = ctypes.c_void_p
stream = libc.fdopen(write, b"w")
libc.malloc_info(0, ctypes.c_void_p(stream))
libc.fclose(ctypes.c_void_p(stream))
print(did, os.read(read, 1 << 16).decode().count("<heap nr="))
"""


def printed(*arguments: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(
        command, env=environment | variables, check=True, capture_output=True, text=True
    ).stdout.split()  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_threads_allocate_from_one_arena() -> None:
    assert int(printed()[1]) > 1
    assert printed("one") == ["True", "1"]
    did, arenas = printed("one", MALLOC_ARENA_MAX="3")
    assert did == "False" and 1 < int(arenas) <= 3


def test_memory_is_given_back_when_the_process_has_grown() -> None:
    """By a part of what it had; from the least it had since."""
    now, given = [1 << 30], []

    def trim() -> None:
        given.append(now[0])
        now[0] -= GROWN_BYTES // 2

    watch = HeapWatch(resident=lambda: now[0], trim=trim)
    assert not watch.look()
    now[0] += GROWN_BYTES - 1
    assert not watch.look()
    now[0] += 1
    assert watch.look() and given == [(1 << 30) + GROWN_BYTES]
    now[0] += GROWN_BYTES - 1  # of what it had then
    assert not watch.look()
    now[0] = 1 << 20
    assert not watch.look()
    now[0] += GROWN_BYTES
    assert watch.look()
    now[0] = 64 << 30
    assert watch.look() and not watch.look()
    now[0] += GROWN_BYTES
    assert not watch.look()  # little of so much
    assert len(given) == 3


GROWS = """
import ctypes, sys
from retrieval_attn.server.heap import HeapWatch, resident_bytes, use_one_arena

use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-3, 1 << 25)  # as it is once large arrays were freed
watch = HeapWatch()
watch.look()
before, pieces = resident_bytes(), []
for _ in range(2000):
    for size in (200_000, 2_000):
        pieces.append(libc.malloc(size))
        ctypes.memset(pieces[-1], 1, size)
for piece in pieces[::2]:
    libc.free(piece)  # what stays lies between
grown = resident_bytes() - before
print(grown >> 20, watch.look(), (resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_what_lies_free_between_arrays_goes_back() -> None:
    grown, looked, left = subprocess.run(
        [sys.executable, "-c", GROWS], check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(grown) > 300 and looked == "True" and int(left) < 50


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_a_watch_looks_until_it_is_closed() -> None:
    looks: list[float] = []

    def resident() -> int:
        looks.append(time.monotonic())
        return 1

    with HeapWatch(seconds=0.01, resident=resident):
        until = time.monotonic() + 10
        while len(looks) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    count = len(looks)
    assert count >= 3
    time.sleep(0.05)
    assert len(looks) == count
