"""`retrieval-attn ruler`: the 13 RULER tasks on a model, methods side by side, at any length."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.flags import add_flag
from retrieval_attn_eval.ruler.specs import HOTPOTQA, SPECS, SQUAD, WORDS
from retrieval_attn_eval.ruler.suite import RulerSuite
from retrieval_attn_eval.suite import arguments

HELP = "the 13 RULER tasks at any length"

__all__ = ["add_arguments", "run"]

_LENGTHS = "4096,8192,16384"
_SAMPLES = 20


class _ForScoring(RulerSuite):
    """The suite without files: every task can be scored, and what a run was made from is in its folder."""

    def tasks(self) -> tuple[str, ...]:
        return tuple(SPECS)

    def notes_for(self, tasks: Iterable[str]) -> list[str]:
        return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark, then those that all suites share."""
    own = parser.add_argument_group("RULER")
    add_flag(
        own,
        "--haystack",
        "--haystack-dir",
        metavar="PATH",
        help="folder or file (.txt, .jsonl, .json) with the essays (default: shipped prose, named in the summary)",
    )
    add_flag(
        own,
        "--data-dir",
        metavar="DIR",
        help=f"folder of the benchmark's files, as far as it has them: {SQUAD} for qa_1, {HOTPOTQA} for qa_2, {WORDS}"
        " (one word per line) for cwe (default: made-up questions qa_synth_1 and qa_synth_2, shipped words)",
    )
    arguments.add_arguments(parser, lengths=_LENGTHS, n=_SAMPLES)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every sample was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    if args.score_only:
        return arguments.run(args, _ForScoring())
    folder = _path(args.data_dir)
    suite = RulerSuite(
        haystack=_path(args.haystack),
        squad=_file(folder, SQUAD),
        hotpotqa=_file(folder, HOTPOTQA),
        words=_file(folder, WORDS),
    )
    if args.tasks != "all":  # a task without its file is answered better here than as an unknown one
        names = [name.strip() for name in args.tasks.split(",") if name.strip()]
        suite.check_tasks(names)
        suite.notes = suite.notes_for(names)
    return arguments.run(args, suite)


def _file(folder: Path | None, name: str) -> Path | None:
    """Return a file of `--data-dir`; None if it is not there. Raises InputDataError for a folder without any file."""
    if folder is None:
        return None
    if not any((folder / known).is_file() for known in (SQUAD, HOTPOTQA, WORDS)):
        raise InputDataError(f"--data-dir {folder}: needed {SQUAD}, {HOTPOTQA} or {WORDS}, found none of them")
    return folder / name if (folder / name).is_file() else None


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None
