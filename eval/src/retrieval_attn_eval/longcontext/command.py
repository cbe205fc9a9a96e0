"""`retrieval-attn longcontext`: tasks that need many places of a text, retrieval beside full attention."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrieval_attn_eval.flags import add_flag
from retrieval_attn_eval.longcontext.files import FILES
from retrieval_attn_eval.longcontext.suite import SPECS, LongContextSuite
from retrieval_attn_eval.suite import arguments

HELP = "forms of MRCR, GraphWalks, OOLONG and Text2JSON; LongBench v2, HELMET, NoLiMa by file"

__all__ = ["add_arguments", "run"]

_LENGTHS = "4096,8192"
_SAMPLES = 20


class _ForScoring(LongContextSuite):
    """The suite without files: every task can be scored."""

    def tasks(self) -> tuple[str, ...]:
        return tuple(SPECS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of these tasks, then those that all suites share."""
    own = parser.add_argument_group("files")
    add_flag(own, "--data-dir", metavar="DIR", help=f"folder with some of {', '.join(FILES.values())}")
    add_flag(
        own,
        "--haystack",
        metavar="PATH",
        help="NoLiMa's books: folder or file (.txt, .jsonl, .json) (default: shipped prose, named in the summary)",
    )
    arguments.add_arguments(parser, lengths=_LENGTHS, n=_SAMPLES)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every sample was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    if args.score_only:
        return arguments.run(args, _ForScoring())
    folder = Path(args.data_dir).expanduser() if args.data_dir else None
    return arguments.run(args, LongContextSuite(folder, Path(args.haystack) if args.haystack else None))
