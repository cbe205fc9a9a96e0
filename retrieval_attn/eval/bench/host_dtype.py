"""`python -m retrieval_attn.eval.bench.host_dtype`: what a smaller storage of host keys and values costs in answers.

Every dtype reads the same samples, and is asked the same questions through retrieval; the table gives how many of the
reference answers each found, and how many whole texts equal those of the first dtype. Then, on keys, values and
decode queries of the model itself, the error of attention against float64 over the numbers before they were stored.
Prints tables; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import retrieval_attn.eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn import Config, Context
from retrieval_attn.config import HOST_DTYPES
from retrieval_attn.cpu.attend import attend_ids_heads, attend_range_heads
from retrieval_attn.eval.flags import as_tokens
from retrieval_attn.eval.models import load_model, model_path
from retrieval_attn.eval.tasks import TASKS, make_sample, score
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format, from_float32

__all__ = ["add_arguments", "main", "run"]

_USUAL = "niah_single_2,niah_multikey_1,niah_multivalue,vt,passkey,kv_uuid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add = parser.add_argument
    add("--model", default="bundled", help="bundled, a folder or a hub id (default: %(default)s)")
    add("--tasks", default=_USUAL, metavar="NAME,NAME", help=f"of {', '.join(TASKS)} (default: %(default)s)")
    add("--tokens", type=as_tokens, default=4096, help="tokens of a sample, answer included (default: %(default)s)")
    add("--samples", type=int, default=4, help="per task (default: %(default)s)")
    add("--host-dtypes", default="bfloat16,int8", metavar="NAME,NAME", help="the first is compared with")
    add("--index", default="flat", help="index over the host's keys (default: %(default)s)")
    add("--codes", default="none", choices=("none", "int8"), help="of the flat index (default: %(default)s)")
    add("--retrieve", type=int, default=100, help="keys retrieved per query head (default: %(default)s)")
    add("--append", default="exact", choices=("exact", "retrieval"), help="of the question (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda (default: %(default)s)")
    add("--seed", type=int, default=50_000, help="of the first sample (default: %(default)s)")


def answers(model: Any, tokenizer: Any, args: argparse.Namespace, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """One row per task: share of reference answers found by dtype, and of texts equal to those of the first."""
    options = {"codes": args.codes} if args.index == "flat" else {}
    usual = Config(index=args.index, index_options=options, retrieve=args.retrieve)
    rows = []
    for task in args.tasks.split(","):
        found: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        texts: dict[str, list[str]] = {dtype: [] for dtype in dtypes}
        for number in range(args.samples):
            sample = make_sample(task, args.tokens, args.seed + number, tokenizer)
            for dtype in dtypes:
                context = Context(model, tokenizer, usual.replace(host_dtype=dtype))
                context.read(tokenizer(sample.context)["input_ids"], progress=False)
                got = context.ask(sample.question, raw=True, append=args.append, max_new_tokens=sample.max_new_tokens)
                found[dtype].append(score(sample, got.text))
                texts[dtype].append(got.text)
        row: dict[str, Any] = {"task": task, "n": args.samples}
        for dtype in dtypes:
            row[dtype] = round(100 * float(np.mean(found[dtype])), 1)
        for dtype in dtypes[1:]:
            same = [a == b for a, b in zip(texts[dtypes[0]], texts[dtype], strict=True)]
            row[f"{dtype}: same text"] = f"{sum(same)} of {len(same)}"
        rows.append(row)
    return rows


def errors(model: Any, tokenizer: Any, args: argparse.Namespace, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """One row per dtype: errors of attention on the model's own keys, values and decode queries, against float64.

    Of the output, as a share of the largest value of the head, median and worst query; of the log-sum-exp; over all
    keys and over the exact top k of the stored keys, of which `recall` are among those of the unrounded ones.
    """
    from retrieval_attn.eval.recording.options import RecordOptions
    from retrieval_attn.eval.recording.record import record

    sample = make_sample("niah_multikey_1", args.tokens, args.seed, tokenizer)
    ids = tokenizer(sample.context)["input_ids"]
    after = tokenizer(sample.question + sample.completion, add_special_tokens=False)["input_ids"]
    recorded = record(model, ids, after, RecordOptions(train=0, storage="float32"))
    rows = []
    for dtype in dtypes:
        fmt = Format.from_name(dtype)
        every: dict[str, list[npt.NDArray[Any]]] = {"out": [], "lse": [], "best out": [], "recall": []}
        for head in recorded.heads:
            queries = np.ascontiguousarray(head.decode.reshape(1, -1, head.decode.shape[-1]))
            keys, values = (from_float32(array[None], fmt) for array in (head.keys, head.values))
            largest = np.abs(head.values).max()
            scores = queries[0].astype(np.float64) @ head.keys.astype(np.float64).T
            right, right_lse = _attention(scores * head.scale, head.values)
            out, lse = attend_range_heads(queries, keys, values, 0, keys.shape[1], fmt, head.scale)
            every["out"].append(np.abs(out[0] - right).max(axis=1) / largest)
            every["lse"].append(np.abs(lse[0] - right_lse))
            best = search_exact(keys, queries, args.retrieve, fmt).ids
            wanted = np.argpartition(-scores, args.retrieve, axis=1)[:, : args.retrieve]
            same = [len(np.intersect1d(a, b)) / args.retrieve for a, b in zip(best[0], wanted, strict=True)]
            every["recall"].append(np.array(same))
            part, _ = attend_ids_heads(queries, keys, values, best, fmt, head.scale)
            right = np.stack(
                [_attention(s[i] * head.scale, head.values[i])[0] for s, i in zip(scores, best[0], strict=True)]
            )
            every["best out"].append(np.abs(part[0] - right).max(axis=1) / largest)
        row: dict[str, Any] = {"dtype": dtype, "heads": len(recorded.heads)}
        for name, pieces in every.items():
            numbers = np.concatenate(pieces)
            row[f"{name} median"] = float(f"{np.median(numbers):.2e}")
            row[f"{name} worst"] = float(f"{numbers.min() if name == 'recall' else numbers.max():.2e}")
        rows.append(row)
    return rows


def _attention(
    logits: npt.NDArray[np.float64], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Softmax over the last axis of logits, weighted sum of values and log-sum-exp, in float64."""
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ values.astype(np.float64) / total, (top + np.log(total))[..., 0]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(row[name]) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare what is asked for; prints both tables and returns all figures. Raises RetrievalAttentionError."""
    from transformers import AutoTokenizer

    dtypes = args.host_dtypes.split(",")
    for dtype in dtypes:
        Config(host_dtype=dtype)  # before the model is loaded
    name = model_path(args.model)
    model, tokenizer = load_model(name, args.device, "auto"), AutoTokenizer.from_pretrained(name)
    figures: dict[str, Any] = {"arguments": vars(args), "answers": answers(model, tokenizer, args, dtypes)}
    print(f"\nPercent of reference answers, {args.tokens} tokens\n" + _table(figures["answers"]), flush=True)
    stored = [dtype for dtype in dtypes if dtype != HOST_DTYPES[0]]
    figures["errors"] = errors(model, tokenizer, args, stored)
    print("\nError of attention against float64\n" + _table(figures["errors"]), flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_attn.eval.bench.host_dtype", description=__doc__)
    add_arguments(parser)
    print(json.dumps(run(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
