"""What building the codes of a layer costs the thread that reads: CPU time, and the time for which the GIL is held.

    python -m tools.measure_index_builds [--tokens 24000] [--heads 8] [--layers 12] [--device cpu]

Builds the index of one layer (`offload/build.py`, by its threads) again and again beside a thread that counts. Prints,
per layer: seconds, CPU milliseconds of the builders, milliseconds for which the counting thread waited for the GIL (its
time without that on a core and that in a queue for one, by the kernel's schedstat), the counting rate beside builds
over the rate alone, and function calls of Python and C.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.codes import codes
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.build import IndexBuild
from retrieval_attn.offload.threads import take_turns_often

QUERY_HEADS, QUERIES = 4, 256
"""Training queries: heads of a key-value head, and queries of each."""


class Counted(NamedTuple):
    """Result of a counting thread: seconds, seconds of waiting for the GIL and for a core, and how far it counted."""

    seconds: float
    gil: float
    queued: float
    numbers: int

    @property
    def rate(self) -> float:
        """Numbers per second that the thread was not in a queue for a core."""
        return self.numbers / max(1e-9, self.seconds - self.queued)


def counted_beside(work: Callable[[], object]) -> Counted:
    """Run `work` while another thread counts in Python."""
    found: list[Counted] = []
    begun, ended = threading.Event(), threading.Event()

    def scheduled() -> tuple[float, float]:
        return tuple(  # type: ignore[return-value]
            int(part) / 1e9 for part in Path("/proc/thread-self/schedstat").read_text().split()[:2]
        )

    def count() -> None:
        begun.set()
        number, is_set = 0, ended.is_set
        start, (core, queued) = time.perf_counter(), scheduled()
        while not is_set():
            number += 1
        seconds, (core_end, queued_end) = time.perf_counter() - start, scheduled()
        waited = queued_end - queued
        found.append(Counted(seconds, seconds - (core_end - core) - waited, waited, number))

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return found[0]


def calls_of(work: Callable[[], object]) -> int:
    """Function calls of Python and C in all threads that `work` starts or that start meanwhile."""
    calls = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[0] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls[0]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24000)
    parser.add_argument("--heads", type=int, default=8, help="key-value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codes", action="store_true", help="code keys, too, as the device would")
    args = parser.parse_args()
    torch.set_num_threads(1)
    take_turns_often()
    device, rng = torch.device(args.device), np.random.default_rng(0)
    spread = np.exp(-np.arange(args.head_dim) / 40, dtype=np.float32)
    mixed = (rng.standard_normal((args.heads, args.head_dim, args.head_dim)) * spread).astype(np.float32)
    keys = rng.standard_normal((args.heads, args.tokens, args.head_dim)).astype(np.float32) @ mixed
    stored = from_float32(keys, Format.BFLOAT16)
    spec = IndexSpec.of("device", {"key_bytes": args.head_dim // 2})
    host = SequenceKV(args.heads, args.head_dim, args.head_dim, Format.BFLOAT16, index=spec)
    host.reserve(args.tokens)
    host.append(stored, stored)
    there = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).to(device)
    some = rng.standard_normal((args.heads * QUERY_HEADS, QUERIES, args.head_dim)).astype(np.float32)
    queries = torch.from_numpy(some).to(device)

    def layer() -> None:
        build = IndexBuild(0, device, None, True, threading.Event())
        build.add(host, (0, args.tokens), queries, lambda: there, True)
        build.fetch(None)
        build.run(None)

    if not args.codes:
        vars(codes)["write_codes"] = lambda *given: None  # a launch, in no time

    layer()
    layer()  # with all modules that the first imported
    time.sleep(1)  # until the pool's threads have ended: new ones have a profile
    calls = calls_of(layer)
    time.sleep(1)
    layer()
    alone = counted_beside(lambda: time.sleep(1))
    seconds, cpu, counted = [], [], []
    for _ in range(args.layers):
        began, used = time.perf_counter(), time.process_time()
        layer()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        counted.append(counted_beside(layer))
    waits = [1e3 * one.gil for one in counted]
    result = {
        "seconds": round(statistics.median(seconds), 4),
        "cpu_ms": round(1e3 * statistics.median(cpu), 2),
        "gil_ms": [round(one, 2) for one in statistics.quantiles(waits, n=4)],
        "rate": round(statistics.median(one.rate for one in counted) / alone.rate, 3),
        "calls": calls,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
