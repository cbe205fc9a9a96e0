"""`retrieval-attn bench fidelity`: what attending to a part of the context does to the model's next-token distribution.

A text is read, and what follows it is fed token by token through full attention and through every method. Needle tests
ask whether a method finds one key; this sees what all the keys that it leaves out were worth. Writes a table, JSON and
a plot.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.config import YARN_FLAG
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, new_folder

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.fidelity.feed import Budget
    from retrieval_attn_eval.bench.fidelity.measure import Plan
    from retrieval_attn_eval.bench.fidelity.row import Measured, Row

__all__ = ["FLOOR", "add_arguments", "run"]

METHODS = "flat,sketch,roargraph,device,streaming_llm,snapkv,pyramidkv,infllm,quest,infinigen,magicpig"
FLOOR = 1e-7
"""Largest KL in nats with everything retrieved, in float32: more is an error of this program, not of a budget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench fidelity`."""
    add = parser.add_argument
    add("--model", default="bundled", metavar="PATH|ID", help="bundled, a folder or a hub id (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of weights and keys")
    add("--yarn", **YARN_FLAG)
    add("--lengths", default="8k", metavar="N,N", help="tokens of context; k and m count 1024s (default: %(default)s)")
    add(
        "--texts",
        default="prose,code,json,ruler",
        metavar="NAME,NAME",
        help="some of prose,code,json,uuid,ruler,extract, or paths of text files (default: %(default)s)",
    )
    add(
        "--methods",
        default=METHODS,
        metavar="NAME,NAME",
        help=f"kinds of index, with options as in roargraph:beam=250, and published methods (default: {METHODS})",
    )
    add(
        "--retrieve",
        default="5,20,50,100,400,1000",
        metavar="K,K",
        help="keys that a head retrieves: numbers, all or auto (default: %(default)s)",
    )
    add("--tokens", type=as_tokens, default=24, metavar="N", help="tokens fed after the text (default: %(default)s)")
    add(
        "--tail",
        default="both",
        choices=["both", "with", "without"],
        help="whether kinds of index estimate what they do not retrieve (default: %(default)s, in rows of their own)",
    )
    add("--sink", type=as_tokens, default=128, metavar="N", help="first tokens always attended (default: %(default)s)")
    add("--window", type=as_tokens, default=512, metavar="N", help="last tokens always attended (default: %(default)s)")
    add("--host-dtype", default="auto", help="storage of host keys; auto: the model's (default: %(default)s)")
    add("--captured", action="store_true", help="kinds of index decode by captured steps, as answers do; logits alone "
        "are compared")  # fmt: skip
    add("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: all cores (default: %(default)s)")
    add("--n", type=int, default=1, metavar="N", help="texts of each kind and length that a row is the mean of: "
        "other seeds, or the next parts of a file (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of texts and intervals (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG file")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if retrieving everything is not full attention, or a KL is no number. Raises
    RetrievalAttentionError on bad input, before anything is read.
    """
    check_at_least(1, args, "tokens", "n")
    check_at_least(0, args, "threads")
    if not args.no_plot:
        check_matplotlib()
    from retrieval_attn_eval.bench.fidelity.measure import measure, plan_of

    plan = plan_of(args)
    folder = new_folder(args.output_dir, "bench")

    import torch
    from transformers import AutoTokenizer

    from retrieval_attn.model.loading import choose_device, load
    from retrieval_attn.testing import ProgressBar
    from retrieval_attn_eval.bench.fidelity.row import row_of
    from retrieval_attn_eval.bench.fidelity.texts import make_text
    from retrieval_attn_eval.models import load_model, model_path
    from retrieval_attn_eval.runs import environment

    found = environment()
    if args.threads:
        torch.set_num_threads(args.threads)
    name = model_path(args.model)
    model = load_model(name, str(choose_device(args.device)), args.dtype, args.yarn)
    tokenizer = load(AutoTokenizer, name)
    report: dict[str, Any] = {
        "what": "fidelity",
        "finished": False,
        "model": args.model,
        "yarn": args.yarn,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
        "threads": args.threads or torch.get_num_threads(),
        "config": plan.config.to_dict(),
        "seed": args.seed,
        "floor": None,
        "problems": [],
        **found,
    }
    rows: list[Row] = []
    with ProgressBar(total=plan.measurements, unit="run", delay=2.0, leave=False, smoothing=0) as bar:
        for kind in plan.texts:
            for length in plan.lengths:
                runs: dict[tuple[str, Budget | None], list[Measured]] = {}
                for number in range(plan.samples):
                    text = make_text(kind, length, plan.tokens, tokenizer, plan.seed, number)
                    bar.set_description(f"{kind}, {text.context:,} tokens", refresh=False)
                    for one in measure(model, tokenizer, text, plan):
                        bar.update()
                        runs.setdefault((one.method, one.budget), []).append(one)
                for same in runs.values():
                    row = row_of(same, plan.seed)
                    _check(row, plan, report)
                    if row.budget in plan.budgets:
                        rows.append(row)
                _save(folder, rows, report)  # what was measured survives what comes
    report["finished"] = True
    print(_save(folder, rows, report, plot=not args.no_plot))
    print(f"written to {folder}")
    return 1 if report["problems"] else 0


def _check(row: Row, plan: Plan, report: dict[str, Any]) -> None:
    """Everything retrieved is full attention but for rounding, and logits are numbers: else a problem in the report."""
    if row.kl is None:
        return
    where = f"{row.text}, {row.context:,} tokens, {row.method}, retrieve {row.budget}"
    if not math.isfinite(row.kl):
        report["problems"].append(f"{where}: the KL is {row.kl}")
    elif row.budget == "all" and row.method in plan.kinds:
        report["floor"] = max(row.kl, report["floor"] or 0.0)
        exact = report["dtype"] == "float32" and plan.kinds[row.method].host_dtype == "auto"
        if exact and row.kl > FLOOR:
            report["problems"].append(f"{where}: the KL is {row.kl:.1e}, at most {FLOOR:.0e} is rounding")


def _save(folder: Path, rows: Sequence[Row], report: dict[str, Any], *, plot: bool = False) -> str:
    """Write what is known so far; returns the table with its header."""
    from retrieval_attn_eval.bench.fidelity.report import markdown, plots
    from retrieval_attn_eval.bench.plots import save_results

    text = markdown(rows, report)
    whole = {**report, "rows": [asdict(row) for row in rows]}
    save_results(folder, "fidelity", whole, text, plots(rows) if plot else [])
    return text
