"""What a suite's predictions say, as JSON values: cells, means per length, paired comparisons."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retrieval_attn_eval.suite import statistics

__all__ = ["agreement", "cells", "comparisons", "curves", "length_label", "ordered", "summarise"]

Prediction = Mapping[str, Any]
# Of two methods that differ in one thing only: the index takes Flat's place at the same number of keys.
INDEXES = ("ivf", "hnsw", "roargraph", "retrieval")
TAIL_PAIR = ("retrieval", "retrieval_tail")


def good(rows: Iterable[Prediction]) -> list[Prediction]:
    return [row for row in rows if not row.get("error")]


def ordered(found: Iterable[str], known: Sequence[str]) -> list[str]:
    """The names in the order of `known`, others after them."""
    place = {name: at for at, name in enumerate(known)}
    return sorted(set(found), key=lambda name: (place.get(name, len(place)), name))


def _groups(rows: Iterable[Prediction], *fields: str) -> dict[tuple[Any, ...], list[Prediction]]:
    groups: dict[tuple[Any, ...], list[Prediction]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[field] for field in fields)].append(row)
    return groups


def cells(rows: Sequence[Prediction], tasks: Sequence[str], methods: Sequence[str]) -> list[dict[str, Any]]:
    """One entry per method, position, length and task.

    score, error_of_score: mean and standard error, 0..1, None if unknown.  nulls: empty answers.  over: prompts that
    with their answer exceed the requested length.  fill: mean share of the requested length that is used.
    attended: mean tokens attended per step and KV head, where the method measures it.
    """
    task_order = {name: i for i, name in enumerate(tasks)}
    method_order = {name: i for i, name in enumerate(methods)}
    found = []
    for (method, position, length, task), group in _groups(rows, "method", "position", "length", "task").items():
        answered = good(group)
        scores = [float(row["score"]) for row in answered]
        further = sorted({name for row in answered for name in row.get("scores", {})})
        sized = [row for row in answered if row.get("target_tokens") and row.get("prompt_tokens")]
        used = [(row["prompt_tokens"] + row["max_new_tokens"]) / row["target_tokens"] for row in sized]
        tokens = sum(row["output_tokens"] for row in answered)
        decode = sum(row["seconds"].get("decode", 0.0) for row in answered)
        found.append(
            {
                "method": method,
                "position": position,
                "length": length,
                "task": task,
                "n": len(answered),
                "score": statistics.mean(scores),
                "error_of_score": statistics.standard_error(scores),
                **{f"score_{name}": _mean(row["scores"].get(name) for row in answered) for name in further},
                "nulls": sum(bool(row.get("empty", not row["response"].strip())) for row in answered),
                "errors": len(group) - len(answered),
                "truncated": sum(bool(row.get("meta", {}).get("truncated")) for row in answered),
                "over": sum(share > 1.0 for share in used),
                "cut_by_budget": sum(row["finish_reason"] == "length" for row in answered),
                "fill": statistics.mean(used),
                "prompt_tokens": _mean(row.get("prompt_tokens") for row in answered),
                "output_tokens": _mean(row["output_tokens"] for row in answered),
                "attended": _mean(row.get("stats", {}).get("tokens_attended_per_step") for row in answered),
                "prefill_seconds": _mean(row["seconds"].get("prefill") for row in answered),
                "index_seconds": _mean(row["seconds"].get("index") for row in answered),
                "decode_seconds_per_token": decode / tokens if tokens else None,
            }
        )
    return sorted(
        found,
        key=lambda c: (
            c["position"] != "inside",
            method_order.get(c["method"], len(method_order)),
            c["method"],
            c["length"] or 0,
            task_order.get(c["task"], len(task_order)),
        ),
    )


def curves(rows: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One entry per method, position and length: mean over the tasks and its standard error, 0..1.

    tasks: how many tasks the mean is over; methods are comparable only where these agree.
    """
    found = []
    for (method, position, length), group in _groups(good(rows), "method", "position", "length").items():
        by_task = [[float(row["score"]) for row in same] for same in _groups(group, "task").values()]
        value, error = statistics.mean_of_groups(by_task)
        found.append(
            {
                "method": method,
                "position": position,
                "length": length,
                "tasks": len(by_task),
                "n": len(group),
                "score": value,
                "error_of_score": error,
                "attended": _mean(row.get("stats", {}).get("tokens_attended_per_step") for row in group),
            }
        )
    return found


def comparisons(rows: Sequence[Prediction], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Paired differences, per position and length: every method with full attention, every index with flat search.

    Only samples that both answered count.  An entry has Difference's fields; task None is the mean over the tasks.
    """
    found = []
    for (position, length), group in sorted(
        _groups(good(rows), "position", "length").items(), key=lambda item: (item[0][0] != "inside", item[0][1] or 0)
    ):
        by_method = {
            method: {(row["task"], row["index"]): float(row["score"]) for row in same}
            for (method,), same in _groups(group, "method").items()
        }
        for first, second in _pairs(ordered(by_method, methods)):
            a, b = by_method[first], by_method[second]
            shared: dict[str, list[tuple[str, int]]] = defaultdict(list)
            for key in sorted(a.keys() & b.keys()):
                shared[key[0]].append(key)
            if not shared:
                continue
            tasks: list[str | None] = [None, *shared] if len(shared) > 1 else list(shared)
            for task in tasks:
                keys = list(shared.values()) if task is None else [shared[task]]
                difference = statistics.paired_difference(
                    [[a[k] for k in part] for part in keys],
                    [[b[k] for k in part] for part in keys],
                    resamples=statistics.RESAMPLES if task is None else statistics.RESAMPLES // 5,
                )
                head = {"first": first, "second": second, "position": position, "length": length, "task": task}
                found.append({**head, **asdict(difference)})
    return found


def agreement(rows: Sequence[Prediction]) -> dict[str, dict[str, dict[str, int]]]:
    """Per method and position: samples that full attention answered too, with the same text, with the same score."""
    exact = {(row["task"], row["length"], row["index"], row["position"]): row for row in good(rows) if _is_full(row)}
    found: dict[str, dict[str, dict[str, int]]] = {}
    for row in good(rows):
        full = exact.get((row["task"], row["length"], row["index"], row["position"]))
        if full is not None and not _is_full(row):
            counts = found.setdefault(row["method"], {})
            count = counts.setdefault(row["position"], {"answers": 0, "same_text": 0, "same_score": 0})
            count["answers"] += 1
            count["same_text"] += full["response"] == row["response"]
            count["same_score"] += full["score"] == row["score"]
    return found


def _is_full(row: Prediction) -> bool:
    return bool(row["method"] == "full")


def _pairs(methods: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [("full", method) for method in methods if method != "full"] if "full" in methods else []
    pairs += [("flat", method) for method in methods if method in INDEXES and "flat" in methods]
    return pairs + ([TAIL_PAIR] if set(TAIL_PAIR) <= set(methods) else [])


def summarise(rows: Sequence[Prediction], tasks: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    """Everything above, and the totals of the run."""
    return {
        "answers": len(rows),
        "errors": len(rows) - len(good(rows)),
        "cells": cells(rows, tasks, methods),
        "curves": curves(rows),
        "comparisons": comparisons(rows, methods),
        "agreement": agreement(rows),
    }


def length_label(tokens: int) -> str:
    """4096 -> "4K", 131072 -> "128K", 1048576 -> "1M", 5000 -> "5000"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


def _mean(values: Iterable[Any]) -> float | None:
    known = [float(v) for v in values if v is not None and not math.isnan(float(v))]
    return statistics.mean(known)
