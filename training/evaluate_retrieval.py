"""The bundled model's tasks through retrieval attention, beside plain transformers on the very same samples.

full: transformers' own generate, sdpa and DynamicCache. inside: the whole prompt is read, generated tokens
retrieve. after: the context is read and indexed, then the question's tokens retrieve too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import retrieval_attn as ra  # noqa: E402
from retrieval_attn_eval.tasks import TASKS, Sample, score  # noqa: E402
from training.evaluate import _make, _start  # noqa: E402

ARMS = ("full", "inside", "after")


def answers(llm: ra.LLM, sample: Sample, ids: list[int], arms: tuple[str, ...]) -> dict[str, str]:
    """Generated text per arm, decoded the same way for all."""
    budget: dict[str, Any] = {"max_new_tokens": sample.max_new_tokens}
    context_ids = llm.tokenizer(sample.context)["input_ids"]
    split = len(context_ids) if ids[: len(context_ids)] == context_ids else len(ids) - 1
    found: dict[str, str] = {}
    if "full" in arms:
        ra.disable(llm.model)
        llm.model.set_attn_implementation("sdpa")
        prompt = torch.tensor([ids], device=llm.model.device)
        model: Any = llm.model
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **budget)
        found["full"] = str(llm.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        ra.enable(llm.model, llm.config)
    if "inside" in arms:
        read = llm.read(ids[:-1], progress=False)
        found["inside"] = read.continue_with(ids[-1:], **budget).text
    if "after" in arms:
        read = ra.Context(llm.model, llm.tokenizer, llm.config, question_attention="retrieval")
        read.read(ids[:split], progress=False)
        found["after"] = read.continue_with(ids[split:], **budget).text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--n", type=int, nargs="+", default=[20], help="samples per cell, one or one per length")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--filler", type=Path, help="folder of held-out .txt files for every second prose haystack")
    parser.add_argument("--retrieve", type=int, default=100)
    parser.add_argument("--seed", type=int, default=50_000, help="first sample seed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="stop starting samples after this")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    counts = args.n if len(args.n) == len(args.lengths) else args.n[:1] * len(args.lengths)
    filler = (
        "\n\n".join(path.read_text(errors="replace") for path in sorted(args.filler.glob("*.txt")))
        if args.filler
        else ""
    )
    jobs = [
        (task, length, args.seed + index)
        for length, count in zip(args.lengths, counts, strict=True)
        for index in range(count)
        for task in args.tasks
    ]
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    started = time.monotonic()
    # The workers start before CUDA does: a forked process must not inherit a CUDA context.
    with multiprocessing.get_context("fork").Pool(args.workers, _start, (str(args.model), filler)) as pool:
        samples = pool.imap(_make, jobs, chunksize=1)
        llm = ra.LLM(args.model, device=args.device, dtype=args.dtype, retrieve=args.retrieve)
        for sample, ids in samples:
            if time.monotonic() - started > args.max_seconds:
                break
            texts = answers(llm, sample, ids, tuple(args.arms))
            cell = cells.setdefault((sample.task, sample.target), {"n": 0, **{arm: 0.0 for arm in args.arms}})
            cell["n"] += 1
            for arm, text in texts.items():
                cell[arm] += score(sample, text)
                if "full" in texts and arm != "full":
                    cell[f"{arm}_same"] = cell.get(f"{arm}_same", 0) + (text == texts["full"])
        pool.terminate()
    rows = []
    for (task, tokens), cell in cells.items():
        rows.append(
            {"task": task, "tokens": tokens, "n": cell["n"]}
            | {name: value / cell["n"] for name, value in cell.items() if name != "n"}
        )
    columns = [*args.arms, *(f"{arm}_same" for arm in args.arms if arm != "full" and "full" in args.arms)]
    print(f"| task | tokens | n | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    for row in rows:
        shown = " | ".join(f"{100 * row[name]:.1f}" for name in columns)
        print(f"| {row['task']} | {row['tokens']:,} | {row['n']} | {shown} |")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    total = time.monotonic() - started
    print(f"top-k {args.retrieve}, {machine}, torch {torch.__version__}, {total:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
