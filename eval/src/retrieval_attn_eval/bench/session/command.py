"""`retrieval-attn bench session`: what a user waits for, through the public API alone, all layers distinct.

One process with empty compile caches (cold), then one that finds what it left (warm). Each loads the model, reads a
text, asks, switches between two contexts, forks, extends and asks four questions at once; see `stages`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError, ContextLengthError, MemoryPlanError
from retrieval_attn_eval.bench.session.flags import add_model_flags, add_running_flags
from retrieval_attn_eval.bench.session.report import read_baseline
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder, parse_lengths

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.session.children import Process
    from retrieval_attn_eval.bench.session.row import Row
    from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["add_arguments", "run", "settings_of"]

STAGES = "answer, questions, switch, fork, extend, many, memory"
QUICK = {"length": 2048, "questions": "8,32", "extend": "256", "tokens": 8, "repeats": 1, "caches": "warm",
         "skip": "switch"}  # fmt: skip
"""What `--quick` sets, where the flag itself was not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench session`."""
    add = parser.add_argument
    add_model_flags(add)
    add("--length", type=as_tokens, metavar="N", help="tokens of a context; k and m count 1024s (default: 4k)")
    add_running_flags(add)
    add(
        "--tail",
        default="with",
        choices=["with", "without"],
        help="estimate the keys that are not retrieved, or leave them out as the paper does (default: %(default)s)",
    )
    add("--questions", metavar="N,N", help="tokens of the questions (default: 8,32,128,1024)")
    add("--extend", metavar="N,N", help="tokens that a fork is extended by (default: 256,8k)")
    add("--tokens", type=as_tokens, metavar="N", help="tokens of a timed answer (default: 64)")
    add("--repeats", type=int, metavar="N", help="times after the first one (default: 2)")
    add("--caches", metavar="WHICH", help="cold, warm or both in this order; warm alone: as found (default: cold,warm)")
    add("--skip", metavar="NAME,NAME", help=f"left out: {STAGES}")
    add("--random-ids", action="store_true", help="random token ids in place of prose")
    add("--quick", action="store_true", help="a small subset: 2k tokens, caches as found, one repeat, no switch")
    add("--timeout", type=float, default=900.0, metavar="S", help="a row that takes longer ends its process")
    add("--baseline", metavar="FILE", help="session.json of an earlier run: print ratios, this one over that")
    add("--seed", type=int, default=0, help="of texts and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a row failed. Raises RetrievalAttentionError on bad input, before anything is timed."""
    usual = {"length": 4096, "questions": "8,32,128,1024", "extend": "256,8k", "tokens": 64, "repeats": 2,
             "caches": "cold,warm", "skip": ""}  # fmt: skip
    for name, value in {**usual, **(QUICK if args.quick else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_at_least(1, args, "length", "tokens", "repeats")
    if not args.no_plot:
        check_matplotlib()
    caches = _caches(args.caches)
    baseline = None if args.baseline is None else read_baseline(Path(args.baseline))
    settings = settings_of(args)
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.bench.session.children import Process, cache_environment, own_environment, run_process
    from retrieval_attn_eval.runs import environment

    about = environment()
    found: list[Process] = []

    def told(row: Row) -> None:
        print(f"  {row.line()}", file=sys.stderr, flush=True)
        _save(folder, settings, found, about)  # what was measured survives what comes

    with tempfile.TemporaryDirectory(prefix="session-caches-") as name:
        for which in caches:
            base = own_environment()
            variables = base if which == "as found" else cache_environment(Path(name), base)
            print(f"{which} caches:", file=sys.stderr, flush=True)
            found.append(Process(which))
            run_process(found[-1], settings.to_dict(), variables, args.timeout, told)
    text = _save(folder, settings, found, {**about, "finished": True}, plot=not args.no_plot)
    print(text)
    if baseline is not None:
        from retrieval_attn_eval.bench.session.report import ratios

        print(ratios(found, baseline))
    print(f"written to {folder}")
    return 1 if any(row.status == "failed" for process in found for row in process.rows) else 0


def _caches(text: str) -> tuple[str, ...]:
    """Processes in order by the caches that they find. Raises ConfigError."""
    known = {"cold": ("cold",), "warm": ("as found",), "cold,warm": ("cold", "warm")}
    if text not in known:
        raise ConfigError(f"--caches must be one of {'; '.join(known)}, got {text!r}")
    return known[text]


def settings_of(args: argparse.Namespace) -> Settings:
    """The checked flags. Raises ConfigError, InputDataError, ContextLengthError or MemoryPlanError."""
    import retrieval_attn as ra
    import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
    from retrieval_attn.memory.units import parse_bytes
    from retrieval_attn_eval.bench.session.stages import STAGES as KNOWN
    from retrieval_attn_eval.bench.session.subject import Settings
    from retrieval_attn_eval.flags import parse_retrieve

    skip = tuple(part.strip() for part in args.skip.split(",") if part.strip())
    unknown = [name for name in skip if name not in KNOWN or name in ("load", "read")]
    if unknown:
        raise ConfigError(f"--skip {', '.join(unknown)} is not known; use some of {STAGES}")
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be more than 0, got {args.timeout}")
    config = ra.Config(
        index=args.index,
        host_dtype=args.host_dtype,
        retrieve=parse_retrieve(args.retrieve),
        tail=False if args.tail == "without" else "auto",
        threads=args.threads or None,
    )
    settings = Settings(
        model=args.model,
        shape=args.shape,
        device=args.device,
        dtype=args.dtype,
        length=args.length,
        gpu_memory=None if args.gpu_memory is None else parse_bytes(args.gpu_memory, "gpu_memory"),
        options=config.to_dict(),
        questions=parse_lengths(args.questions, "--questions"),
        extensions=() if "extend" in skip else parse_lengths(args.extend, "--extend"),
        tokens=args.tokens,
        repeats=args.repeats,
        random_ids=args.random_ids,
        seed=args.seed,
        skip=skip,
        no_second="",
        layers=args.layers,
    )
    return _checked(settings)


def _checked(settings: Settings) -> Settings:
    """The settings, with the second context left out where the host has no room for it.

    Raises ConfigError for a shape that has no ids for prose, ContextLengthError or MemoryPlanError where the model or
    the machine has no room for the first one.
    """
    from dataclasses import replace

    import retrieval_attn as ra
    from retrieval_attn.memory.units import show_bytes
    from retrieval_attn.model.loading import choose_device
    from retrieval_attn_eval.bench.random_model import model_config

    config = model_config(settings.model, settings.shape, settings.layers)
    prose = model_config("bundled", None).vocab_size
    if settings.shape is not None and not settings.random_ids and config.vocab_size < prose:
        raise ConfigError(
            f"--shape {settings.shape} has {config.vocab_size} token ids, the prose needs {prose}; give --random-ids"
        )
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and settings.max_tokens > most:
        raise ContextLengthError(
            f"--length {settings.length} with its questions, extensions and answers needs {settings.max_tokens} "
            f"positions, the model has {most}; give a shorter --length or --extend"
        )
    device = choose_device(settings.device)
    if device.type != "cuda" and settings.gpu_memory is not None:
        raise MemoryPlanError(f"--gpu-memory was given, but the model would run on {device}; drop it")
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if device.type == "cpu" else None)
    needs = ra.plan(
        config,
        context=settings.max_tokens,
        gpu_memory=settings.gpu_memory or 1 << 50,
        dtype=dtype,
        config=settings.config,
        decide=device.type == "cuda",
        embedding="auto" if settings.shape is None else "device",  # random weights stay where they are made
    ).require()
    # without a GPU the host holds what the device would
    one = needs.host_bytes + (needs.device_bytes if device.type == "cpu" else 0)
    if one > needs.host_memory:
        raise MemoryPlanError(
            f"--length {settings.length}: the model and its context need {show_bytes(one)} of memory, this machine has "
            f"{show_bytes(needs.host_memory)}; give a shorter --length or a smaller model"
        )
    both = one + sum(item.bytes for item in needs.host if item.name != "process and staging")
    if both > needs.host_memory:
        why = f"two contexts need {show_bytes(both)} of host memory, this machine has {show_bytes(needs.host_memory)}"
        return replace(settings, no_second=why)
    return settings


def _save(folder: Path, settings: Settings, found: list[Process], about: dict[str, Any], *, plot: bool = False) -> str:
    """Write what is known so far; returns the table with its header."""
    from retrieval_attn_eval.bench.plots import save_results
    from retrieval_attn_eval.bench.session.report import markdown, plots

    report: dict[str, Any] = {
        "what": "session",
        "finished": False,
        "model": settings.name,
        "gpu_memory": settings.gpu_memory,
        "config": settings.options,
        "settings": settings.to_dict(),
        **about,
        "processes": [process.to_dict() for process in found],
    }
    text = markdown(found, report)
    save_results(folder, "session", report, text, plots(found, settings.name) if plot else [])
    return text
