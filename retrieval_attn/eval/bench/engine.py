"""`python -m retrieval_attn.eval.bench.engine`: what the host side of a decode step costs on this machine.

Times the pool of worker threads, attention over ids, and whole steps of one layer by kind of index and number of
threads, beside the earlier way (one parallel kernel after the other) in the same run. Prints tables; the last line is
JSON. Cold: caches are emptied before every step, and each step has another query, as in decode.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, njit

import retrieval_attn.eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.cpu.gather import attend_ids_once, attend_rows
from retrieval_attn.cpu.host_attend import attend_apart, attend_path
from retrieval_attn.cpu.pool import SPIN_MICROSECONDS, Pool, run_job
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.eval.flags import parse_lengths
from retrieval_attn.index.formats import Format, from_float32, kernel_view
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.synthetic import synthetic_head
from retrieval_attn.index.task.atomics import at_address, atomic_load, atomic_swap, nanoseconds

__all__ = ["add_arguments", "main", "run"]

SCALE = 0.09
DECODED = 16
"""Queries per head that steps take in turn."""
EMPTY_TASKS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add = parser.add_argument
    add("--tokens", default="32768,131072", metavar="N,N", help="keys per head (default: %(default)s)")
    add("--kinds", default="flat,flat-int8,sketch,roargraph", help="kinds of index (default: %(default)s)")
    add("--formats", default="bfloat16", metavar="NAME,NAME", help="storage of keys and values (default: %(default)s)")
    add("--threads", default="", metavar="N,N", help="threads to try (default: 1, 2, 4, 8, all but one, all)")
    add("--kv-heads", type=int, default=8, help="key-value heads of the layer (default: %(default)s)")
    add("--group", type=int, default=4, help="query heads of each (default: %(default)s)")
    add("--head-dim", type=int, default=128, help="(default: %(default)s)")
    add("--retrieve", type=int, default=100, help="keys attended to (default: %(default)s)")
    add("--steps", type=int, default=16, help="steps per figure; the median is given (default: %(default)s)")
    add("--layers", type=int, default=32, help="layers of the model that a token's cost is given for")
    add("--spin", type=float, default=SPIN_MICROSECONDS, metavar="US", help="microseconds that workers look for jobs")
    add("--soak", type=int, default=1_000_000, metavar="N", help="jobs of the soak (default: %(default)s)")
    add("--only", default="pool,attend,torch,step,soak", help="parts to run (default: all)")


@cfunc("int64(int64, int64, int64)", cache=True)
def _nothing(descriptor: int, task: int, worker: int) -> int:
    return 0


@cfunc("int64(int64, int64, int64)", cache=True)
def _note_start(descriptor: int, task: int, worker: int) -> int:
    """Keep the moment of the worker's first task in its word, then last 50 us."""
    began = nanoseconds()
    if atomic_load(descriptor + 8 * worker) == 0:
        atomic_swap(descriptor + 8 * worker, began)
    while nanoseconds() - began < 50_000:
        pass
    return 0


@njit(nogil=True, cache=True)
def _time_jobs(control: int, function: int, tasks: int, width: int, nanos: npt.NDArray[np.int64]) -> None:
    for i in range(len(nanos)):
        began = nanoseconds()
        run_job(control, function, 0, tasks, width)
        nanos[i] = nanoseconds() - began


@cfunc("int64(int64)", cache=True)
def _foreign(address: int) -> int:
    """Body of a thread that Python does not know: [control, function, tasks, width, times at, number of times]."""
    words = carray(at_address(address), 6, np.int64)
    nanos = carray(at_address(words[4]), words[5], np.int64)
    _time_jobs(words[0], words[1], words[2], words[3], nanos)
    return 0


def _microseconds(nanos: npt.NDArray[np.int64]) -> dict[str, float]:
    median, high = np.percentile(nanos, [50, 90])
    return {"median": round(float(median) / 1e3, 2), "p90": round(float(high) / 1e3, 2)}


def measure_pool(threads: int, spin: float) -> dict[str, Any]:
    """Microseconds of a job of 32 empty tasks, and until the last of the pool's threads began to help."""
    nothing: Any = _nothing.address
    note: Any = _note_start.address
    foreign: Any = _foreign.address
    result: dict[str, Any] = {"threads": threads}
    with Pool(threads, spin_microseconds=spin) as pool:
        nanos = np.zeros(20_000, np.int64)
        _time_jobs(pool.address, nothing, EMPTY_TASKS, threads, nanos[:1000])
        _time_jobs(pool.address, nothing, EMPTY_TASKS, threads, nanos)
        result["hot"] = _microseconds(nanos)
        other = np.zeros(20_000, np.int64)
        words = np.array([pool.address, nothing, EMPTY_TASKS, threads, other.ctypes.data, len(other)], np.int64)
        thread, library = ctypes.c_ulong(), ctypes.CDLL(None)
        argument = ctypes.c_void_p(int(words.ctypes.data))
        library.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(foreign), argument)
        library.pthread_join(thread, None)
        result["hot, foreign thread"] = _microseconds(other)
        for name, idle in (("after 2 ms", 0.002), ("after 20 ms", 0.02)):
            one, starts = np.zeros(1, np.int64), []
            empties = []
            for _ in range(60):
                time.sleep(idle)
                _time_jobs(pool.address, nothing, EMPTY_TASKS, threads, one)
                empties.append(int(one[0]))
            for _ in range(60):
                noted = np.zeros(pool.workers, np.int64)
                time.sleep(idle)
                began = time.perf_counter_ns()
                pool.run(note, noted.ctypes.data, 8 * threads)
                if noted[:threads].all():
                    starts.append(int(noted[:threads].max()) - began)
            result[name] = _microseconds(np.array(empties))
            result[f"{name}, last helper"] = _microseconds(np.array(starts)) if starts else "none came"
            result[f"{name}, all helped"] = f"{len(starts)} of 60"
        began = time.perf_counter_ns()
        for _ in range(5000):
            pool.run(nothing, 0, EMPTY_TASKS)
        result["from Python"] = {"median": round((time.perf_counter_ns() - began) / 5e6, 2)}
    return result


@njit(nogil=True, cache=True)
def _time_attention(
    queries: Any, keys: Any, values: Any, ids: Any, scored: bool, rows: Any, scores: Any, out: Any, nanos: Any
) -> None:
    """Attention of each head over its ids: keys and values gathered, or values only, as after a search."""
    heads = len(keys)
    for i in range(len(queries)):
        began = nanoseconds()
        if scored:
            base = values[i % heads].ctypes.data
            for j in range(ids.shape[1]):
                rows[j] = base + np.int64(ids[i, j]) * values.strides[1]
                scores[j] = np.float32(j % 13)
            attend_rows(values, rows, scores, ids.shape[1], np.float32(SCALE), np.float32(0), out)
        else:
            attend_ids_once(
                queries,
                i,
                keys[i % heads],
                values[i % heads],
                ids[i],
                np.float32(SCALE),
                np.float32(0),
                rows,
                scores,
                out,
            )
        nanos[i] = nanoseconds() - began


def measure_attention(head_dim: int, fmt: Format = Format.BFLOAT16) -> list[dict[str, Any]]:
    """Microseconds per query head over k ids of stored keys and values, one thread."""
    rng = np.random.default_rng(0)
    heads, tokens, queries = 16, 65536, 64
    stored = [aligned_empty((heads, tokens, fmt.width(head_dim)), fmt.dtype) for _ in range(2)]
    for array in stored:
        array[:] = from_float32(rng.standard_normal((tokens, head_dim), dtype=np.float32), fmt)
    keys, values = (kernel_view(array, fmt) for array in stored)
    asked = rng.standard_normal((queries, head_dim), dtype=np.float32)
    result = []
    for retrieve in (100, 2000):
        rows, scores, out = np.zeros(retrieve, np.int64), np.zeros(retrieve, np.float32), np.zeros(head_dim, np.float32)
        row: dict[str, Any] = {"format": fmt.value, "k": retrieve}
        for scored in (False, True):
            name = "values only" if scored else "keys and values"
            nanos, all_nanos = np.zeros(queries, np.int64), []
            for turn in range(12):
                if turn < 9:  # the last turns repeat their ids
                    ids = rng.integers(0, tokens, (queries, retrieve)).astype(np.int32)
                    ids.sort(axis=1)
                else:
                    ids[:] = ids[0]
                used = (asked, keys, values) if turn < 9 else (asked, keys[:1], values[:1])
                _time_attention(*used, ids, scored, rows, scores, out, nanos)
                all_nanos.append(nanos.copy())
            row[f"{name}, cold"] = _microseconds(np.concatenate(all_nanos[1:9]))
            row[f"{name}, warm"] = _microseconds(np.concatenate(all_nanos[10:]))
        result.append(row)
    return result


def measure_torch(threads: int, spin: float) -> dict[str, float]:
    """Milliseconds of a matrix product on all of torch's threads: without a pool, beside an idle one, after it."""
    import torch

    matrix = torch.randn(768, 768)

    def product() -> float:
        taken = []
        for _ in range(60):
            began = time.perf_counter()
            torch.mm(matrix, matrix)
            taken.append(time.perf_counter() - began)
        return round(float(np.median(taken)) * 1e3, 3)

    product()
    rounds: dict[str, list[float]] = {"without a pool": [], "beside an idle pool": [], "after it was closed": []}
    nothing: Any = _nothing.address
    for _ in range(5):
        rounds["without a pool"].append(product())
        with Pool(threads, spin_microseconds=spin) as pool:
            pool.run(nothing, 0, EMPTY_TASKS)
            time.sleep(spin / 1e6 + 0.001)
            rounds["beside an idle pool"].append(product())
        rounds["after it was closed"].append(product())
    return {"torch threads": float(torch.get_num_threads()), **{k: float(np.median(v)) for k, v in rounds.items()}}


def _layer(args: argparse.Namespace, tokens: int, fmt: Format) -> tuple[Any, Any, Any, Any]:
    """Keys, values, training queries and decode queries of a layer; two heads' numbers, repeated."""
    made = [
        synthetic_head(tokens, head_dim=args.head_dim, group=args.group, train=4096, decode=DECODED, seed=seed)
        for seed in range(min(2, args.kv_heads))
    ]
    heads = [made[i % len(made)] for i in range(args.kv_heads)]
    keys = np.stack([from_float32(head.keys, fmt) for head in heads])
    values = keys[::-1].copy()
    train = np.concatenate([head.train_rotated for head in heads])
    asked = np.concatenate([head.decode for head in heads])
    return keys, values, train, asked


def _flusher() -> Callable[[], None]:
    """A function that leaves other data in the caches of all cores that share the last one."""
    size = 64 << 20
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if cache.exists():
        size = 2 * int(cache.read_text().strip().removesuffix("K")) * 1024
    room = np.zeros(min(size, 1 << 30) // 8, np.int64)

    def flush() -> None:
        room[:] += 1

    return flush


def _median_step(args: argparse.Namespace, attend: Callable[[npt.NDArray[Any]], Any], asked: Any) -> dict[str, float]:
    """Milliseconds of `attend`, warm and cold, median and best (for machines that are not quiet), and its counts."""
    flush = _flusher()
    result: dict[str, float] = {}
    for name, cold in (("warm ms", False), ("cold ms", True)):
        taken, search, scanned = [], [], []
        for i in range(args.steps + 2):
            queries = np.ascontiguousarray(asked[:, i % DECODED : i % DECODED + 1])
            if cold:
                flush()
                time.sleep(0.0001)
            began = time.perf_counter()
            got = attend(queries)
            taken.append(time.perf_counter() - began)
            search.append(got.search_seconds)
            scanned.append(got.keys_scanned)
        result[name] = round(float(np.median(taken[2:])) * 1e3, 3)
        result[name.replace("ms", "best ms")] = round(min(taken[2:]) * 1e3, 3)
        result[name.replace("ms", "search ms")] = round(float(np.median(search[2:])) * 1e3, 3)
    result["scanned per query head"] = round(float(np.mean(scanned)) / len(asked), 1)
    return result


def _apart(path: SequenceKV, tokens: int, retrieve: int) -> Callable[[npt.NDArray[Any]], Any]:
    return lambda queries: attend_apart(path, queries, 4, tokens, retrieve, SCALE, None, None)


def _in_step(path: SequenceKV, tokens: int, retrieve: int) -> Callable[[npt.NDArray[Any]], Any]:
    return lambda queries: attend_path(path, queries, 4, tokens, retrieve, scale=SCALE)


def measure_steps(
    args: argparse.Namespace, tokens: int, threads: Sequence[int], fmt: Format = Format.BFLOAT16
) -> list[dict[str, Any]]:
    """Steps of one layer: each kind on each number of threads; the earlier way with Numba's threads first."""
    keys, values, train, asked = _layer(args, tokens, fmt)
    lses, rows = {}, []
    for kind in args.kinds.split(","):
        with Pool(max(threads), spin_microseconds=args.spin) as pool:
            path = SequenceKV(
                args.kv_heads,
                args.head_dim,
                args.head_dim,
                fmt,
                index=IndexSpec.of("flat", {"codes": "int8"}) if kind == "flat-int8" else IndexSpec.of(kind),
                pool=pool,
            ).reserve(tokens)
            path.append(keys, values)
            path.build_index(4, tokens, train)
            shape = {"tokens": tokens, "format": fmt.value, "kind": kind, "build s": round(path.index_seconds, 2)}
            shape["GB"] = round((path.nbytes + path.index_nbytes) / 1e9, 3)
            first = np.ascontiguousarray(asked[:, :1])
            lses[kind] = attend_path(path, first, 4, tokens, args.retrieve, scale=SCALE).lse
            if "flat" in lses:  # without the exact one there is nothing to compare with
                shape["mass of the exact top k"] = round(float(np.exp(lses[kind] - lses["flat"]).mean()), 4)
            before = _median_step(args, _apart(path, tokens, args.retrieve), asked)
            rows.append({**shape, "way": "parallel kernels", "threads": numba.get_num_threads(), **before})
        base: float | None = None
        for count in threads:
            # a pool of its own: another one's spinning threads would be in the way
            with Pool(count, spin_microseconds=args.spin) as pool:
                path.pool = pool
                step = _median_step(args, _in_step(path, tokens, args.retrieve), asked)
            base = step["cold ms"] if base is None else base
            rows.append(
                {
                    **shape,
                    "way": "step",
                    "threads": count,
                    **step,
                    "times one thread": round(base / step["cold ms"], 2),
                    "ms per token": round(step["cold ms"] * args.layers, 2),
                }
            )
    return rows


def measure_soak(jobs: int) -> dict[str, float]:
    """Seconds and further bytes of memory that so many small jobs take."""
    nothing: Any = _nothing.address
    with Pool(min(2, os.cpu_count() or 1)) as pool:
        nanos = np.zeros(10_000, np.int64)
        _time_jobs(pool.address, nothing, 8, 2, nanos)
        before, began = _resident(), time.perf_counter()
        for _ in range(max(1, jobs // len(nanos))):
            _time_jobs(pool.address, nothing, 8, 2, nanos)
        seconds = time.perf_counter() - began
    return {"jobs": jobs, "seconds": round(seconds, 2), "bytes gained": _resident() - before}


def _resident() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(given: str) -> list[int]:
    cores = _cores()
    if given:
        return [int(part) for part in given.split(",")]
    return sorted({count for count in (1, 2, 4, 8, cores - 1, cores) if 1 <= count <= cores})


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(columns), *lines[1:]])


def _cell(value: Any) -> str:
    return (
        f"{value['median']}" + (f" (p90 {value['p90']})" if "p90" in value else "")
        if isinstance(value, dict)
        else str(value)
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for; prints a table of each part and returns all figures."""
    threads, parts = _threads(args.threads), args.only.split(",")
    formats = [Format.from_name(name) for name in args.formats.split(",")]
    figures: dict[str, Any] = {"machine": {"cores": _cores(), "processor": _processor(), "numba": numba.__version__}}
    if "pool" in parts:
        figures["pool"] = [measure_pool(count, args.spin) for count in threads if count > 1]
        print(f"\nJob of {EMPTY_TASKS} empty tasks, microseconds\n" + _table(figures["pool"]), flush=True)
    if "attend" in parts:
        figures["attend"] = [row for fmt in formats for row in measure_attention(args.head_dim, fmt)]
        print("\nAttention over ids, microseconds per query head, one thread\n" + _table(figures["attend"]), flush=True)
    if "torch" in parts:
        figures["torch"] = measure_torch(max(threads), args.spin)
        print("\ntorch.mm of 768 x 768, milliseconds\n" + _table([figures["torch"]]), flush=True)
    if "step" in parts:
        figures["step"] = []
        for tokens in parse_lengths(args.tokens, "--tokens"):
            rows = [row for fmt in formats for row in measure_steps(args, tokens, threads, fmt)]
            figures["step"] += rows
            print(f"\nOne layer, {args.kv_heads * args.group} heads, {tokens} keys\n" + _table(rows), flush=True)
    if "soak" in parts:
        figures["soak"] = measure_soak(args.soak)
        print("\nSoak\n" + _table([figures["soak"]]), flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_attn.eval.bench.engine", description=__doc__)
    add_arguments(parser)
    print(json.dumps(run(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
