"""`retrieval-attn bench prefill`: a plain prefill beside ours with every index ready, its phases and its peak memory.

Plain is one forward of the unmodified model with transformers' attention and DynamicCache, which is what most programs
do. Ours is `Context.read`'s: layer by layer, keys to the host, indexes built meanwhile; its clock stops when the last
index is ready. The logits of the last token must agree, or there are no times.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError, RetrievalAttentionError
from retrieval_attn_eval.bench.model import Bench, about, add_model_arguments, check_arguments, lengths_of
from retrieval_attn_eval.bench.plots import Plot, save_results, shown, table
from retrieval_attn_eval.flags import new_folder

if TYPE_CHECKING:
    from torch import Tensor

    from retrieval_attn_eval.bench.method import MethodSpec

__all__ = ["add_arguments", "run"]

GIB = 1 << 30
WARM_UP = 8192
"""Tokens that are read before anything is timed: kernels are compiled then."""


@dataclass
class Row:
    """One prefill. seconds: until the next token's logits are there; ready_seconds: until every index is, too.

    ratio: ready_seconds over those of the plain prefill. phases: seconds by name, summed over layers; they overlap.
    device_peak, device_process: tensors and the whole process at most. host_bytes: keys, values and indexes.
    error: of the last logits against the plain prefill's, relative to the largest, at this length or (short) on a short
    one.
    """

    context: int
    batch: int
    method: str
    status: str = "ok"
    note: str = ""
    seconds: float | None = None
    ready_seconds: float | None = None
    ratio: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    device_peak: int | None = None
    device_process: int | None = None
    host_bytes: int | None = None
    host_peak: int | None = None
    error: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench prefill`."""
    add_model_arguments(parser, "16k,64k,128k")
    parser.add_argument(
        "--indexes", default="roargraph,flat", metavar="NAME,NAME", help="built while reading (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="fastest of so many (default: %(default)s)")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain prefill out")
    parser.add_argument(
        "--beyond", action="store_true", help="measure a plain prefill that does not fit --gpu-memory too"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if logits disagree or a prefill fails. Raises on bad input."""
    from retrieval_attn_eval.bench.methods import METHODS, parse

    check_arguments(args)
    lengths = lengths_of(args.lengths)
    if args.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {args.rounds}")
    specs = parse(args.indexes)
    if any(spec.name in METHODS for spec in specs):
        raise ConfigError(f"--indexes takes names of indexes, got {args.indexes}")
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.runs import environment

    found = environment()
    bench = Bench(args)
    rows = []
    _warm_up(bench, specs, min(WARM_UP, max(lengths)))
    for length in lengths:
        rows += measure(bench, length, specs)
    report = {"what": "prefill", **about(bench), "keys": "read", **found, "rows": [asdict(row) for row in rows]}
    text = markdown(rows, report)
    points = [(row.method, float(row.context), row.ready_seconds) for row in rows if row.ready_seconds]
    lines = {name: [(x, y) for own, x, y in points if own == name] for name in dict.fromkeys(own for own, *_ in points)}
    panel = Plot(bench.name, "tokens", "seconds, indexes ready", lines, log_x=True, log_y=True)
    save_results(folder, "prefill", report, text, [] if args.no_plot else [panel])
    print(text)
    print(f"written to {folder}")
    return 1 if any(row.status in ("wrong", "failed") for row in rows) else 0


def measure(bench: Bench, length: int, specs: Sequence[MethodSpec]) -> list[Row]:
    """Rows of one length, the plain one first."""
    from retrieval_attn_eval.bench.noise import allowed, rounding_noise

    if bench.noise is None:
        few = bench.ids(min(length, 1024))
        bench.noise = rounding_noise(bench.model, lambda: [_plain_logits(bench, few)])
    tolerance = allowed(bench.model.dtype, bench.noise)
    ids = bench.ids(length)
    rows: list[Row] = []
    wanted = None
    if not bench.args.no_plain:
        row, wanted = _plain(bench, ids)
        rows.append(row)
    plain_seconds = rows[0].ready_seconds if rows else None
    for spec in specs:
        row, logits = _ours(bench, spec, ids)
        reference, note = wanted, ""
        if logits is not None and reference is None:  # the plain prefill does not fit: compare what does
            short = bench.ids(min(length, 2 * bench.config.sink + 2 * bench.config.window))
            logits, (reference, note) = (
                _logits_of(bench, spec, short),
                (_plain_logits(bench, short), " (short context)"),
            )
        if logits is not None and reference is not None:
            row.error = float((logits - reference).abs().max() / reference.abs().max())
            if not row.error <= tolerance:
                reason = (
                    f"its logits differ from the plain prefill's by {row.error:.1e}{note}, at most {tolerance:.0e} "
                    "allowed: no time is shown"
                )
                row = Row(row.context, row.batch, row.method, "wrong", reason, error=row.error)
            elif note:
                row.note = f"logits compared on {short.shape[1]} tokens"
        if row.ready_seconds and plain_seconds:
            row.ratio = row.ready_seconds / plain_seconds
        print(_line(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _plain(bench: Bench, ids: Tensor) -> tuple[Row, Tensor | None]:
    import torch

    from retrieval_attn.memory.units import show_bytes
    from retrieval_attn.testing import cap, peak, start_peak

    row = Row(ids.shape[1], ids.shape[0], "plain")
    logits = None
    need = bench.weight_bytes + bench.context_bytes + _plain_need(bench, ids.shape[0] * ids.shape[1])
    if bench.limit is not None and need > bench.limit:
        row.note = f"needs about {show_bytes(need)} of the {show_bytes(bench.limit)} given"
        if not bench.args.beyond:
            row.status = "does not fit"
            return row, None
        row.note += "; measured without the cap"
        cap(bench.device, None)
    try:
        for _ in range(bench.args.rounds):
            start_peak(bench.device)
            began = time.perf_counter()
            logits = _plain_logits(bench, ids)
            _wait(bench)
            row.seconds = min(time.perf_counter() - began, row.seconds or float("inf"))
        row.ready_seconds, row.ratio = row.seconds, 1.0
        held = peak(bench.device)
        row.device_peak, row.device_process = (held.peak, held.process) if held else (None, None)
    except torch.OutOfMemoryError as error:
        row.status, row.note = "does not fit", str(error).splitlines()[0][:200]
    finally:
        gc.collect()
        if bench.limit is not None:
            cap(bench.device, bench.limit)
    print(_line(row), file=sys.stderr, flush=True)
    return row, logits


def _plain_need(bench: Bench, tokens: int) -> int:
    """Keys and values of all tokens, hidden states and the widest activations of one layer (three of the MLP)."""
    config = bench.model.config.get_text_config(decoder=True)
    from retrieval_attn_eval.bench.source import kv_shape

    layers, kv_heads, _, dim = kv_shape(bench.model)
    numbers = 2 * layers * kv_heads * dim + 3 * config.hidden_size + 3 * config.intermediate_size
    return int(tokens * numbers * bench.model.dtype.itemsize)


def _plain_logits(bench: Bench, ids: Tensor) -> Tensor:
    import torch
    from transformers import DynamicCache

    with torch.no_grad():
        cache = DynamicCache(config=bench.model.config)
        logits: Tensor = bench.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].float()


def _ours(bench: Bench, spec: MethodSpec, ids: Tensor) -> tuple[Row, Tensor | None]:
    import torch

    from retrieval_attn.testing import finish_prefill, peak, start_peak
    from retrieval_attn_eval.bench.host import host_peak, start_host_peak
    from retrieval_attn_eval.bench.keys import read
    from retrieval_attn_eval.bench.methods import make

    row = Row(ids.shape[1], ids.shape[0], spec.label)
    config = make(spec, bench.model, bench.config).config
    logits = None
    try:
        for _ in range(bench.args.rounds):
            gc.collect()
            start_peak(bench.device)
            start_host_peak()
            began = time.perf_counter()
            cache, logits = read(bench.model, config, ids)
            _wait(bench)
            first = time.perf_counter() - began
            finish_prefill(cache)
            ready = time.perf_counter() - began
            work = cache.stats()
            if row.ready_seconds is None or ready < row.ready_seconds:
                row.seconds, row.ready_seconds = first, ready
                row.phases = {k: v for k, v in vars(work).items() if k.endswith("_seconds") and v}
            row.host_bytes = cache.host_nbytes
            del cache
        held = peak(bench.device)
        row.device_peak, row.device_process = (held.peak, held.process) if held else (None, None)
        row.host_peak = host_peak()
    except (RetrievalAttentionError, torch.OutOfMemoryError) as error:
        row.status = "does not fit" if "emory" in type(error).__name__ else "failed"
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:250]}"
        logits = None
    gc.collect()
    return row, logits


def _logits_of(bench: Bench, spec: MethodSpec, ids: Tensor) -> Tensor:
    from retrieval_attn.testing import finish_prefill
    from retrieval_attn_eval.bench.keys import read
    from retrieval_attn_eval.bench.methods import make

    cache, logits = read(bench.model, make(spec, bench.model, bench.config).config, ids)
    finish_prefill(cache)
    return logits


def _warm_up(bench: Bench, specs: Sequence[MethodSpec], tokens: int) -> None:
    """Read a little in every way that is timed: libraries load and kernels compile now."""
    ids = bench.ids(tokens)
    if not bench.args.no_plain:
        _plain_logits(bench, ids)
    for spec in specs:
        _logits_of(bench, spec, ids)
    _wait(bench)


def _wait(bench: Bench) -> None:
    import torch

    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)


def _line(row: Row) -> str:
    seconds = "" if row.ready_seconds is None else f"{row.seconds:.2f} s, ready {row.ready_seconds:.2f} s"
    return f"{row.context:>9,} {row.method}: {row.status} {seconds} {row.note}".rstrip()


def markdown(rows: Sequence[Row], report: dict[str, Any]) -> str:
    """Header lines, the table, and what the columns mean."""
    from retrieval_attn_eval.bench.decode_report import header

    names = list(dict.fromkeys(name for row in rows for name in row.phases))
    columns = ["context", "prefill", "logits, s", "indexes ready, s", "x plain"]
    columns += [name.removesuffix("_seconds") + ", s" for name in names]
    columns += ["device peak, GiB", "process, GiB", "host, GiB", "host peak, GiB", "logit error"]
    cells = []
    for row in rows:
        if row.seconds is None or row.ready_seconds is None:
            cells.append([f"{row.context:,}", row.method, row.status, *[""] * (len(columns) - 3)])
            continue
        sizes = (row.device_peak, row.device_process, row.host_bytes, row.host_peak)
        cells.append(
            [
                f"{row.context:,}",
                row.method,
                *(shown(value, ".2f") for value in (row.seconds, row.ready_seconds, row.ratio)),
                *(shown(row.phases.get(name), ".2f") for name in names),
                *(shown(size, ".2f", GIB) for size in sizes),
                shown(row.error, ".1e"),
            ]
        )
    lines = [*header(report), "", *table(columns, cells)]
    lines += [
        "",
        "plain: one forward with transformers' attention and DynamicCache. logits: when the next token can be chosen; "
        "indexes ready: when the first question can be asked. Phases are sums over layers and overlap each other and "
        "the reading. process: CUDA context included. logit error: last token against plain, relative to the largest.",
    ]
    notes = [f"- {row.context:,} {row.method}: {row.status}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, "", *notes] if notes else lines) + "\n"
