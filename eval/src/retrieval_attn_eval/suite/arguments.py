"""Flags and the course of every command that runs a task suite: checks, dry run, run, report, scoring again.

A command adds its own flags, calls `add_arguments`, and hands its suite to `run`.  Loads neither torch nor a model
before everything else is found to be in order.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.config import YARN_FLAG
from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import Spinner
from retrieval_attn_eval.flags import (
    add_flag,
    as_tokens,
    check_at_least,
    check_matplotlib,
    parse_choices,
    parse_lengths,
    parse_retrieve,
)
from retrieval_attn_eval.models import model_path
from retrieval_attn_eval.suite.suite import TaskSuite

__all__ = ["Options", "add_arguments", "run"]


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    lengths: str | None = None,
    n: int | None = 20,
    index: str = "roargraph",
    tasks: bool = True,
) -> None:
    """Flags that every suite shares.  lengths: the default of --lengths; None: a suite without lengths of its own.

    n: rows per task and length by default; None: all rows of the files.  index: default of the method retrieval.
    tasks: whether tasks are chosen by name.
    """
    parser.formatter_class = argparse.HelpFormatter
    model = parser.add_argument_group("model")
    add_flag(
        model, "--model", "--model-name", metavar="PATH|ID", help="model folder or hub id (default: bundled model)"
    )
    add_flag(model, "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add_flag(
        model,
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="weights and cache; auto: float32 on the CPU, as stored elsewhere",
    )
    add_flag(model, "--yarn", **YARN_FLAG)
    add_flag(model, "--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    add_flag(
        model,
        "--chat-template",
        default="auto",
        choices=["auto", "never"],
        help="auto: use the tokenizer's chat template if it has one",
    )

    rows = parser.add_argument_group("samples")
    if tasks:
        add_flag(rows, "--tasks", default="all", metavar="NAME,NAME", help="tasks to run (default: %(default)s)")
    add_flag(
        rows,
        "--lengths",
        "--context-lengths",
        default=lengths,
        metavar="N,N",
        help="tokens, question and answer included, such as 4096,8k,128k"
        + (f" (default: {lengths})" if lengths else ""),
    )
    every = "all of a file" if n is None else str(n)
    add_flag(
        rows, "--n", "--num-samples", type=int, default=n, metavar="N", help=f"per task and length (default: {every})"
    )
    add_flag(rows, "--seed", type=int, default=42, help="of generated samples (default: %(default)s)")
    add_flag(
        rows,
        "--shard",
        metavar="I/N",
        help="only the I-th of N parts (from 0), into its own folder; --score-only on the folder above joins them",
    )

    methods = parser.add_argument_group("methods")
    add_flag(
        methods,
        "--methods",
        default="full,retrieval",
        metavar="NAME,NAME",
        help="methods to compare, or all (default: full,retrieval)",
    )
    add_flag(
        methods,
        "--question-position",
        default="inside,after",
        help="inside: question read with the prompt; after: asked when the context is indexed (default: both)",
    )
    add_flag(
        methods,
        "--budget",
        type=as_tokens,
        metavar="N",
        help="tokens attended per step and head, for every method but full (default: published parameters)",
    )
    add_flag(methods, "--retrieve", metavar="K", help="keys retrieved per head: a number, all or auto")
    add_flag(methods, "--sink", type=as_tokens, metavar="N", help="first tokens always attended to")
    add_flag(methods, "--window", type=as_tokens, metavar="N", help="recent tokens always attended to")
    add_flag(methods, "--index", metavar="NAME", help=f"index of the method retrieval (default: {index})")
    add_flag(
        methods,
        "--method-option",
        action="append",
        metavar="METHOD.KEY=VALUE",
        help="option of one method, repeatable, such as quest.page=16 or retrieval.append=exact",
    )

    output = parser.add_argument_group("output")
    add_flag(
        output,
        "--output-dir",
        "--output-path",
        metavar="DIR",
        help="results folder; an unfinished one is continued (default: results/SUITE/MODEL-TIME)",
    )
    add_flag(output, "--dry-run", action="store_true", help="check everything, show token counts and cost; run nothing")
    add_flag(output, "--no-plot", action="store_true", help="no PNG plots")
    add_flag(output, "--score-only", metavar="DIR", help="score a results folder, or its shards, again; needs no model")


@dataclass(frozen=True)
class Options:
    """The shared flags, checked."""

    model: str
    device: str
    dtype: str
    yarn: float | None
    threads: int | None
    chat_template: str
    tasks: tuple[str, ...]
    lengths: tuple[int | None, ...]
    n: int | None
    seed: int
    shard: tuple[int, int]
    methods: tuple[str, ...]
    positions: tuple[str, ...]
    method_options: dict[str, dict[str, Any]]
    output_dir: Path | None
    dry_run: bool
    plot: bool

    @classmethod
    def of(cls, args: argparse.Namespace, suite: TaskSuite) -> Options:
        """Raises ConfigError."""
        from retrieval_attn_eval.baselines import METHODS, POSITIONS, check_options

        check_at_least(1, args, "n", "threads")
        shard = _shard(args.shard)
        folder = Path(args.output_dir).expanduser() if args.output_dir else None
        if shard != (0, 1):
            if folder is None:
                raise ConfigError("--shard needs --output-dir DIR, the folder that holds all parts")
            folder = folder / f"shard-{shard[0]}-of-{shard[1]}"
        methods = METHODS if args.methods == "all" else parse_choices("--methods", args.methods, METHODS)
        method_options = _method_options(args)
        check_options(methods, method_options)
        return cls(
            model=model_path(args.model or "bundled"),
            device=args.device,
            dtype=args.dtype,
            yarn=args.yarn,
            threads=args.threads,
            chat_template=args.chat_template,
            tasks=suite.tasks() if args.tasks == "all" else parse_choices("--tasks", args.tasks, suite.tasks()),
            lengths=(None,) if args.lengths is None else parse_lengths(args.lengths),
            n=args.n,
            seed=args.seed,
            shard=shard,
            methods=methods,
            positions=parse_choices("--question-position", args.question_position, POSITIONS),
            method_options=method_options,
            output_dir=folder,
            dry_run=args.dry_run,
            plot=not args.no_plot,
        )

    @property
    def model_name(self) -> str:
        path = Path(self.model)
        return path.resolve().name if path.exists() else self.model


def run(args: argparse.Namespace, suite: TaskSuite) -> int:
    """The command; 0 if every row was answered, 1 if some failed.  Raises RetrievalAttentionError on bad input."""
    from retrieval_attn_eval.suite import scoring

    if args.score_only:
        return scoring.score_again(Path(args.score_only).expanduser(), suite, plot=not args.no_plot)
    options = Options.of(args, suite)
    print(
        f"{suite.name}: methods {', '.join(options.methods)}, model {options.model_name}", file=sys.stderr, flush=True
    )
    with Spinner("loading torch, transformers and the tokenizer"):
        from retrieval_attn_eval.models import load_description
        from retrieval_attn_eval.prompts import frame
        from retrieval_attn_eval.suite.runner import Selection, SuiteRun

        model_config, tokenizer = load_description(options.model, options.yarn)
    selection = Selection(options.tasks, options.lengths, options.n, options.seed, options.shard)
    room = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    form = frame(suite, tokenizer, options.chat_template)
    test = SuiteRun(suite, selection, form, positions=options.positions, max_positions=room)
    if options.dry_run:
        from retrieval_attn_eval.suite.estimate import overview

        print(overview(test, model_config, options.model_name, options.methods, options.device))
        return 0
    return _run(test, options, model_config)


def _run(test: Any, options: Options, model_config: Any) -> int:
    from retrieval_attn_eval.ranks import one_writer

    with one_writer(options.output_dir or _new_folder(test.suite.name, options.model_name)) as folder:
        return _run_into(folder, test, options, model_config)


def _run_into(folder: Path, test: Any, options: Options, model_config: Any) -> int:
    from retrieval_attn_eval.runs import RunFolder, environment
    from retrieval_attn_eval.suite.report import write_report

    if options.plot:
        check_matplotlib()
    settings = _settings(test, options, model_config)
    RunFolder.check(folder, settings)
    began = time.perf_counter()
    with Spinner("making the texts"):
        test.check_contexts()
    with Spinner(f"loading {options.model_name}"):
        import torch
        from transformers.utils.logging import disable_progress_bar

        from retrieval_attn_eval import models
        from retrieval_attn_eval.baselines import build_methods

        if options.threads:
            torch.set_num_threads(options.threads)
        disable_progress_bar()  # one bar, over the samples, is enough
        model = models.load_model(options.model, options.device, options.dtype, options.yarn)
        methods = build_methods(options.methods, model, test.form.tokenizer, options.method_options, options.threads)
    notes = list(getattr(test.suite, "notes", ()))
    start = {**environment(), "torch_threads": torch.get_num_threads(), "dtype": str(model.dtype), "notes": notes}
    if model.device.type == "cuda":
        start["gpu"] = torch.cuda.get_device_name(model.device)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        outcome = test.execute(methods, folder, settings, start=start)
    except KeyboardInterrupt:
        print(f"interrupted; continue with the same flags and --output-dir {folder}", file=sys.stderr)
        raise
    print("\n" + write_report(folder, outcome.rows, test.suite, settings, plot=options.plot))
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.name[0] != '.'))}")
    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    print(f"time: {minutes} min {seconds} s")
    closing = getattr(test.suite, "closing", None)
    if closing and options.model == model_path("bundled"):
        print(closing())
    return 1 if outcome.errors else 0


def _settings(test: Any, options: Options, model_config: Any) -> dict[str, Any]:
    """What decides the meaning of a row; tasks, lengths and methods are in its id, so that a folder can grow."""
    from retrieval_attn.model.loading import choose_device
    from retrieval_attn_eval.models import model_digest

    stretched = {} if options.yarn is None else {"yarn": options.yarn}  # folders from before know no such setting
    return {
        **stretched,
        "suite": test.suite.name,
        "rows": test.suite.fingerprint(),
        "seed": options.seed,
        "model": options.model_name,
        "model_digest": model_digest(options.model) or getattr(model_config, "_commit_hash", None),
        "device": str(choose_device(options.device)),
        "dtype": options.dtype,
        "chat_template": options.chat_template,
        "options": options.method_options,
    }


def _new_folder(suite: str, model: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")
    return Path("results") / suite / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--shard {text!r} does not exist; write I/N with I from 0 to N - 1, such as 0/4")
    return int(match[1]), int(match[2])


def _method_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{"all": shared options that were given, method: its own}."""
    from retrieval_attn_eval.baselines import parse_method_options

    shared: dict[str, Any] = {k: getattr(args, k) for k in ("sink", "window", "budget")}
    shared["retrieve"] = None if args.retrieve is None else parse_retrieve(args.retrieve)
    found: dict[str, dict[str, Any]] = {"all": {k: v for k, v in shared.items() if v is not None}}
    if args.index is not None:
        found["retrieval"] = {"index": args.index}
        if {"all", "retrieval_tail"} & {name.strip() for name in args.methods.split(",")}:
            found["retrieval_tail"] = {"index": args.index}
    for name, own in parse_method_options(args.method_option or ()).items():
        found.setdefault(name, {}).update(own)
    return {name: options for name, options in found.items() if options}
