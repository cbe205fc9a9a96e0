"""How many keys one scan may have before a graph search is faster, measured once per machine.

A scan costs the same per key; a graph search costs about the same at every length, because it scores a number of
keys and not a share of them. So the price of a key and that of a graph search are measured, and the rest is a division.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
import numpy as np

from retrieval_attn.index.base import create
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.synthetic import synthetic_head

log = logging.getLogger(__name__)
_lock = threading.Lock()

KEYS, SCANNED = 32768, 131072
"""Keys of the graph and of the shorter scan, and of the longer one."""
REPEATS = 7
COLD = 2.0
"""A head is searched once per token, its graph cold in the caches; the same search repeated is about twice as fast.
A scan streams, and is as fast cold as warm."""
TYPICAL_SHARE = 0.125
"""Of a sketch's leaves, what heads of trained models need to have looked at."""
VERSION = 3
"""Raised when what is measured changes."""


def cache_file() -> Path:
    """Where the measurement of this machine is kept: below $XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "retrieval_attn" / "crossover.json"


def crossover(head_dim: int) -> int:
    """Keys from which on a graph search for the best 100 is faster than the scan of a sketch, for keys of `head_dim`.

    Measured on the first call (a few seconds, told in the log) and kept in `cache_file()`; a file that cannot be
    read or written is measured anew by the next process, with a line in the log. Threads wait for one that measures.
    """
    with _lock:
        return _crossover(head_dim)


@functools.cache
def _crossover(head_dim: int) -> int:
    machine = f"{VERSION}/{platform.machine()}/{_processor()}/{numba.get_num_threads()}/{head_dim}"
    known = _read()
    if machine not in known:
        started = time.perf_counter()
        known[machine] = _measure(head_dim)
        log.info(
            "measured once for this machine: a scan is as fast as a graph up to %d keys of %d elements (%.1f s)",
            known[machine],
            head_dim,
            time.perf_counter() - started,
        )
        _write(known)
    return known[machine]


def _measure(head_dim: int) -> int:
    head = synthetic_head(SCANNED, head_dim=head_dim, train=1024, decode=16)
    keys = from_float32(head.keys, Format.BFLOAT16)
    queries = head.train_rotated
    scans = [
        create("sketch", keys[:count], fmt=Format.BFLOAT16, queries=queries, share=TYPICAL_SHARE)
        for count in (KEYS, SCANNED)
    ]
    graph = create("roargraph", keys[:KEYS], fmt=Format.BFLOAT16, queries=queries, exact_below=0)
    # many heads in one call, as in decode, so that the price of a call is not measured
    heads = head.decode.shape[1]
    groups = np.ascontiguousarray(head.decode.transpose(1, 0, 2))
    calls = [functools.partial(type(scan).search_heads, [scan] * heads, groups, 100) for scan in scans]
    few, many, graph_seconds = _seconds([*calls, lambda: graph.search(groups.reshape(-1, head_dim), 100)])
    return _crossing(few, many, graph_seconds * COLD)


def _crossing(few: float, many: float, graph: float) -> int:
    """Keys at which a scan takes as long as the graph, of the seconds for KEYS and SCANNED keys.

    What keys cost, not what a call does; on a busy machine the difference may be nothing, so a quarter of a call at
    least is keys.
    """
    return int(graph / max((many - few) / (SCANNED - KEYS), many / SCANNED / 4))


def _seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The least time of each, taken in turns: a machine that slows down must not favour one of them."""
    least = [math.inf] * len(calls)
    for repeat in range(1 + REPEATS):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            call()
            if repeat:
                least[number] = min(least[number], time.perf_counter() - started)
    return least


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _read() -> dict[str, int]:
    try:
        known = json.loads(cache_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s): measuring again", cache_file(), error)
        return {}
    return {str(key): int(value) for key, value in known.items()}


def _write(known: dict[str, int]) -> None:
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next process measures again", path, error)
