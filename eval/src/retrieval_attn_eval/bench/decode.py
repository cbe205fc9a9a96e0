"""`retrieval-attn bench decode`: every way to decode after a long context, on the same weights and keys, in one run.

Per context length each method gets the same keys and generates tokens in the loop its users run. A method whose answers
are wrong has no speed: logits are compared with the method's definition first (retrieval with retrieve="all" against
full attention), and what retrieval answers with attention over the keys it found. Writes Markdown, JSON and a plot.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.bench.model import Bench, about, add_model_arguments, check_arguments, lengths_of, with_room
from retrieval_attn_eval.flags import as_tokens, new_folder

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.row import Row

__all__ = ["add_arguments", "run"]

LENGTHS = "4k,16k,64k,128k"
METHODS = "roargraph,flat,ivf,static,full-resident,full-graph,full-eager,offloaded,quantized"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench decode`."""
    add_model_arguments(parser, LENGTHS)
    add = parser.add_argument
    add(
        "--methods",
        default=METHODS,
        metavar="NAME,NAME",
        help="indexes, with options as in roargraph:beam=250, and other methods (default: %(default)s)",
    )
    add(
        "--keys",
        default="auto",
        metavar="FROM",
        help="read: the model reads a text; mid or hard: synthetic; auto: read, or mid for random weights",
    )
    add("--distinct-layers", type=int, metavar="N", help="layers with synthetic keys of their own (default: all)")
    add(
        "--graph",
        default="auto",
        choices=["auto", "off"],
        help="retrieval's step as one CUDA graph, where it can be captured (default: %(default)s)",
    )
    add("--tokens", type=as_tokens, default=32, metavar="N", help="decode steps that are timed (default: %(default)s)")
    add("--seconds", type=float, default=20.0, metavar="S", help="most time for them per method (default: %(default)s)")
    add("--min-recall", type=float, default=0.9, metavar="R", help="recall below which no speed is shown")
    add("--record", action="store_true", help="at the end, record how long the GPU works: every method once more")
    add("--beyond", action="store_true", help="measure what does not fit --gpu-memory all the same, and say so")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a method answers wrongly (it has no speed then) or fails. Raises on bad input."""
    from retrieval_attn_eval.bench.methods import index_of, parse
    from retrieval_attn_eval.bench.room import require_host_room

    check_arguments(args)
    lengths = lengths_of(args.lengths)
    if args.keys not in ("auto", "read", "mid", "hard"):
        raise ConfigError(f"--keys must be auto, read, mid or hard, got {args.keys!r}")
    if not 0 <= args.min_recall <= 1 or args.seconds <= 0:
        raise ConfigError(f"--min-recall must lie in 0 .. 1 and --seconds be > 0: {args.min_recall}, {args.seconds}")
    specs = parse(args.methods)
    folder = new_folder(args.output_dir, "bench")
    read = args.keys == "read" or (args.keys == "auto" and not args.shape)
    require_host_room(args, lengths, [named for spec in specs if (named := index_of(spec)) is not None], read)
    from retrieval_attn_eval.bench.row import Row
    from retrieval_attn_eval.bench.rows import measure, record
    from retrieval_attn_eval.runs import environment

    found = environment()
    bench = Bench(args)
    limit = bench.model.config.get_text_config(decoder=True).max_position_embeddings
    rows: list[Row] = []
    lengths = with_room(lengths, limit, args.tokens)
    for length in lengths:
        source = bench.source(length)
        keys = source.about
        for spec in specs:
            try:
                row = measure(bench, source, spec)
            except RuntimeError as error:  # a device that stopped answering: keep what there is
                rows.append(Row(source.tokens, source.batch, spec.label, "failed", str(error).splitlines()[0][:300]))
                _save(folder, bench, rows, {**found, "keys": keys}, plot=not args.no_plot)
                raise
            print(row.line(), file=sys.stderr, flush=True)
            rows.append(row)
            _save(folder, bench, rows, {**found, "keys": keys})  # what was measured survives what comes
        del source
    if args.record and bench.device.type == "cuda":
        for length in lengths:
            source = bench.source(length)
            for row, spec in zip([row for row in rows if row.context == source.tokens], specs, strict=True):
                record(bench, source, spec, row)
            del source
    _save(folder, bench, rows, {**found, "keys": keys}, plot=not args.no_plot, finished=True)
    print((folder / "decode.md").read_text())
    print(f"written to {folder}")
    return 1 if any(row.status in ("wrong", "failed") for row in rows) else 0


def _save(
    folder: Path, bench: Bench, rows: list[Row], found: dict[str, Any], *, plot: bool = False, finished: bool = False
) -> None:
    from retrieval_attn_eval.bench.decode_report import markdown, plots
    from retrieval_attn_eval.bench.plots import save_results

    report = {"what": "decode", "finished": finished, **about(bench), **found, "rows": [asdict(row) for row in rows]}
    save_results(folder, "decode", report, markdown(rows, report), plots(rows, bench.name) if plot else [])
