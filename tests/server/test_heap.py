"""Threads allocate from one arena, in a process that said so before they started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, os, sys, threading
from retrieval_attn.server.engine_process import set_allocator

did = set_allocator() if "one" in sys.argv else None
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


GROWS = """
import ctypes, os, sys
from pathlib import Path
from retrieval_attn.server.engine_process import set_allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # from here on glibc maps only what is larger
if "set" in sys.argv:
    assert set_allocator()
before, pieces = resident(), []
for _ in range(200):
    for size in (2_000_000, 2_000):
        pieces.append(libc.malloc(size))
        ctypes.memset(pieces[-1], 1, size)
for piece in pieces[::2]:
    libc.free(piece)  # what stays lies between
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_arrays_between_others_go_back_when_they_are_freed() -> None:
    def left(*arguments: str) -> int:
        command = [sys.executable, "-c", GROWS, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert left() > 300
    assert left("set") < 50
