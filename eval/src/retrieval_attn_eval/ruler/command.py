"""`retrieval-attn ruler`: the 13 RULER tasks on a model, methods side by side, at any length."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from retrieval_attn_eval.flags import add_flag, as_tokens
from retrieval_attn_eval.ruler.specs import SPECS
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
    add_flag(own, "--squad", metavar="FILE", help="SQuAD dev-v2.0.json, for qa_1 (default: made-up qa_synth_1 instead)")
    add_flag(
        own,
        "--hotpotqa",
        metavar="FILE",
        help="hotpot_dev_distractor_v1.json, for qa_2 (default: made-up qa_synth_2 instead)",
    )
    add_flag(own, "--words", metavar="FILE", help="one word per line, for cwe (default: shipped, then pseudo-words)")
    add_flag(
        own,
        "--reserve-tokens",
        type=as_tokens,
        default=0,
        metavar="N",
        help="tokens of every length to leave unused (default: %(default)s)",
    )
    arguments.add_arguments(parser, lengths=_LENGTHS, n=_SAMPLES)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every sample was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    if args.score_only:
        return arguments.run(args, _ForScoring())
    suite = RulerSuite(
        haystack=_path(args.haystack),
        squad=_path(args.squad),
        hotpotqa=_path(args.hotpotqa),
        words=_path(args.words),
        reserve_tokens=args.reserve_tokens,
    )
    if args.tasks != "all":  # a task without its file is answered better here than as an unknown one
        names = [name.strip() for name in args.tasks.split(",") if name.strip()]
        suite.check_tasks(names)
        suite.notes = suite.notes_for(names)
    return arguments.run(args, suite)


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None
