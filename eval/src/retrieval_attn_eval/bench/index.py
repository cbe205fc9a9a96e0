"""`retrieval-attn bench index`: what each index finds, reads and costs on attention keys of real or synthetic heads.

Every answer is checked against float64 arithmetic before a time is printed. Writes a table in Markdown, a JSON file
and plots into a new folder. Recordings of a model are reused: from `recordings` in --output-dir, or results/bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder, parse_lengths

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.heads import Source
    from retrieval_attn_eval.bench.measure import Point
    from retrieval_attn_eval.bench.variants import Variant

__all__ = ["add_arguments", "add_source_arguments", "measure", "run", "source_of"]

TRAIN_QUERIES, HEAD_DIM = 2048, 128
"""Training queries per query head, and the dimension of synthetic heads."""
TASK = "niah_multikey_1"
"""Task whose text is recorded from a model."""


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say which heads are measured; the studies take them too."""
    add = parser.add_argument
    add(
        "--source",
        default="bundled",
        help="bundled, a folder or a hub id of a model; the folder of a recording; synthetic:mid or synthetic:hard "
        "(default: %(default)s)",
    )
    add("--n", type=int, metavar="N", help="key-value heads to measure (default: all of a recording, 4 synthetic)")
    add("--retrieve", type=int, default=100, metavar="K", help="keys to find per query (default: %(default)s)")
    add("--seed", type=int, default=0, help="of texts and samples (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG files")
    add("--dry-run", action="store_true", help="say what would be measured, then stop")
    add(
        "--output-dir",
        default="auto",
        metavar="DIR",
        help="new folder for the results; auto: results/bench/TIME (default: %(default)s)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench index`."""
    add = parser.add_argument
    add("--lengths", default="8192,32768", metavar="N,N", help="tokens of context (default: %(default)s)")
    add("--methods", default="all", metavar="NAME,NAME", help="indexes to compare (default: %(default)s)")
    add("--tokens", type=as_tokens, default=8, metavar="N", help="decoded tokens that are timed (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="threads of search and build (default: %(default)s)")
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if an index gave a wrong answer (no times are printed then). Raises on bad input."""
    lengths = sorted(parse_lengths(args.lengths))
    check_at_least(1, args, "tokens", "threads")
    source = source_of(args)
    from retrieval_attn.testing import check_threads
    from retrieval_attn_eval.bench.measure import WrongAnswer
    from retrieval_attn_eval.bench.variants import choose

    check_threads(args.threads)
    variants, notes = choose(args.methods)
    if args.dry_run:
        print(_plan(args, lengths, variants, notes))
        return 0
    folder = new_folder(args.output_dir, "bench")
    try:
        points = [
            point
            for length in lengths
            for point in measure(
                source, length, variants, args.n, args.retrieve, tokens=args.tokens, threads=args.threads
            )
        ]
    except WrongAnswer as error:
        print(f"retrieval-attn bench: {error}", file=sys.stderr)
        return 1
    _write(folder, args, points, notes)
    return 0


def measure(
    source: Source,
    length: int,
    variants: list[Variant],
    limit: int | None,
    k: int,
    *,
    tokens: int,
    threads: int,
    progress: bool = True,
) -> list[Point]:
    """Points of all variants on the heads of one length, in the variants' order. Raises WrongAnswer."""
    from retrieval_attn.testing import ProgressBar, kernel_threads
    from retrieval_attn_eval.bench.measure import Oracle, measure_head, points_of
    from retrieval_attn_eval.bench.variants import lists_of

    points: dict[str, dict[int | None, Point]] = {}
    seconds = []
    bar = ProgressBar(desc=f"{length:,} tokens", unit="index", disable=not progress, leave=False)
    with bar:
        for head in source.heads(length, limit, progress):
            oracle = Oracle(head, k)
            lists = None
            if any(variant.takes_lists for variant in variants):
                with kernel_threads(threads):
                    started = time.perf_counter()
                    lists = lists_of(head)
                    seconds.append(time.perf_counter() - started)
            for variant in variants:
                mine = points.setdefault(variant.name, points_of(variant, len(head.keys)))
                bar.set_postfix_str(f"{head.name} {variant.name}")
                measure_head(variant, oracle, mine, lists=lists, tokens=tokens, threads=threads)
                for point in mine.values():
                    if variant.takes_lists:  # what a user waits for: lists and graph
                        point.build_seconds[-1] += seconds[-1]
                bar.update()
    return [point for mine in points.values() for point in mine.values()]


def source_of(args: argparse.Namespace) -> Source:
    """The heads that the flags name. Raises ConfigError for a flag out of range."""
    check_at_least(1, args, "retrieve", "n")
    if not args.no_plot:
        check_matplotlib()
    from retrieval_attn_eval.bench.heads import Source

    parent = Path("results/bench") if args.output_dir == "auto" else Path(args.output_dir)
    source = Source(args.source, TRAIN_QUERIES, HEAD_DIM, args.seed, parent / "recordings", TASK)
    source.check()
    return source


def _write(folder: Path, args: argparse.Namespace, points: list[Point], notes: list[str]) -> None:
    from retrieval_attn_eval.bench.plots import save_plot, save_results
    from retrieval_attn_eval.bench.report import as_json, plots, table
    from retrieval_attn_eval.runs import environment

    found: dict[str, Any] = environment()
    head = [
        f"- command: `{' '.join(found['command'])}`",
        f"- machine: {found['machine']['cpu']}, {found['machine']['cores']} cores; {args.threads} threads; "
        f"commit {found['commit']}",
        f"- {args.source}, {points[0].recall and len(points[0].recall)} query heads, k = {args.retrieve}; times are "
        "medians per query head, all query heads of a key-value head in one call; * first setting with recall >= 0.95",
        *(f"- {note}" for note in notes),
        "",
    ]
    text = "\n".join(head) + "\n" + table(points)
    report = {
        "what": "index",
        "source": args.source,
        "k": args.retrieve,
        "threads": args.threads,
        "notes": notes,
        **found,
    }
    save_results(folder, "bench", {**report, "points": as_json(points)}, text)
    if not args.no_plot:
        for name, panels in plots(points, args.source):
            save_plot(panels, folder / name)
    print(text)
    print(f"written to {folder}")


def _plan(args: argparse.Namespace, lengths: list[int], variants: list[Variant], notes: list[str]) -> str:
    lines = [
        f"source {args.source}, lengths {', '.join(f'{n:,}' for n in lengths)}, "
        f"{args.n or 'all'} key-value heads, k = {args.retrieve}, {args.threads} threads",
        *(
            f"  {v.name}: {v.kind} {dict(v.options) or ''} {f'{v.knob} {v.values}' if v.knob else ''}".rstrip()
            for v in variants
        ),
        *notes,
    ]
    return "\n".join(lines)
