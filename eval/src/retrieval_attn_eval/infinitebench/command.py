"""`retrieval-attn infinitebench`: the benchmark's tasks on a model, from its files or generated at any length."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.flags import add_flag
from retrieval_attn_eval.infinitebench.catalogue import TASKS, check_tasks
from retrieval_attn_eval.infinitebench.profiles import PROFILES
from retrieval_attn_eval.infinitebench.suite import InfiniteBench
from retrieval_attn_eval.suite import arguments

HELP = "the 12 InfiniteBench tasks, from its files or generated"

__all__ = ["add_arguments", "run"]

_LENGTHS = "4096,8192,16384"
_SAMPLES = 20


class _ForScoring(InfiniteBench):
    """The suite without data: every task can be scored."""

    def tasks(self) -> tuple[str, ...]:
        return TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark, then those that all suites share."""
    own = parser.add_argument_group("InfiniteBench")
    add_flag(
        own,
        "--data-dir",
        metavar="DIR",
        help="folder of the benchmark's TASK.jsonl files, for all 12 tasks; without it the six tasks with a public"
        f" recipe are generated (at {_LENGTHS} tokens, {_SAMPLES} samples each, if not said otherwise)",
    )
    add_flag(
        own,
        "--profile",
        default="minference",
        choices=list(PROFILES),
        help="whose prompts and answer lengths to use (default: %(default)s)",
    )
    add_flag(
        own,
        "--max-new-tokens",
        action="append",
        metavar="TASK=N",
        help="room for a task's answer instead of the profile's, repeatable",
    )
    arguments.add_arguments(parser, lengths=None, n=None)
    parser.set_defaults(tasks="paper")  # the seven tasks of the paper's table 2, as far as they can be had


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every row was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    rooms = _rooms(args.max_new_tokens or ())
    if args.score_only:
        return arguments.run(args, _ForScoring(profile=args.profile))
    folder = Path(args.data_dir).expanduser() if args.data_dir else None
    suite = InfiniteBench(folder, profile=args.profile, max_new_tokens=rooms)
    if folder is None:
        args.lengths = args.lengths or _LENGTHS
        args.n = _SAMPLES if args.n is None else args.n
    args.tasks = ",".join(check_tasks(args.tasks.split(","), suite.tasks()))
    return arguments.run(args, suite)


def _rooms(texts: list[str] | tuple[()]) -> dict[str, int]:
    rooms = {}
    for text in texts:
        match = re.fullmatch(r"\s*([\w.]+)=(\d+)\s*", text)
        if match is None:
            raise ConfigError(f"--max-new-tokens {text!r}: needed TASK=N; write kv_retrieval=100")
        rooms[check_tasks([match[1]])[0]] = int(match[2])
    return rooms
