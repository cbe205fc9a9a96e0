"""`retrieval-attn bench study`: the RetrievalAttention paper's figures about attention keys, on your own heads.

Figure 2: how much attention the best 1,000 keys hold, chosen anew for each decoded token (dynamic) or once for the
first (static). Figures 3a and 6: recall against the share of keys scored, for queries searching keys and for keys
searching keys. Figure 3b: Mahalanobis distances of queries and of keys from the keys. (arXiv 2409.10516)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.bench.index import add_source_arguments, source_of
from retrieval_attn_eval.flags import as_tokens, new_folder

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.heads import Head
    from retrieval_attn_eval.bench.measure import Point
    from retrieval_attn_eval.bench.plots import Plot

__all__ = ["add_arguments", "mahalanobis", "recovery", "run"]

FIGURES = ("2", "3a", "3b", "6")
STATIC_K = 1000
"""Keys of figure 2."""
SCANS = ("flat", "ivf", "hnsw", "hnsw-ip", "roargraph")
SAMPLE = 20000
"""Most keys that a covariance is estimated from; more change its third digit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench study`."""
    add = parser.add_argument
    add("--figures", default="all", metavar="N,N", help=f"of {', '.join(FIGURES)} (default: %(default)s)")
    add("--length", type=as_tokens, default=32768, metavar="N", help="tokens of context (default: %(default)s)")
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write one JSON file and one PNG per figure. Raises RetrievalAttentionError on bad input."""
    figures = list(FIGURES) if args.figures == "all" else [part.strip() for part in args.figures.split(",")]
    unknown = [name for name in figures if name not in FIGURES]
    if unknown:
        raise ConfigError(f"--figures {', '.join(unknown)} not known; use all or some of {', '.join(FIGURES)}")
    if args.length < 1:
        raise ConfigError(f"--length must be at least 1, got {args.length}")
    source = source_of(args)
    if args.dry_run:
        print(f"figures {', '.join(figures)} on {args.n or 'all'} heads of {args.source}, {args.length:,} tokens")
        return 0
    folder = new_folder(args.output_dir, "studies")
    heads = list(source.heads(args.length, args.n, progress=True))
    drawn: dict[str, tuple[dict[str, Any], list[Plot]]] = {}
    if "2" in figures:
        drawn["2"] = _figure_2(heads)
    if "3b" in figures:
        drawn["3b"] = _figure_3b(heads)
    if {"3a", "6"} & set(figures):
        scans = _scans(heads, args.retrieve)
        for name in ("3a", "6"):
            if name in figures:
                drawn[name] = _figure_scan(name, scans)
    _write(folder, args, drawn)
    return 0


def recovery(head: Head, k: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Share of attention in the best k keys, (group, d): chosen for each decoded token, and those of the first one."""
    from retrieval_attn_eval.bench.measure import Oracle

    oracle = Oracle(head, k)
    dynamic = np.take_along_axis(oracle.weights, oracle.best, axis=2).sum(axis=2)
    first = np.broadcast_to(oracle.best[:, :1], oracle.best.shape)
    static = np.take_along_axis(oracle.weights, first, axis=2).sum(axis=2)
    return dynamic, static


def mahalanobis(vectors: npt.NDArray[np.float32], keys: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Distances of vectors (m, d) from the distribution of keys (n, d), (m,); about sqrt(d) for keys themselves.

    Directions in which the keys do not vary are given a millionth of the mean variance.
    """
    picked = keys[:: max(1, len(keys) // SAMPLE)].astype(np.float64)
    centre = picked.mean(axis=0)
    covariance = np.cov(picked.T)
    covariance += 1e-6 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), (vectors - centre).T.astype(np.float64))
    found: npt.NDArray[np.float64] = np.sqrt((whitened**2).sum(axis=0))
    return found


def _figure_2(heads: Sequence[Head]) -> tuple[dict[str, Any], list[Plot]]:
    from retrieval_attn_eval.bench.plots import Plot

    dynamic, static = [], []
    for head in heads:
        one, other = recovery(head, STATIC_K)
        dynamic.append(one)
        static.append(other)
    steps = min(part.shape[1] for part in dynamic)
    moving = np.concatenate([part[:, :steps] for part in dynamic])
    fixed = np.concatenate([part[:, :steps] for part in static])
    data = {
        "k": STATIC_K,
        "keys": len(heads[0].keys),
        "query_heads": len(moving),
        "dynamic": float(moving.mean()),
        "static": float(fixed[:, 1:].mean()) if steps > 1 else None,
        "dynamic_by_step": moving.mean(axis=0).tolist(),
        "static_by_step": fixed.mean(axis=0).tolist(),
        "paper": {"dynamic": 0.89, "static": 0.71},
    }
    lines = {
        name: [(float(step), float(value)) for step, value in enumerate(part.mean(axis=0))]
        for name, part in (("dynamic", moving), ("static", fixed))
    }
    title = f"attention in {STATIC_K:,} of {len(heads[0].keys):,} keys"
    return data, [Plot(title, "decoded token", "share of attention", lines, y_range=(0, 1.02))]


def _figure_3b(heads: Sequence[Head]) -> tuple[dict[str, Any], list[Plot]]:
    from retrieval_attn_eval.bench.plots import Plot

    queries, keys = [], []
    for head in heads:
        plain = head.plain_keys()
        keys.append(float(mahalanobis(plain[:: max(1, len(plain) // 1000)], plain).mean()))
        queries.append([float(mahalanobis(part, plain).mean()) for part in head.decode])
    ratios = [value / inside for values, inside in zip(queries, keys, strict=True) for value in values]
    data = {
        "heads": [head.name for head in heads],
        "queries_to_keys": queries,
        "keys_to_keys": keys,
        "ratio": float(np.mean(ratios)),
        "paper": {"ratio": "above 10"},
    }
    lines = {
        "queries to keys": [(float(i), float(np.mean(values))) for i, values in enumerate(queries)],
        "keys to keys": [(float(i), value) for i, value in enumerate(keys)],
    }
    return data, [Plot("distance from the keys", "key-value head", "Mahalanobis distance", lines, log_y=True)]


def _scans(heads: Sequence[Head], k: int) -> dict[str, list[Point]]:
    """Points of all kinds, for queries searching keys and for keys searching keys (by the kinds that need no
    training).
    """
    from retrieval_attn.testing import ProgressBar
    from retrieval_attn_eval.bench.measure import Oracle, measure_head, points_of
    from retrieval_attn_eval.bench.variants import VARIANTS, lists_of

    found: dict[str, list[Point]] = {}
    with ProgressBar(total=2 * len(heads), desc="recall against scan", unit="head", delay=2.0, leave=False) as bar:
        for what in ("queries", "keys"):
            points: dict[str, dict[int | None, Point]] = {}
            for head in heads:
                plain = head.plain_keys()
                asked = plain[:: max(1, len(plain) // 64)][None] if what == "keys" else None
                oracle = Oracle(head, k, asked)
                lists = lists_of(head) if what == "queries" else None
                for variant in (VARIANTS[name] for name in SCANS):
                    if variant.missing() is not None or (what == "keys" and variant.takes_lists):
                        continue
                    mine = points.setdefault(variant.name, points_of(variant, len(head.keys)))
                    shown = replace(variant, shared=False)
                    measure_head(shown, oracle, mine, lists=lists, tokens=0, threads=1)
                bar.update()
            found[what] = [point for mine in points.values() for point in mine.values()]
    return found


def _figure_scan(name: str, scans: dict[str, list[Point]]) -> tuple[dict[str, Any], list[Plot]]:
    """3a: only kinds that know nothing of queries, both searches. 6: all kinds, queries searching keys."""
    from retrieval_attn_eval.bench.plots import Plot
    from retrieval_attn_eval.bench.report import mean, summary

    titles = {"queries": "queries search keys", "keys": "keys search keys"}
    data: dict[str, Any] = {}
    panels = []
    for what in ("queries", "keys") if name == "3a" else ("queries",):
        points = [point for point in scans[what] if name == "6" or point.variant != "roargraph"]
        data[what] = [
            {key: row[key] for key in ("variant", "value", "keys", "recall", "recall_worst_decile", "scanned")}
            for row in map(summary, points)
        ]
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            lines.setdefault(point.variant, []).append((100 * mean(point.scanned), mean(point.recall)))
        panels.append(Plot(titles[what], "keys scored, % of all", "recall@k", lines, log_x=True, y_range=(0, 1.02)))
    return data, panels


def _write(folder: Path, args: argparse.Namespace, drawn: dict[str, tuple[dict[str, Any], list[Plot]]]) -> None:
    from retrieval_attn_eval.bench.plots import save_plot
    from retrieval_attn_eval.runs import environment, write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: data for name, (data, _) in drawn.items()}
    report = {"what": "study", "source": args.source, "k": args.retrieve, **environment(), "figures": figures}
    write_atomically(folder / "study.json", json.dumps(report, indent=1) + "\n")
    if not args.no_plot:
        for name, (_, panels) in drawn.items():
            save_plot(panels, folder / f"figure_{name}.png")
    if "2" in figures:
        two = figures["2"]
        static = "-" if two["static"] is None else f"{two['static']:.3f}"
        print(f"figure 2: {two['k']:,} of {two['keys']:,} keys hold {two['dynamic']:.3f}, static {static} (.89, .71)")
    if "3b" in figures:
        print(f"figure 3b: queries lie {figures['3b']['ratio']:.1f} times as far from the keys as keys do (above 10)")
    for name in ("3a", "6"):
        for what, rows in figures.get(name, {}).items():
            for row in rows:
                label = row["variant"] if row["value"] is None else f"{row['variant']} {row['value']}"
                print(
                    f"figure {name}, {what}: {label}: recall {row['recall']:.3f}, {100 * row['scanned']:.2f} % scored"
                )
    print(f"written to {folder}")
