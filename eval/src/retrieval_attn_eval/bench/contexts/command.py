"""`retrieval-attn bench contexts`: what saving a context costs, and how soon it is back, through the public API.

For every length, one process reads, saves, grows and asks, and ends; two more open what it left, with its bytes in RAM
and on disk alone, and must give the same tokens. The disk's own rate is measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.bench.session.flags import add_model_flags, add_running_flags
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder, parse_lengths

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.contexts.found import Found
    from retrieval_attn_eval.bench.session.row import Row
    from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["add_arguments", "run"]

MODULE = "retrieval_attn_eval.bench.contexts.process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench contexts`."""
    add = parser.add_argument
    add_model_flags(add)
    add("--length", default="16k", metavar="N,N", help="tokens of contexts; k and m count 1024s (default: %(default)s)")
    add_running_flags(add)
    add("--turns", type=int, default=3, metavar="N", help="how often the context grows and is saved (%(default)s)")
    add("--turn-tokens", type=as_tokens, default=256, metavar="N", help="tokens of a turn (default: %(default)s)")
    add("--repeats", type=int, default=2, metavar="N", help="times after the first one (default: %(default)s)")
    add("--store", metavar="DIR", help="an empty folder on the disk to measure (default: one in the results' folder)")
    add("--keep", action="store_true", help="leave the saved contexts there")
    add("--random-ids", action="store_true", help="random token ids in place of prose")
    add("--timeout", type=float, default=900.0, metavar="S", help="a row that takes longer ends its process")
    add("--seed", type=int, default=0, help="of texts and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a row failed. Raises RetrievalAttentionError on bad input, before anything is timed."""
    check_at_least(1, args, "repeats", "turn_tokens")
    check_at_least(0, args, "turns")
    lengths = parse_lengths(args.length, "--length")
    if not args.no_plot:
        check_matplotlib()
    if args.store is not None and Path(args.store).is_dir() and any(Path(args.store).iterdir()):
        raise ConfigError(
            f"--store {args.store} is not empty; contexts of a bench are removed, so name an empty folder"
        )
    from retrieval_attn_eval.bench.contexts.found import Found

    found = [Found(length, _settings(args, length)) for length in lengths]
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.runs import environment

    about = environment()
    folder.mkdir(parents=True, exist_ok=True)
    base = folder if args.store is None else Path(args.store)
    base.mkdir(parents=True, exist_ok=True)
    for one in found:
        print(f"{one.length:,} tokens:", file=sys.stderr, flush=True)
        if args.keep:
            _measure(one, base / f"store-{one.length}", args, lambda: _save(folder, args, found, about))
            continue
        with tempfile.TemporaryDirectory(prefix="contexts-", dir=base) as store:
            _measure(one, Path(store), args, lambda: _save(folder, args, found, about))
    text = _save(folder, args, found, {**about, "finished": True}, plot=not args.no_plot)
    print(text)
    print(f"written to {folder}")
    failed = [row for one in found for process in one.processes for row in process.rows if row.status == "failed"]
    return 1 if failed else 0


def _settings(args: argparse.Namespace, length: int) -> Settings:
    """The model's part, as `bench session` has it. Raises as that does."""
    from retrieval_attn_eval.bench.contexts.stages import QUESTION, TOKENS
    from retrieval_attn_eval.bench.session.command import settings_of

    grown = {"questions": str(QUESTION), "extend": str(max(args.turns, 1) * args.turn_tokens), "tokens": TOKENS}
    return settings_of(argparse.Namespace(**{**vars(args), "length": length, "skip": "", **grown}))


def _measure(found: Found, store: Path, args: argparse.Namespace, save: Any) -> None:
    """All processes of one length, and the disk."""
    from dataclasses import replace

    from retrieval_attn_eval.bench.contexts.cold import context_files, make_cold, read_through
    from retrieval_attn_eval.bench.contexts.job import NAME, Job
    from retrieval_attn_eval.bench.session.children import Process, own_environment, run_process

    job = Job("save", found.settings, str(store), args.turns, args.turn_tokens)

    def told(row: Row) -> None:
        print(f"  {row.line()}", file=sys.stderr, flush=True)
        save()  # what was measured survives what comes

    for kind in ("save", "warm", "cold"):
        found.processes.append(Process(kind))
        process = found.processes[-1]
        run_process(process, replace(job, kind=kind).to_dict(), own_environment(), args.timeout, told, module=MODULE)
        if kind == "save":
            if "expected" not in process.facts:
                return
            job = replace(job, questions=tuple(process.facts["questions"]), expected=process.facts["expected"])
            files = context_files(str(store), NAME)
            nbytes = sum(path.stat().st_size for path in files)
            found.disk["nbytes"], found.disk["share_in_ram"] = nbytes, make_cold(files)
            found.disk["cold_seconds"] = read_through(files)
            found.disk["warm_seconds"] = read_through(files)


def _save(
    folder: Path, args: argparse.Namespace, found: list[Found], about: dict[str, Any], *, plot: bool = False
) -> str:
    """Write what is known so far; returns the table with its header."""
    from retrieval_attn_eval.bench.contexts.report import markdown, plots
    from retrieval_attn_eval.bench.plots import save_results

    settings = found[0].settings
    report: dict[str, Any] = {
        "what": "contexts",
        "finished": False,
        "model": settings.name,
        "gpu_memory": settings.gpu_memory,
        "config": settings.options,
        "turns": args.turns,
        "turn_tokens": args.turn_tokens,
        **about,
        "lengths": [one.to_dict() for one in found],
    }
    text = markdown(found, report)
    save_results(folder, "contexts", report, text, plots(found, settings.name) if plot else [])
    return text
