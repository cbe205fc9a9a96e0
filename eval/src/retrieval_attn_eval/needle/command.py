"""`retrieval-attn needle`: sentences hidden in a long text, asked for at every length and depth.

The test follows the published needle-in-a-haystack grid; the needle changes from cell to cell, so that an answer
cannot be remembered, and scoring looks for it in the output only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from retrieval_attn_eval.flags import add_flag, as_tokens, check_at_least
from retrieval_attn_eval.needle import grid
from retrieval_attn_eval.needle.presets import PRESETS, preset_of
from retrieval_attn_eval.needle.suite import NeedleSuite
from retrieval_attn_eval.needle.text import ANSWER_TOKENS, MORE_ANSWER_TOKENS, NeedleText
from retrieval_attn_eval.suite import arguments

HELP = "find a needle in a long text, retrieval next to full attention"

__all__ = ["add_arguments", "run", "suite_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the needle test, then those that all suites share."""
    own = parser.add_argument_group("grid")
    add_flag(
        own,
        "--preset",
        metavar="FIGURE",
        help=f"lengths, depths, rounds, methods and budgets of the paper's {', '.join(PRESETS)}; other flags win",
    )
    grid.add_arguments(own)
    text = parser.add_argument_group("text")
    add_flag(
        text,
        "--needle",
        action="append",
        metavar="TEXT",
        help="sentence to hide, repeatable; {city} is drawn for every cell, {number} for every needle",
    )
    add_flag(
        text,
        "--needles",
        metavar="N",
        help="needles per context: the first at the cell's depth, the others evenly between it and the end; one"
        " question asks for all, the score is the share found (default: the number of --needle)",
    )
    add_flag(text, "--question", "--retrieval-question", help="what to ask, with the same holes")
    add_flag(
        text,
        "--answer",
        action="append",
        metavar="TEXT",
        help="expected in the answer, repeatable (default: {number} of the needle)",
    )
    add_flag(
        text,
        "--haystack",
        "--haystack-dir",
        metavar="PATH",
        help="folder or file (.txt, .jsonl, .json) to hide it in (default: shipped prose)",
    )
    add_flag(
        text,
        "--max-new-tokens",
        type=as_tokens,
        metavar="N",
        help=f"room for the answer (default: {ANSWER_TOKENS}, and {MORE_ANSWER_TOKENS} for every further needle)",
    )
    arguments.add_arguments(parser, lengths=grid.LENGTHS, n=1, index="auto", tasks=False)
    # a preset may say what was not given
    parser.set_defaults(lengths=None, n=None, methods=None, tasks="all")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every cell was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    return arguments.run(args, NeedleSuite() if args.score_only else suite_of(args))


def suite_of(args: argparse.Namespace) -> NeedleSuite:
    """The suite of the flags; what a preset or nothing says for the shared ones is filled in.  Raises ConfigError."""
    preset = preset_of(args.preset) if args.preset else None
    if preset is not None:
        args.lengths = args.lengths or preset.lengths
        args.depths = args.depths or preset.depths
    args.methods = ("full,retrieval" if preset is None else preset.methods) if args.methods is None else args.methods
    args.n = (1 if preset is None else preset.rounds) if args.n is None else args.n
    # every context is asked once: full attention's keys need not wait for a second question
    ahead = ["full.keep_context=false", *(preset.method_options if preset else ())]
    args.method_option = [*ahead, *(args.method_option or ())]
    args.index = args.index or "auto"
    check_at_least(1, args, "max_new_tokens")
    lengths = grid.lengths_asked(args)
    args.lengths = ",".join(map(str, lengths))
    return NeedleSuite(
        NeedleText.of(args.needle, args.needles, args.question, args.answer),
        grid.depths_asked(args),
        lengths,
        haystack=Path(args.haystack) if args.haystack else None,
        max_new_tokens=args.max_new_tokens,
    )
