"""`retrieval-attn reproduce`: a table or figure of the paper again, its own numbers beside ours.

Runs the commands it prints, each into its own folder, continued if it was interrupted.  Scaled down by default, so
that it ends on a CPU with the bundled model; --full asks for the paper's lengths, sample counts and budgets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.reproduce.experiments import EXPERIMENTS, Experiment, Size, Step
from retrieval_attn_eval.reproduce.paper import MODELS

HELP = "a table or figure of the paper, measured values next to the paper's"

__all__ = ["add_arguments", "run"]

WITH_FILES = ("table2", "table10", "table11")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn reproduce`."""
    add = parser.add_argument
    add("what", metavar="TABLE", help=f"list, or one of {', '.join(EXPERIMENTS)}")
    add("--model", metavar="PATH|ID", help="model folder or hub id (default: bundled model)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--full", action="store_true", help="the paper's lengths, sample counts and budgets")
    add("--lengths", metavar="N,N", help="other lengths; as the command that is run wants them")
    add("--n", type=int, metavar="N", help="other number of samples")
    add("--data-dir", metavar="DIR", help=f"InfiniteBench's files, for {', '.join(WITH_FILES)}")
    add(
        "--question-position",
        default="inside",
        choices=["inside", "after"],
        help="inside: question read with the prompt, as in the paper; after: asked when the context is indexed",
    )
    add("--output-dir", metavar="DIR", help="results folder (default: results/reproduce/TABLE-SIZE-MODEL)")
    add("--dry-run", action="store_true", help="show the commands and the paper's numbers; run nothing")


def run(args: argparse.Namespace) -> int:
    """0 done, 1 a command found failures.  Raises ConfigError for what this machine or version cannot run."""
    from retrieval_attn_eval.reproduce.compare import comparison, paper_only

    if args.what == "list":
        for name, known in EXPERIMENTS.items():
            print(f"{name:9} {known.title}{'  [--full needs a GPU]' if known.cuda else ''}")
        return 0
    name = re.sub(r"[^a-z0-9]", "", args.what.lower())
    if name not in EXPERIMENTS:
        raise ConfigError(f"{args.what!r} is unknown; choose list or one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    if args.n is not None and args.n < 1:
        raise ConfigError(f"--n must be at least 1, got {args.n}; give a larger number")
    if args.data_dir and name not in WITH_FILES:
        raise ConfigError(f"--data-dir belongs to {', '.join(WITH_FILES)}; leave it out")
    size = Size(args.full, args.model, args.device, args.lengths, args.n, args.data_dir, args.question_position)
    steps = experiment.steps(size)
    folder = Path(args.output_dir).expanduser() if args.output_dir else _folder(name, args)
    print(experiment.title)
    if experiment.scaled and not args.full:
        print(f"scaled down: {experiment.scaled}; --full for the paper's size")
    for step in steps:
        print(f"$ {shown(step, folder)}")
    print(flush=True)
    if args.dry_run:
        print(paper_only(name, experiment, _paper_model(args.model)))
    _require(experiment, args)
    if args.dry_run:
        return 0
    for step in steps:
        code = _execute(step, folder)
        if code in (1, 2) and step.optional:
            print(f"{step.folder}: no result, its message is above; the table says so", flush=True)
            continue
        if code not in (0, 1):
            raise ConfigError(f"{name}: `{shown(step, folder)}` ended with {code}; its message is above")
        if code:
            print("exit 1: some answers failed or it broke off, see above; the same command again goes on from there")
            return 1
    text = comparison(name, experiment, folder, steps, _paper_model(args.model))
    from retrieval_attn_eval.runs import write_atomically

    write_atomically(folder / "comparison.md", f"# {experiment.title}\n\n{text}\n")
    print(f"\n{text}\n\n{folder / 'comparison.md'}")
    return 0


def _paper_model(name: str | None) -> str:
    """Return the model of the paper that `name` contains, without regard to case; else the paper's first."""
    return next((model for model in MODELS if model.lower() in (name or "").lower()), MODELS[0])


def shown(step: Step, folder: Path) -> str:
    """The step as one would type it."""
    return shlex.join(["retrieval-attn", *step.words, "--output-dir", str(folder / step.folder)])


def _require(experiment: Experiment, args: argparse.Namespace) -> None:
    """Raises ConfigError, with what is needed, for what cannot be run here."""
    if args.dry_run or not (experiment.cuda and args.full):
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{experiment.title}: the paper's size needs a CUDA device, and torch sees none; leave --full out, run it"
            " where there is one, or use --dry-run"
        )


def _execute(step: Step, folder: Path) -> int:
    """Exit code of the step, run by this Python in this folder; finished results that do not grow are kept."""
    target = folder / step.folder
    if _finished(target):
        print(f"{target} holds results already; they are used as they are")
        return 0
    if (target / "session.json").is_file():
        aside = next(
            p for n in itertools.count(1) if not (p := target.with_name(f"{target.name}-unfinished-{n}")).exists()
        )
        target.rename(aside)
        print(f"{target} held a run that did not end; it is in {aside.name} now and starts again")
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "retrieval_attn.cli", *step.words, "--output-dir", str(target)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    ).returncode


def _finished(folder: Path) -> bool:
    """Return whether the folder has the complete results of a step that cannot be continued."""
    if (folder / "study.json").is_file():  # written at the end
        return True
    session = folder / "session.json"  # written after every row
    return session.is_file() and bool(json.loads(session.read_text(encoding="utf-8")).get("finished", True))


def _folder(name: str, args: argparse.Namespace) -> Path:
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(args.model).name if args.model else "bundled").strip("-")
    size = "full" if args.full else "small"
    return (
        Path("results") / "reproduce" / f"{name}-{size}-{model}{'-after' if args.question_position == 'after' else ''}"
    )
