"""All numbers that are owed of a GPU, in one call; every command can be tried on a processor before.

    python -m tools.card_measures --out FOLDER [--only NAME,...] [--tiny] [--seconds-left N] [--cards N]
        [--tests NAME ...]

Measures run in order of worth, each as a process with a time limit, while seconds are left; one that fails does not
stop the others, and one that is ended says where its threads were. With several cards as many run side by side, each
with its card and its part of the cores: what one does to the host's memory, the other feels. FOLDER gets card.json and
card.md, written anew after each: what was measured survives what comes. Machines that tell too little of their memory:
RETRIEVAL_ATTN_HOST_MEMORY=120GiB. Exit status 1 where a measure failed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from retrieval_attn_eval.runs import environment
from tools.card.measure import Measure
from tools.card.runs import LAST_LINES, Lane, Run, card_names, lanes, run_measure
from tools.card.summary import save
from tools.card.table import measures

LEFT_SECONDS = 15.0
"""Kept back for what comes behind the last measure."""


def chosen(names: str | None, *, tiny: bool, tests: Sequence[str] = ()) -> list[Measure]:
    """The measures of these names, in the order given; None: all. Raises ValueError for a name that is none."""
    known = {measure.name: measure for measure in measures(tiny=tiny, tests=tests)}
    asked = list(known) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)} is not known; use some of {', '.join(known)}")
    return [known[name] for name in asked]


def run_all(
    wanted: Sequence[Measure], folder: Path, seconds: float, *, tiny: bool, commit: str | None, cards: int = 1
) -> list[Run]:
    """Run what seconds allow; what they do not is there as "not run". Raises ValueError where cards are missing."""
    until = time.monotonic() + seconds
    about = {**environment(), "tiny": tiny, "card": next(iter(card_names("name,memory.total")), None), "cards": cards}
    about["commit"] = commit or about["commit"]
    runs = {
        measure.name: Run(measure, "not run", f"it needs {measure.seconds:.0f} s by estimate") for measure in wanted
    }
    save(folder, list(runs.values()), about)
    queue, lock = deque(wanted), threading.Lock()

    def run_some(lane: Lane) -> None:
        while True:
            with lock:
                left = until - time.monotonic() - LEFT_SECONDS
                measure = next((one for one in queue if tiny or left >= one.seconds), None)
                if measure is None:
                    return
                queue.remove(measure)
            run = run_measure(measure, lane, left)
            with lock:
                runs[measure.name] = run
                save(folder, list(runs.values()), about)
                said = ", ".join(f"{row['what']} {row['found']} ({row['verdict']})" for row in run.to_dict()["rows"])
                print(f"{measure.name}: {run.status} in {run.seconds:.0f} s: {said}", file=sys.stderr, flush=True)
                if run.status == "failed":
                    print("\n".join(run.note.splitlines()[:LAST_LINES]), file=sys.stderr, flush=True)

    where = [Lane()] if tiny else lanes(cards)
    with ThreadPoolExecutor(len(where)) as threads:
        for done in [threads.submit(run_some, lane) for lane in where]:
            done.result()
    for measure in queue:
        print(f"{measure.name}: not run, too little time was left", file=sys.stderr, flush=True)
    return list(runs.values())


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--only", metavar="NAME,...", help=", ".join(one.name for one in measures()))
    parser.add_argument("--tiny", action="store_true", help="tiny models on a processor: whether every command works")
    parser.add_argument("--seconds-left", type=float, default=3600.0, metavar="N")
    parser.add_argument("--cards", type=int, default=1, metavar="N", help="so many measures side by side (default: 1)")
    parser.add_argument("--commit", metavar="ID", help="of the tree, where git is not there to tell")
    parser.add_argument("--tests", nargs="+", default=[], metavar="NAME", help="cuda_tests runs these, not all")
    args = parser.parse_args(given)
    try:
        wanted = chosen(args.only, tiny=args.tiny, tests=args.tests)
    except ValueError as error:
        parser.error(str(error))
    try:
        runs = run_all(wanted, args.out, args.seconds_left, tiny=args.tiny, commit=args.commit, cards=args.cards)
    except ValueError as error:
        parser.error(str(error))
    print((args.out / "card.md").read_text(encoding="utf-8"))
    return 1 if any(run.status == "failed" for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
