"""One method on one context: check, then measure."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from retrieval_attn.errors import MemoryPlanError, RetrievalAttentionError
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.testing import cap, forget, peak, start_peak, using_retrieval
from retrieval_attn_eval.bench.busy import Busy, Recorder
from retrieval_attn_eval.bench.host import host_peak, start_host_peak
from retrieval_attn_eval.bench.method import Decoded, Method, MethodSpec, Retrieval, forward_logits
from retrieval_attn_eval.bench.methods import kind_of, make
from retrieval_attn_eval.bench.model import Bench
from retrieval_attn_eval.bench.noise import TOLERANCE, allowed, rounding_noise
from retrieval_attn_eval.bench.place import fill
from retrieval_attn_eval.bench.quality import TOLERANCE as ANSWER_TOLERANCE
from retrieval_attn_eval.bench.quality import Quality, average, judge
from retrieval_attn_eval.bench.row import Row, Spread
from retrieval_attn_eval.bench.source import Source

WARM_UP = 3
"""Steps that are not timed: the first captures a graph, the next find caches cold."""
CHECKED_TOKENS = 4


class WrongAnswer(Exception):
    """A method does not answer what its definition says; it has no speed."""


def measure(bench: Bench, source: Source, spec: MethodSpec) -> Row:
    """Check and time one method. Bad input of the run is raised; what one method cannot do is its row."""
    row = Row(source.tokens, source.batch, spec.label, "ok")
    method = make(spec, bench.model, bench.config)
    reason = method.missing(bench.device)
    if reason is not None:
        row.status, row.note = "not installed" if "installed" in reason else "not here", reason
        return row
    steps = bench.args.tokens
    if bench.limit is not None:
        need = bench.weight_bytes + bench.context_bytes + method.device_need(source, 3 * steps)
        if need > bench.limit:
            row.note = f"needs {show_bytes(need)} of the {show_bytes(bench.limit)} given"
            row.beyond = bool(bench.args.beyond)
            if not row.beyond:
                row.status = "does not fit"
                return row
    try:
        if row.beyond:
            cap(bench.device, None)
        _measure(bench, source, spec, row)
    except WrongAnswer as error:
        row.status, row.note = "wrong", str(error)
    except torch.OutOfMemoryError as error:
        held = peak(bench.device)
        row.status = "does not fit"
        row.note = f"out of memory at {show_bytes(held.process if held else 0)}: {str(error).splitlines()[0][:200]}"
    except (RetrievalAttentionError, RuntimeError, ImportError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, MemoryPlanError):
            row.status = "does not fit"
        else:
            row.status = "failed"  # one baseline's failure must not cost the other rows
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    finally:
        del method
        forget(bench.model)  # its graph's buffers are not the next method's
        gc.collect()
        if row.beyond:
            cap(bench.device, bench.limit)
        start_peak(bench.device)
    return row


def _measure(bench: Bench, source: Source, spec: MethodSpec, row: Row) -> None:
    args = bench.args
    if spec.label not in bench.checked:
        bench.checked[spec.label] = _check(bench, spec)
    row.error = bench.checked[spec.label]
    method = make(spec, bench.model, bench.config)
    start_peak(bench.device)
    start_host_peak()
    began = time.perf_counter()
    method.prepare(source, args.tokens + WARM_UP)
    row.prepare_seconds = time.perf_counter() - began
    held = peak(bench.device)
    row.prepare_peak = held.process if held else None
    row.host_bytes = method.host_bytes
    with source.feeding():
        if type(method) is Retrieval:
            _enter(row, judge(method, source), args.min_recall)
        if isinstance(method, Retrieval):
            _replay(method, allowed(bench.model.dtype, bench.noise or 0.0))
        start_peak(bench.device)
        _time(method, row, args.tokens, args.seconds)
        held = peak(bench.device)
        if held is not None:
            row.device_allocated, row.device_peak, row.device_process = held.allocated, held.peak, held.process
            if bench.limit is not None and not row.beyond and held.process > bench.limit:
                raise MemoryPlanError(f"held {show_bytes(held.process)} of the {show_bytes(bench.limit)} given")
        row.host_peak = host_peak()
        row.device_touched = method.device_bytes_touched(source)
        if row.host_touched is None:
            row.host_touched = method.host_bytes_touched(source)


def _replay(method: Retrieval, tolerance: float) -> None:
    """The loop that is timed gives the logits of ordinary forwards with the same tokens; raises WrongAnswer."""
    done = method.decode(CHECKED_TOKENS, keep=True)
    cache = method.cache.fork()
    with using_retrieval(method.model, method.config.prefill_chunk):
        wanted = []
        for step in range(done.tokens.shape[1] - 1):
            ids = done.tokens[:, step : step + 1]
            places = torch.full_like(ids, method.position + step)
            wanted.append(forward_logits(method.model, cache, ids, places).float())
    _compare(done, wanted, tolerance, f"in the loop ({done.how}) differ from an ordinary forward's")


def _enter(row: Row, quality: Quality | None, least: float) -> None:
    if quality is None:
        row.note = "nothing to retrieve: the context is sinks and window"
        return
    row.recall, row.mass = average(quality.recall), average(quality.mass)
    row.captured, row.scanned = average(quality.captured), average(quality.scanned)
    if not quality.error <= ANSWER_TOLERANCE:
        raise WrongAnswer(
            f"its answers differ from attention over the keys it found by {quality.error:.1e}, at most "
            f"{ANSWER_TOLERANCE:.0e} allowed"
        )
    if row.recall is not None and row.recall < least:
        raise WrongAnswer(f"recall {row.recall:.3f} is below --min-recall {least}")


def _time(method: Method, row: Row, steps: int, seconds: float) -> None:
    stamps: list[float] = []
    done = method.decode(steps + WARM_UP + 1, lambda tokens: stamps.append(time.perf_counter()), seconds=seconds)
    taken = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
    timed = taken[WARM_UP:] if len(taken) > WARM_UP else taken[-1:]
    if not timed:
        raise WrongAnswer("it chose no token after the first")
    row.how, row.steps, row.chosen = done.how, len(timed), done.tokens[0].tolist()
    row.ms = Spread.of(timed)
    row.tokens_per_second = row.batch * 1000 / row.ms.median
    work = method.work
    if work is not None:
        count = max(1, len(taken))
        row.search, row.attend = 1000 * work.search_seconds / count, 1000 * work.attend_seconds / count
        row.host = 1000 * work.host_seconds / count
        row.host_touched = work.bytes_read // count


def record(bench: Bench, source: Source, spec: MethodSpec, row: Row) -> None:
    """Add to the row of this method how long the device works. Nothing may be timed in this process afterwards."""
    if row.ms is None:
        return
    if row.beyond:
        cap(bench.device, None)
    recorder, method = Recorder(), make(spec, bench.model, bench.config)
    try:
        method.prepare(source, Recorder.steps)
        with source.feeding():
            method.decode(Recorder.steps, recorder)
    finally:
        del method
        forget(bench.model)
        gc.collect()
        if row.beyond:
            cap(bench.device, bench.limit)
    busy: Busy | None = recorder.busy
    if busy is None:
        row.note = f"{row.note} {recorder.failed or 'the decode was too short to be recorded'}".strip()
        return
    row.gpu, row.copy = busy.kernels, busy.copies
    row.wait = max(0.0, 1 - busy.any / row.ms.median)


# -- answers --------------------------------------------------------------------------------------------


def _check(bench: Bench, spec: MethodSpec) -> float:
    """Largest relative logit error of the method on a short context; raises WrongAnswer beyond the tolerance.

    The tolerance is the dtype's, or twice the `rounding_noise` where that is more.
    Retrieval is checked with retrieve="all" and with so large a number that every key is found: that is full attention.
    The reference is transformers' attention with its DynamicCache, over what the method attends to by its definition.
    """
    source = bench.short_source()
    checks = [(spec, bench.config)]
    if kind_of(spec) is Retrieval:
        # as many keys as there are, through the search and the graph that decoding uses; and without a search
        every = bench.config.replace(retrieve=source.tokens), bench.config.replace(retrieve="all", graph=False)
        checks = [(MethodSpec("flat"), every[0]), (spec, every[1])]
    worst = 0.0
    for checked, config in checks:
        method = make(checked, bench.model, config)
        method.prepare(source, CHECKED_TOKENS + 2)
        with source.feeding():
            done = method.decode(CHECKED_TOKENS, keep=True)
        spans = method.spans(source.tokens)
        tolerance = max(method.tolerance or TOLERANCE[bench.model.dtype], _HOST_TOLERANCE.get(config.host_dtype, 0.0))
        del method
        with source.feeding():
            wanted = _reference(bench.model, source, spans, done)
            if bench.noise is None:
                whole = [(0, source.tokens)]
                again = functools.partial(_reference, bench.model, source, whole, done)
                bench.noise = rounding_noise(bench.model, again)
        tolerance = max(tolerance, allowed(bench.model.dtype, bench.noise))
        what = f"after {source.tokens} tokens (retrieve={config.retrieve}, {done.how}) differ from its definition's"
        worst = max(worst, _compare(done, wanted, tolerance, what))
    return worst


# What rounding the host's keys costs; attention over the rounded ones is compared closely by `judge`.
_HOST_TOLERANCE = {"int8": 0.15, "bfloat16": 5e-2, "float16": 1e-2}


def _compare(done: Decoded, wanted: Sequence[torch.Tensor], tolerance: float, what: str) -> float:
    """Largest relative difference of logits; raises WrongAnswer beyond the tolerance, or where there are too few."""
    if len(done.logits) < CHECKED_TOKENS - 1:
        raise WrongAnswer(f"it gave logits of {len(done.logits)} of {CHECKED_TOKENS - 1} steps")
    errors = [
        float((got.float() - right).abs().max() / right.abs().max())
        for got, right in zip(done.logits, wanted, strict=False)
    ]
    worst = max(errors, key=lambda error: float("inf") if error != error else error)
    if not worst <= tolerance:
        raise WrongAnswer(f"its logits {what} by {worst:.1e} of the largest, at most {tolerance:.0e} allowed")
    return worst


def _reference(model: Any, source: Source, spans: Sequence[tuple[int, int]], done: Decoded) -> list[torch.Tensor]:
    cache = fill(DynamicCache(config=model.config), source, spans)
    found = []
    for step in range(done.tokens.shape[1] - 1):
        ids = done.tokens[:, step : step + 1]
        places = torch.full_like(ids, source.tokens + step)
        found.append(forward_logits(model, cache, ids, places).float())
    return found
