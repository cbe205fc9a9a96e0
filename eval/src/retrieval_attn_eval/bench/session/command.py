"""`retrieval-attn bench session`: what a user waits for, through the public API alone, all layers distinct.

One process with empty compile caches (cold), then one that finds what it left (warm). Each loads the model, reads a
text, asks, switches between two contexts, forks, extends and asks four questions at once; see `stages`. The stage
`saving`, which is not run by default, has processes of its own; see `saving`.
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
from retrieval_attn_eval.flags import (
    as_tokens,
    check_at_least,
    check_matplotlib,
    new_folder,
    parse_choices,
    parse_lengths,
)

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.session.children import Process
    from retrieval_attn_eval.bench.session.row import Row
    from retrieval_attn_eval.bench.session.saving import Saved
    from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["add_arguments", "run", "settings_of"]

USUAL = "answer,questions,switch,fork,extend,many,memory"
"""Stages that run by default."""
SAVING = "saving"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench session`."""
    add = parser.add_argument
    add_model_flags(add)
    add(
        "--length",
        type=as_tokens,
        default=4096,
        metavar="N",
        help="tokens of a context; k and m count 1024s (default: 4k)",
    )
    add_running_flags(add)
    add(
        "--tail",
        default="with",
        choices=["with", "without"],
        help="estimate the keys that are not retrieved, or leave them out as the paper does (default: %(default)s)",
    )
    add("--questions", default="8,32,128,1024", metavar="N,N", help="tokens of the questions (default: %(default)s)")
    add("--extend", default="256,8k", metavar="N,N", help="tokens that a fork is extended by (default: %(default)s)")
    add("--tokens", type=as_tokens, default=64, metavar="N", help="tokens of a timed answer (default: %(default)s)")
    add("--n", type=int, default=2, metavar="N", help="repeats after the first time (default: %(default)s)")
    add(
        "--caches",
        default="cold,warm",
        metavar="WHICH",
        help="cold, warm or both in this order; warm alone: as found (default: %(default)s)",
    )
    add(
        "--stages",
        default=USUAL,
        metavar="NAME,NAME",
        help=f"stages to run; {SAVING}: save and open a context, from RAM and from disk (default: %(default)s)",
    )
    add(
        "--store",
        metavar="FOLDER",
        help=f"new or empty folder for stage {SAVING}, on the disk to measure (default: in --output-dir)",
    )
    add("--random-ids", action="store_true", help="random token ids in place of prose")
    add("--timeout", type=float, default=900.0, metavar="S", help="a row that takes longer ends its process")
    add("--baseline", metavar="FILE", help="session.json of an earlier run: print ratios, this one over that")
    add("--seed", type=int, default=0, help="of texts and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a row failed. Raises RetrievalAttentionError on bad input, before anything is timed."""
    check_at_least(1, args, "length", "tokens", "n")
    if not args.no_plot:
        check_matplotlib()
    caches = _caches(args.caches)
    baseline = None if args.baseline is None else read_baseline(Path(args.baseline))
    settings = settings_of(args)
    stages = _stages(args.stages)
    store = _empty_store(args.store)
    folder = new_folder(args.output_dir, "bench")
    from retrieval_attn_eval.bench.session.children import Process, cache_environment, own_environment, run_process
    from retrieval_attn_eval.bench.session.saving import Job, Saved, measure_saving
    from retrieval_attn_eval.runs import environment

    about = environment()
    found: list[Process] = []
    saved = Saved(settings.length)

    def told(row: Row) -> None:
        print(f"  {row.line()}", file=sys.stderr, flush=True)
        _save(folder, settings, found, saved, about)  # what was measured survives what comes

    with tempfile.TemporaryDirectory(prefix="session-caches-") as name:
        for which in caches if set(stages) - {SAVING} else ():
            base = own_environment()
            variables = base if which == "as found" else cache_environment(Path(name), base)
            print(f"{which} caches:", file=sys.stderr, flush=True)
            found.append(Process(which))
            run_process(found[-1], settings.to_dict(), variables, args.timeout, told)
    if SAVING in stages:
        place = folder if store is None else store
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="contexts-", dir=place) as name:
            measure_saving(saved, Job("save", settings, name), args.timeout, told)
    text = _save(folder, settings, found, saved, {**about, "finished": True}, plot=not args.no_plot)
    print(text)
    if baseline is not None:
        from retrieval_attn_eval.bench.session.report import ratios

        print(ratios(found, baseline))
    print(f"written to {folder}")
    processes = [*found, *saved.processes]
    return 1 if any(row.status == "failed" for process in processes for row in process.rows) else 0


def _stages(text: str) -> tuple[str, ...]:
    """Parse `--stages`. Raises ConfigError for an unknown stage, or none."""
    return parse_choices("--stages", text, [*USUAL.split(","), SAVING])


def _empty_store(name: str | None) -> Path | None:
    """Return the folder for saved contexts, None for the results' folder. Raises ConfigError if it has files."""
    if name is None:
        return None
    if Path(name).is_dir() and any(Path(name).iterdir()):
        raise ConfigError(
            f"--store {name} is not empty, and saved contexts are removed at the end; give an empty folder"
        )
    return Path(name)


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
    from retrieval_attn_eval.bench.session.saving import TURN_TOKENS, TURNS
    from retrieval_attn_eval.bench.session.subject import Settings
    from retrieval_attn_eval.flags import parse_retrieve

    chosen = _stages(args.stages)
    skip = tuple(name for name in USUAL.split(",") if name not in chosen)
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
        questions=() if "questions" in skip else parse_lengths(args.questions, "--questions"),
        extensions=() if "extend" in skip else parse_lengths(args.extend, "--extend"),
        tokens=args.tokens,
        repeats=args.n,
        random_ids=args.random_ids,
        seed=args.seed,
        skip=skip,
        no_second="",
        layers=args.layers,
        grown=TURNS * TURN_TOKENS if SAVING in chosen else 0,
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


def _save(
    folder: Path, settings: Settings, found: list[Process], saved: Saved, about: dict[str, Any], *, plot: bool = False
) -> str:
    """Write the results so far. Return the tables with their header."""
    from retrieval_attn_eval.bench.plots import save_results
    from retrieval_attn_eval.bench.session.report import markdown, plots
    from retrieval_attn_eval.bench.session.saving_report import saving_table

    report: dict[str, Any] = {
        "what": "session",
        "finished": False,
        "model": settings.name,
        "gpu_memory": settings.gpu_memory,
        "config": settings.options,
        "settings": settings.to_dict(),
        **about,
        "processes": [process.to_dict() for process in found],
        "saving": saved.to_dict(),
    }
    text = markdown(found or saved.processes[:1], report)
    if saved.processes:
        text += "\n" + saving_table(saved)
    save_results(folder, "session", report, text, plots(found, settings.name) if plot else [])
    return text
