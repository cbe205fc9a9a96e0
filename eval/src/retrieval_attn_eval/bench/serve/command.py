"""`retrieval-attn bench serve`: many requests at once through the public API, in this process.

The same requests are answered one after the other, in static batches, by the engine as they come, by the engine without
its tree and, where prompts are short, by transformers' own continuous batching. Answers must be the same ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.bench.session.flags import add_model_flags, add_running_flags
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder, parse_choices

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.serve.call import Call
    from retrieval_attn_eval.bench.serve.row import Bounds, Row
    from retrieval_attn_eval.bench.serve.workload import Workload
    from retrieval_attn_eval.bench.session.subject import Settings, Subject
    from retrieval_attn_eval.load.line import Line

__all__ = ["add_arguments", "run"]

LENGTHS = {"clients": 4096, "document": 16384, "mixed": 2048}
"""Default prompt tokens of each workload."""
TRACE_LENGTH = 4096
TTFT_SECONDS, ITL_SECONDS = 2.0, 0.1
"""Bounds of a good answer: time to first token, and mean time between tokens."""
PEER_TOKENS = 1024
"""Longest prompt for transformers."""
ALL = ("one", "static", "engine", "tree-off", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench serve`."""
    add = parser.add_argument
    kinds = "clients: a prompt each; document: questions on one; mixed: of many lengths; or a file in Mooncake's format"
    add("--workload", default="clients", metavar="NAME|FILE", help=f"{kinds} (default: %(default)s)")
    add("--n", type=int, default=8, metavar="N", help="requests; of a trace: at most (default: %(default)s)")
    lengths = "of a prompt or the document; mixed: a quarter of it to all of it"
    add("--length", type=as_tokens, metavar="N", help=f"{lengths} (default: 4k, 16k for document, 2k for mixed)")
    add("--question", type=as_tokens, default=32, metavar="N", help="of a prompt's last part (default: %(default)s)")
    add("--tokens", type=as_tokens, default=64, metavar="N", help="of an answer (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="of answers' lengths: mixed ones have 100 to 1024 tokens times it")
    add(
        "--rate", type=float, default=0.0, metavar="N", help="arrivals a second (Poisson); 0: all at once (%(default)s)"
    )
    add("--block", type=as_tokens, default=512, metavar="N", help="tokens of a trace's block (default: %(default)s)")
    add("--speed", type=float, default=1.0, metavar="X", help="how much faster a trace comes (default: %(default)s)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="rows of a step, and of a static batch (%(default)s)")
    add("--systems", default=",".join(ALL), metavar="NAME,NAME", help="rows of the table (default: %(default)s)")
    add("--read-first", action="store_true", help="prompts but for their last parts are read before the clock starts")
    paged = "keep prompt prefixes of up to N tokens in GPU pages with full attention (default: %(default)s)"
    add("--paged-prefix-tokens", type=as_tokens, default=0, metavar="N", help=paged)
    shared = "room of the engine's tree: for texts that no request uses now (default: what this workload's texts need)"
    add("--prefix-cache-memory", metavar="SIZE", help=shared)
    add("--prefix-cache-gpu-memory", metavar="SIZE", help="the same of the GPU (default: likewise)")
    add_model_flags(add)
    add_running_flags(add)
    add("--random-ids", action="store_true", help="random token ids in place of prose")
    add("--timeout", type=float, default=900.0, metavar="S", help="a row that takes longer fails")
    add("--seed", type=int, default=0, help="of texts, arrivals and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a row failed. Raises RetrievalAttentionError on bad input, before anything is timed."""
    workload, lines, ways = _workload(args)
    if not args.no_plot:
        check_matplotlib()
    settings = _settings(args, workload, lines)
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.bench.serve.row import Bounds
    from retrieval_attn_eval.bench.serve.workload import calls_of
    from retrieval_attn_eval.bench.session.subject import Subject
    from retrieval_attn_eval.runs import environment

    about = environment()
    folder.mkdir(parents=True, exist_ok=True)
    subject = Subject(settings)
    calls = calls_of(workload, lines, subject.ids)
    bounds = Bounds(TTFT_SECONDS, ITL_SECONDS)
    lengths = [call.request.prompt_tokens for call in calls]
    report: dict[str, Any] = {
        "what": "serve",
        "finished": False,
        "model": settings.name,
        "config": settings.options,
        "workload": workload.to_dict(),
        "prompts": {
            "requests": len(calls),
            "least": min(lengths),
            "most": max(lengths),
            "answers": sum(call.request.max_tokens for call in calls),
            "last_arrival": calls[-1].arrival,
        },
        "slots": args.max_num_seqs,
        "read_first": args.read_first,
        "paged_prefix_tokens": args.paged_prefix_tokens,
        "prefix_cache_bytes": args.prefix_cache_memory,
        "shared_gpu_bytes": args.prefix_cache_gpu_memory,
        "bounds": {"first_seconds": TTFT_SECONDS, "token_seconds": ITL_SECONDS},
        "facts": subject.about(),
        "simplifications": subject.simplifications,
        **about,
    }
    rows: list[Row] = []
    for row in _rows(args, ways, settings, subject, calls, bounds):
        rows.append(row)
        print(f"  {_line(row)}", file=sys.stderr, flush=True)
        _save(folder, report, rows)  # what was measured survives what comes
    text = _save(folder, {**report, "finished": True}, rows, plot=not args.no_plot)
    print(text)
    print(f"written to {folder}")
    return 1 if any(row.status == "failed" for row in rows) else 0


def _workload(args: argparse.Namespace) -> tuple[Workload, list[Line], tuple[str, ...]]:
    """What is to be measured, as the flags say. Raises ConfigError, or InputDataError for a trace."""
    from retrieval_attn_eval.bench.serve.workload import Workload
    from retrieval_attn_eval.load.line import read_trace

    kind = args.workload if args.workload in LENGTHS else "trace"
    if kind == "trace" and not Path(args.workload).is_file():
        raise ConfigError(f"--workload {args.workload!r} must be {', '.join(LENGTHS)}, or the file of a trace")
    if args.length is None:
        args.length = LENGTHS.get(kind, TRACE_LENGTH)
    check_at_least(1, args, "n", "question", "tokens", "block", "max_num_seqs")
    check_at_least(0, args, "rate", "threads", "paged_prefix_tokens")
    for name in ("scale", "speed", "timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(args, name)}")
    if not args.rate < float("inf"):
        raise ConfigError(f"--rate must be a number of arrivals a second, or 0 for all at once, got {args.rate}")
    if kind != "trace" and args.length <= args.question:
        raise ConfigError(f"--length {args.length} must be more than --question {args.question}, which is a part of it")
    _shared(args)
    ways = parse_choices("--systems", args.systems, ALL)
    lines = read_trace(Path(args.workload), args.n, args.block) if kind == "trace" else []
    return (
        Workload(
            kind, args.n, args.length, args.question, args.tokens, args.scale, args.rate, args.speed, args.seed,
        ),
        lines,
        ways,
    )  # fmt: skip


def _shared(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """Of the host and of the GPU. Raises ConfigError."""
    from retrieval_attn.memory.units import parse_bytes

    given = (
        (args.prefix_cache_memory, "--prefix-cache-memory"),
        (args.prefix_cache_gpu_memory, "--prefix-cache-gpu-memory"),
    )
    host, device = (None if size is None else parse_bytes(size, name) for size, name in given)
    return host, device


def _settings(args: argparse.Namespace, workload: Workload, lines: list[Line]) -> Settings:
    """The model's part, as `bench session` has it: for the longest request. Raises as that does."""
    from retrieval_attn_eval.bench.session.command import settings_of

    length, tokens, question = workload.length, workload.longest_answer, args.question
    if lines:
        length = max(sum(block.tokens for block in line.blocks) for line in lines)
        tokens = max(workload.scaled(line.answer_tokens) for line in lines)
    needs = {"length": length, "tokens": tokens, "questions": str(question), "extend": "1", "n": 1, "tail": "with"}
    needs["stages"] = "answer,questions,extend"
    return settings_of(argparse.Namespace(**{**vars(args), **needs}))


def _rows(
    args: argparse.Namespace,
    ways: Sequence[str],
    settings: Settings,
    subject: Subject,
    calls: Sequence[Call],
    bounds: Bounds,
) -> Any:
    """Each row when it is measured."""
    from dataclasses import replace

    from retrieval_attn_eval.bench.serve.drive import WAYS, Drive, Served, collections_are_short
    from retrieval_attn_eval.bench.serve.peer import peer_row
    from retrieval_attn_eval.bench.serve.row import Row, row_of

    llm = Served(subject.model, subject.tokenizer, settings.config)
    drive = Drive(
        llm, args.max_num_seqs, read_first=args.read_first, row_seconds=args.timeout,
        paged_prefix_tokens=args.paged_prefix_tokens, shared=_shared(args),
    )  # fmt: skip
    drive.warm(calls)
    expected: list[tuple[int, ...]] | None = None
    for way in ways:
        if way not in WAYS:
            with collections_are_short():
                row = peer_row(settings, calls, bounds, PEER_TOKENS)
            yield row
            continue
        try:
            answers, filled, cpu_seconds = drive.serve(way, calls)
        except Exception as error:  # the report names it; other rows go on
            said = str(error).splitlines()
            yield Row(way, "failed", f"{type(error).__name__}: {said[0] if said else ''}"[:300])
            continue
        row = row_of(way, answers, bounds, expected, filled)
        if way == "one" and row.status == "ok":
            expected = [one.tokens for one in answers]
        yield replace(row, cpu_seconds=cpu_seconds, note=row.note or drive.gave_up)


def _line(row: Row) -> str:
    if row.rate is None:
        return f"{row.way}: {row.status}: {row.note}"
    return f"{row.way}: {row.rate:,.1f} tokens/s"


def _save(folder: Path, report: dict[str, Any], rows: Sequence[Row], *, plot: bool = False) -> str:
    """Write what is known so far; returns the table with its header."""
    from retrieval_attn_eval.bench.plots import save_results
    from retrieval_attn_eval.bench.serve.report import markdown, plots

    text = markdown(rows, report)
    full = {**report, "rows": [row.to_dict() for row in rows]}
    save_results(folder, "serve", full, text, plots(rows, report["model"]) if plot else [])
    return text
