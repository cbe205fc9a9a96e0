"""Greedy exact-match evaluation of a model folder with full attention, per task and length.

Samples use seeds that training never draws.  With --filler every second prose sample uses that text.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from retrieval_attn_eval.tasks import TASKS, Sample, make_sample, score  # noqa: E402
from training.model import load  # noqa: E402

_STATE: dict[str, Any] = {}


def _start(folder: str, filler: str) -> None:
    from transformers import AutoTokenizer

    _STATE["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    _STATE["filler"] = filler


def _make(job: tuple[str, int, int]) -> tuple[Sample, list[int]]:
    """Sample and token ids of (task, num_tokens, seed)."""
    task, num_tokens, seed = job
    tokenizer, filler = _STATE["tokenizer"], _STATE["filler"]
    haystack = None
    if filler and seed % 2:
        size = num_tokens * 5
        at = random.Random(seed).randrange(max(len(filler) - size, 1))
        haystack = filler[filler.find(" ", at) + 1 :][:size]
    sample = make_sample(task, num_tokens, seed, tokenizer, haystack=haystack)
    return sample, tokenizer.encode(sample.prompt)


def evaluate(
    folder: Path, jobs: list[tuple[str, int, int]], filler: str, device: str, workers: int
) -> list[dict[str, Any]]:
    """One row per (task, length): n, mean score, exact rate and the wrong outputs (at most 3)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load(folder, device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    waiting: list[tuple[Sample, list[int]]] = []

    def flush() -> None:
        room = max(sample.max_new_tokens for sample, _ in waiting) + 16
        for (sample, _), out in zip(waiting, model.generate([ids for _, ids in waiting], room, 1), strict=True):
            text = str(tokenizer.decode(out))
            cell = cells.setdefault((sample.task, sample.target), {"n": 0, "score": 0.0, "exact": 0, "wrong": []})
            cell["n"] += 1
            cell["score"] += score(sample, text)
            cell["exact"] += text == sample.completion
            if score(sample, text) < 1 and len(cell["wrong"]) < 3:
                cell["wrong"].append([sample.completion, text])
        waiting.clear()

    context = multiprocessing.get_context("fork")
    with context.Pool(workers, _start, (str(folder), filler)) as pool:
        for item in pool.imap(_make, jobs, chunksize=1):
            if waiting and (waiting[0][0].target != item[0].target or len(waiting) * item[0].target >= 262_144):
                flush()
            waiting.append(item)
        flush()
    return [
        {
            "task": task,
            "tokens": tokens,
            "n": c["n"],
            "score": c["score"] / c["n"],
            "exact": c["exact"] / c["n"],
            "wrong": c["wrong"],
        }
        for (task, tokens), c in cells.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Text table: tasks down, lengths across; score in percent with the number of samples."""
    lengths = sorted({row["tokens"] for row in rows})
    known = {(row["task"], row["tokens"]): row for row in rows}
    lines = ["| task | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = [known.get((task, n)) for n in lengths]
        lines.append(
            f"| {task} | " + " | ".join(f"{100 * c['score']:.1f} (n={c['n']})" if c else "" for c in cells) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32768, 131072])
    parser.add_argument(
        "--n", type=int, nargs="+", default=[100], help="samples per cell, one number or one per length"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--filler", type=Path, help="folder of held-out .txt files for every second prose haystack")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--seed", type=int, default=10_000, help="first sample seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    counts = args.n if len(args.n) == len(args.lengths) else args.n[:1] * len(args.lengths)
    filler = (
        "\n\n".join(p.read_text(errors="replace") for p in sorted(args.filler.glob("*.txt"))) if args.filler else ""
    )
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for length, n in zip(args.lengths, counts, strict=True):
        jobs = [(task, length, args.seed + i) for task in args.tasks for i in range(n)]
        start = time.monotonic()
        rows += evaluate(args.model, jobs, filler, args.device, args.workers)
        print(f"{length}: {time.monotonic() - start:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    for row in rows:
        for want, got in row["wrong"][:2]:
            print(f"wrong {row['task']} {row['tokens']}: want {want!r} got {got!r}"[:300])
    print(f"total {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
