"""`retrieval-attn bench memory`: device and host memory over context lengths, and whether the device's is constant.

For each length the context is read by the model (up to --read tokens) or placed (synthetic keys), then tokens are
generated. Beside what is held stands what `plan` said before. Exit status 1 if decoding needs more device memory for a
longer context (beyond the codes of its keys, with an index that keeps them there), or the plan promised less than was
held.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn_eval.bench.model import Bench, about, add_model_arguments, check_arguments, lengths_of
from retrieval_attn_eval.bench.plots import Plot, save_results, shown, table
from retrieval_attn_eval.flags import as_tokens, new_folder

__all__ = ["add_arguments", "run"]

GIB = 1 << 30
SLACK = 64 << 20
"""The allocator hands out memory in blocks: differences up to this are none."""


@dataclass
class Row:
    """One length. prefill_process, decode_process: bytes of the process on the device at most while reading (None where
    keys were placed) and while decoding; windows: of sinks and windows alone, of all layers; codes: of keys, and
    their scores. planned_*: what `plan` said. host_token: bytes per token of context.
    """

    context: int
    batch: int
    method: str
    how: str
    prefill_process: int | None
    decode_process: int | None
    decode_allocated: int | None
    windows: int
    codes: int
    planned_prefill: int
    planned_decode: int
    host_bytes: int
    host_token: float
    planned_host: int
    host_peak: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench memory`."""
    add_model_arguments(parser, "16k,64k,128k")
    add = parser.add_argument
    add("--index", default="flat", metavar="NAME", help="with options as in roargraph:beam=250 (default: %(default)s)")
    add("--read", default="128k", metavar="N", help="beyond it, keys are synthetic (default: %(default)s)")
    add("--distinct-layers", type=int, metavar="N", help="layers with synthetic keys of their own (default: all)")
    add("--tokens", type=as_tokens, default=16, metavar="N", help="tokens generated (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if device memory grows with the context, or beyond the plan. Raises on bad input."""
    from retrieval_attn_eval.bench.methods import METHODS, index_of, parse
    from retrieval_attn_eval.bench.room import require_host_room

    check_arguments(args)
    lengths, most = lengths_of(args.lengths), parse_tokens(args.read, "--read")
    specs = parse(args.index)
    if len(specs) != 1 or specs[0].name in METHODS:
        raise ConfigError(f"--index takes the name of one index, got {args.index}")
    folder = new_folder(args.output_dir, "bench")
    require_host_room(args, lengths, [named for spec in specs if (named := index_of(spec)) is not None], False)
    from retrieval_attn_eval.runs import environment

    found = environment()
    args.keys = "mid"
    bench = Bench(args)
    rows = []
    for length in lengths:
        rows.append(measure(bench, length, specs[0], read_it=length <= most))
        print(
            f"{length:>9,} {rows[-1].how}: decode {rows[-1].decode_process or 0:,} bytes", file=sys.stderr, flush=True
        )
    problems = verdict(rows, bench.config.sink + bench.config.window)
    report = {"what": "memory", **about(bench), **found, "problems": problems, "rows": [asdict(row) for row in rows]}
    text = markdown(rows, report, problems)
    save_results(folder, "memory", report, text, [] if args.no_plot else [_plot(bench.name, rows)])
    print(text)
    print(f"written to {folder}")
    return 1 if problems else 0


def _plot(title: str, rows: Sequence[Row]) -> Plot:
    sizes: dict[str, list[tuple[int, int | None]]] = {
        "device, prefill": [(row.context, row.prefill_process) for row in rows],
        "device, decode": [(row.context, row.decode_process) for row in rows],
        "device, windows": [(row.context, row.windows) for row in rows],
        "host, keys and index": [(row.context, row.host_bytes) for row in rows],
    }
    lines = {
        name: [(float(x), y / GIB) for x, y in points if y is not None]
        for name, points in sizes.items()
        if any(y for _, y in points)
    }
    return Plot(title, "tokens of context", "GiB", lines, log_x=True, log_y=True)


def measure(bench: Bench, length: int, spec: Any, *, read_it: bool) -> Row:
    """Read or place one context, generate, and say what was held."""
    import retrieval_attn as ra
    from retrieval_attn.memory.units import host_memory_bytes
    from retrieval_attn.testing import coded_bytes, finish_prefill, peak, start_peak
    from retrieval_attn_eval.bench.host import host_peak, start_host_peak
    from retrieval_attn_eval.bench.keys import read
    from retrieval_attn_eval.bench.method import Retrieval, compile_for
    from retrieval_attn_eval.bench.methods import make

    method = make(spec, bench.model, bench.config.replace(spill=max(128, bench.args.tokens + 1)))
    assert isinstance(method, Retrieval)
    compile_for(method.config, bench.model.dtype)
    gc.collect()
    start_peak(bench.device)
    start_host_peak()
    if read_it:
        cache, _ = read(bench.model, method.config, bench.ids(length))
        finish_prefill(cache)
    else:
        cache = bench.source(length).retrieval(method.config)
    held = peak(bench.device)
    method.hold(cache, length)
    start_peak(bench.device)
    method.decode(bench.args.tokens)
    decoding = peak(bench.device)
    planned = ra.plan(
        bench.model.config,
        context=length,
        batch=bench.args.batch,
        gpu_memory=bench.limit or 1 << 50,
        host_memory=host_memory_bytes(),
        dtype=str(bench.model.dtype).removeprefix("torch."),
        config=method.config,
        decide=False,
    )
    codes = held_codes = coded_bytes(cache)
    if codes:  # and their scores, which layers take turns to use
        codes += 4 * length * bench.args.batch * bench.model.config.get_text_config(decoder=True).num_attention_heads
    return Row(
        context=length,
        batch=bench.args.batch,
        method=spec.label,
        how="read" if read_it else "placed",
        prefill_process=held.process if held and read_it else None,
        decode_process=decoding.process if decoding else None,
        decode_allocated=decoding.peak if decoding else None,
        windows=cache.device_nbytes - held_codes,
        codes=codes,
        planned_prefill=planned.device_bytes,
        planned_decode=planned.decode_bytes,
        host_bytes=cache.host_nbytes,
        host_token=cache.host_nbytes / length / bench.args.batch,
        planned_host=planned.host_bytes,
        host_peak=host_peak(),
    )


def verdict(rows: Sequence[Row], near: int) -> list[str]:
    """What is wrong, one line each. near: sinks and window; shorter contexts need less and prove nothing."""
    found = []
    long = [row for row in rows if row.context > 2 * near]
    for name in ("windows", "decode_allocated", "decode_process"):
        slack, codes = (0, 0) if name == "windows" else (SLACK, 1)
        sizes = {row.context: value - codes * row.codes for row in long if (value := getattr(row, name)) is not None}
        if sizes and max(sizes.values()) - min(sizes.values()) > slack:
            shown = ", ".join(f"{context:,}: {size:,}" for context, size in sizes.items())
            beside = ", beside its codes," if any(codes * row.codes for row in long) else ""
            found.append(f"device memory while decoding ({name}){beside} depends on the context: {shown}")
    for row in rows:
        for part, held, planned in (
            ("prefill", row.prefill_process, row.planned_prefill),
            ("decoding", row.decode_process, row.planned_decode),
        ):
            if held is not None and held > planned + SLACK:
                found.append(f"{part} after {row.context:,} tokens held {held:,} bytes, the plan said {planned:,}")
    return found


def markdown(rows: Sequence[Row], report: dict[str, Any], problems: Sequence[str]) -> str:
    """Header lines, the table, the verdict."""
    from retrieval_attn_eval.bench.decode_report import header

    measures = (  # heading, field of a row, form, unit
        ("prefill, GiB", "prefill_process", ".2f", GIB),
        ("planned", "planned_prefill", ".2f", GIB),
        ("decode, GiB", "decode_process", ".2f", GIB),
        ("planned", "planned_decode", ".2f", GIB),
        ("windows, MiB", "windows", ".1f", 1 << 20),
        ("codes, MiB", "codes", ".1f", 1 << 20),
        ("host, GiB", "host_bytes", ".2f", GIB),
        ("planned", "planned_host", ".2f", GIB),
        ("host bytes/token", "host_token", ",.0f", 1),
        ("host process, GiB", "host_peak", ".2f", GIB),
    )
    cells = [
        [
            f"{row.context:,}",
            row.method,
            row.how,
            *(shown(getattr(row, name), form, unit) for _, name, form, unit in measures),
        ]
        for row in rows
    ]
    columns = ["context", "index", "keys", *(heading for heading, *_ in measures)]
    lines = [*header(report), "", *table(columns, cells, left=2)]
    but = ", codes of keys left out," if any(row.codes for row in rows) else ""
    said = problems or [
        f"Device memory while decoding{but} does not depend on the context, and nothing went beyond the plan."
    ]
    lines += ["", "Device: the whole process at most, CUDA context included.", "", *(f"- {item}" for item in said)]
    return "\n".join(lines) + "\n"
