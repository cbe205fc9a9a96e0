"""`retrieval-attn bench serve`: many requests at once through the public API, in this process, or to a server.

The same requests are answered one after the other, in static batches, by the engine as they come, by the engine without
its tree and, where prompts are short, by transformers' own continuous batching. Answers must be the same ones. With
`--url`, a server is asked with raw texts and with chats. The hit rate of the prefix cache is compared with the one that
the requests allow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.bench.session.flags import add_model_flags, add_running_flags
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder, parse_choices
from retrieval_attn_eval.load.sender import FORMS

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.serve.call import Call
    from retrieval_attn_eval.bench.serve.row import Bounds, Row
    from retrieval_attn_eval.bench.serve.workload import Workload
    from retrieval_attn_eval.bench.session.subject import Settings, Subject
    from retrieval_attn_eval.load.line import Line

__all__ = ["add_arguments", "run"]

LENGTHS = {"clients": 4096, "document": 16384, "mixed": 2048, "documents": 131072, "agent": 204800}
"""Default prompt tokens of each workload."""
TRACE_LENGTH = 4096
AGENT_LENGTH = 256
"""Least tokens of an agent's longest prompt, in which the system prompt and some results have room."""
TTFT_SECONDS, ITL_SECONDS = 2.0, 0.1
"""Bounds of a good answer: time to first token, and mean time between tokens."""
PEER_TOKENS = 1024
"""Longest prompt for transformers."""
ALL = ("one", "static", "engine", "tree-off", "transformers")
EVICTING = ("documents", "agent")
"""Workloads that may exceed the prefix cache: by default the engine alone answers, with its own choice of room."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench serve`."""
    add = parser.add_argument
    kinds = (
        "clients: a prompt each; document: questions on one; mixed: of many lengths; documents: on one of a text for 8 "
        "requests, at most 50, by Zipf's law; agent: sessions of 100 to 200 turns with tool results; or a file in "
        "Mooncake's format"
    )
    add("--workload", default="clients", metavar="NAME|FILE", help=f"{kinds} (default: %(default)s)")
    add(
        "--n",
        type=int,
        default=8,
        metavar="N",
        help="requests; of a trace: at most; sessions of agents (default: %(default)s)",
    )
    lengths = "of a prompt or the document; mixed: a quarter of it to all of it; documents: a 16th of it to all of it"
    usual = "4k, 16k for document, 2k for mixed, 128k for documents, 200k for agent, whose results shrink with it"
    add("--length", type=as_tokens, metavar="N", help=f"{lengths} (default: {usual})")
    add("--question", type=as_tokens, default=32, metavar="N", help="of a prompt's last part (default: %(default)s)")
    add("--tokens", type=as_tokens, default=64, metavar="N", help="of an answer (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="of answers' lengths: mixed ones have 100 to 1024 tokens times it")
    add(
        "--rate",
        type=float,
        default=0.0,
        metavar="N",
        help="arrivals a second (Poisson); 0: all at once, and --max-num-seqs clients for documents (%(default)s)",
    )
    add("--block", type=as_tokens, default=512, metavar="N", help="tokens of a trace's block (default: %(default)s)")
    add("--speed", type=float, default=1.0, metavar="X", help="how much faster a trace comes (default: %(default)s)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="rows of a step, and of a static batch (%(default)s)")
    rows = (
        f"rows of the table (default: {','.join(ALL)}; engine for {', '.join(EVICTING)}; {','.join(FORMS)} with --url)"
    )
    add("--systems", metavar="NAME,NAME", help=rows)
    add("--url", help="of a server to ask in place of an engine in this process; its key is $OPENAI_API_KEY")
    add("--read-first", action="store_true", help="prompts but for their last parts are read before the clock starts")
    paged = "keep prompt prefixes of up to N tokens in GPU pages with full attention (default: %(default)s)"
    add("--paged-prefix-tokens", type=as_tokens, default=0, metavar="N", help=paged)
    shared = (
        "room of the engine's tree: for texts that no request uses now (default: what this workload's texts need; "
        "documents, agent: the engine's choice)"
    )
    add("--prefix-cache-memory", metavar="SIZE", help=shared)
    add("--prefix-cache-gpu-memory", metavar="SIZE", help="the same of the GPU (default: likewise)")
    stored = "new folder in which the engine saves idle texts that its tree has no room for (default: they are dropped)"
    add("--store", metavar="FOLDER", help=stored)
    add_model_flags(add)
    add_running_flags(add)
    add("--random-ids", action="store_true", help="random token ids in place of prose")
    late = f"a row that takes longer fails; of a single row of {', '.join(EVICTING)}, no request is sent later"
    add("--timeout", type=float, default=900.0, metavar="S", help=f"{late} (default: %(default)s)")
    add("--seed", type=int, default=0, help="of texts, arrivals and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a row failed. Raises RetrievalAttentionError on bad input, before anything is timed."""
    workload, lines, ways = _workload(args)
    if not args.no_plot:
        check_matplotlib()
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.bench.serve.row import Bounds
    from retrieval_attn_eval.runs import environment

    bounds = Bounds(TTFT_SECONDS, ITL_SECONDS)
    about = {
        "what": "serve",
        "finished": False,
        "workload": workload.to_dict(),
        "prompts": _prompts(lines),
        "slots": args.max_num_seqs,
        "read_first": args.read_first,
        "paged_prefix_tokens": args.paged_prefix_tokens,
        "prefix_cache_bytes": args.prefix_cache_memory,
        "shared_gpu_bytes": args.prefix_cache_gpu_memory,
        "bounds": {"first_seconds": TTFT_SECONDS, "token_seconds": ITL_SECONDS},
        "url": args.url,
    }
    if args.url is None:
        model, measured = _in_process(args, ways, workload, lines, bounds)
    else:
        model, measured = _of_server(args, ways, lines, bounds)
    report: dict[str, Any] = {**about, **environment(), **model}
    rows: list[Row] = []
    for row in measured:
        rows.append(row)
        print(f"  {_line(row)}", file=sys.stderr, flush=True)
        _save(folder, report, rows)  # what was measured survives what comes
    text = _save(folder, {**report, "finished": True}, rows, plot=not args.no_plot)
    print(text)
    print(f"written to {folder}")
    return 1 if any(row.status == "failed" for row in rows) else 0


def _prompts(lines: Sequence[Line]) -> dict[str, Any]:
    """Facts of all prompts, for the report."""
    lengths = [line.prompt_tokens for line in lines]
    return {
        "requests": len(lines),
        "least": min(lengths),
        "most": max(lengths),
        "answers": sum(line.answer_tokens for line in lines),
        "last_arrival": lines[-1].seconds,
    }


def _in_process(
    args: argparse.Namespace, ways: Sequence[str], workload: Workload, lines: Sequence[Line], bounds: Bounds
) -> tuple[dict[str, Any], Iterator[Row]]:
    """Load the model. Returns facts for the report, and each row when it is measured."""
    settings = _settings(args, lines)
    from retrieval_attn_eval.bench.serve.workload import calls_of
    from retrieval_attn_eval.bench.session.subject import Subject

    subject = Subject(settings)
    calls = calls_of(workload, lines, subject.ids)
    model = {
        "model": settings.name,
        "config": settings.options,
        "facts": subject.about(),
        "simplifications": subject.simplifications,
    }
    return model, _rows(args, ways, settings, subject, calls, bounds)


def _of_server(
    args: argparse.Namespace, ways: Sequence[str], lines: Sequence[Line], bounds: Bounds
) -> tuple[dict[str, Any], Iterator[Row]]:
    """Ask the server for its model. Returns facts for the report, and each row when it is measured."""
    from retrieval_attn.testing import Endpoint, model_names
    from retrieval_attn_eval.bench.serve.server import server_rows

    endpoint = Endpoint.of(args.url)
    name = model_names(endpoint)[0]
    rows = server_rows(endpoint, name, ways, lines, bounds=bounds, seed=args.seed, timeout=args.timeout)
    texts = "common words in a random order; an answer of its own in place of the server's in later prompts"
    return {"model": name, "config": {}, "facts": {"device": "of the server"}, "simplifications": [texts]}, rows


def _workload(args: argparse.Namespace) -> tuple[Workload, list[Line], tuple[str, ...]]:
    """What is to be measured, as the flags say. Raises ConfigError, or InputDataError for a trace."""
    from retrieval_attn_eval.bench.serve.workload import Workload, lines_of
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
    if kind == "agent" and args.length < AGENT_LENGTH:
        raise ConfigError(f"--length {args.length} must be at least {AGENT_LENGTH} for agent; give a larger number")
    _shared(args)
    if args.store is not None and (args.url is not None or Path(args.store).exists()):
        raise ConfigError("--store must be a new folder, of an engine in this process; give another, or remove --url")
    if args.url is not None and args.read_first:
        raise ConfigError("--read-first needs an engine in this process; remove it or --url")
    usual, known = (
        ("engine" if kind in EVICTING else ",".join(ALL), ALL) if args.url is None else (",".join(FORMS), FORMS)
    )
    ways = parse_choices("--systems", args.systems or usual, known)
    trace = read_trace(Path(args.workload), args.n, args.block) if kind == "trace" else []
    workload = Workload(
        kind, args.n, args.length, args.question, args.tokens, args.scale, args.rate, args.speed, args.max_num_seqs,
        args.seed,
    )  # fmt: skip
    return workload, lines_of(workload, trace), ways


def _shared(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """Of the host and of the GPU. Raises ConfigError."""
    from retrieval_attn.memory.units import parse_bytes

    given = (
        (args.prefix_cache_memory, "--prefix-cache-memory"),
        (args.prefix_cache_gpu_memory, "--prefix-cache-gpu-memory"),
    )
    host, device = (None if size is None else parse_bytes(size, name) for size, name in given)
    return host, device


def _settings(args: argparse.Namespace, lines: Sequence[Line]) -> Settings:
    """The model's part, as `bench session` has it: for the longest request. Raises as that does."""
    from retrieval_attn_eval.bench.session.command import settings_of

    length, tokens = max(line.prompt_tokens for line in lines), max(line.answer_tokens for line in lines)
    needs = {"length": length, "tokens": tokens, "questions": str(args.question), "extend": "1", "n": 1, "tail": "with"}
    needs["stages"] = "answer,questions,extend"
    return settings_of(argparse.Namespace(**{**vars(args), **needs}))


def _rows(
    args: argparse.Namespace,
    ways: Sequence[str],
    settings: Settings,
    subject: Subject,
    calls: Sequence[Call],
    bounds: Bounds,
) -> Iterator[Row]:
    """Yield each row when it is measured."""
    from dataclasses import replace

    from retrieval_attn_eval.bench.serve.cache_use import cache_use
    from retrieval_attn_eval.bench.serve.drive import WAYS, Drive, Served, collections_are_short
    from retrieval_attn_eval.bench.serve.peer import peer_row
    from retrieval_attn_eval.bench.serve.row import Row, row_of
    from retrieval_attn_eval.bench.serve.simulated import PromptTree

    llm = Served(subject.model, subject.tokenizer, settings.config)
    cut = args.workload in EVICTING and len(ways) == 1  # rows of the same requests are compared
    drive = Drive(
        llm, args.max_num_seqs, read_first=args.read_first, row_seconds=args.timeout * (2 if cut else 1),
        paged_prefix_tokens=args.paged_prefix_tokens, shared=_shared(args), holds_all=args.workload not in EVICTING,
        store=args.store, send_seconds=args.timeout if cut else None,
    )  # fmt: skip
    drive.warm(calls)
    expected: list[tuple[int, ...]] | None = None
    before = dict.fromkeys(call.request.parts[:-1] for call in calls) if args.read_first else {}
    read = [[token for part in parts for token in part] for parts in before if parts]
    tree: PromptTree | None = None
    # a prompt that continues a cropped one has its index; with fewer keys than all, answers may differ a little
    compared = args.workload != "agent" or args.retrieve == "all"
    for way in ways:
        if way not in WAYS:
            with collections_are_short():
                row = peer_row(settings, calls, bounds, PEER_TOKENS)
            yield row
            continue
        try:
            found, filled, cpu_seconds = drive.serve(way, calls)
        except Exception as error:  # the report names it; other rows go on
            said = str(error).splitlines()
            yield Row(way, "failed", f"{type(error).__name__}: {said[0] if said else ''}"[:300])
            continue
        answers = [one for one in found if one is not None]
        sent = [call for call, one in zip(calls, found, strict=True) if one is not None]
        row = row_of(way, answers, bounds, expected, filled)
        if way == "one" and row.status == "ok" and compared:
            expected = [one.tokens for one in answers]
        tree = tree or PromptTree([*read, *(call.request.ids for call in sent)])  # all ways send the same
        use = cache_use(answers, tree, drive.counts)
        yield replace(row, cpu_seconds=cpu_seconds, note=row.note or drive.gave_up, use=use)


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
