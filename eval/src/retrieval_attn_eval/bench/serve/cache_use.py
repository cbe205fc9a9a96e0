"""Use of the prefix cache by a workload: hits, the ceiling of its trace, latencies, evictions and refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.simulated import PromptTree, optimal_hits, unlimited_hits

__all__ = ["CacheCounts", "CacheUse", "cache_use", "engine_counts", "metric_counts"]

PERCENTILES = (50, 90, 99)
HIT_SHARE = 0.5
"""Share of a prompt's tokens from which on the ceiling counts it as a hit."""
SAMPLE = re.compile(r"^retrieval_attn:(?P<name>\w+)_total(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)
TIER = re.compile(r'tier="([^"]*)"')


@dataclass(frozen=True)
class CacheCounts:
    """Counts of a prefix cache over a time.

    Attributes:
        evicted: evicted entries; "to disk": those of them of which the disk has a copy.
        hit_tokens: prompt tokens with cached KV by tier.
        peak_tokens: most tokens that the cache kept, by its bytes, and at most its limit. None: not known.
    """

    evicted: Mapping[str, int] = field(default_factory=dict)
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    peak_tokens: int | None = None

    def since(self, before: CacheCounts, peak_tokens: int | None = None) -> CacheCounts:
        """Return the difference to earlier counts. peak_tokens: most tokens in the cache meanwhile."""
        return CacheCounts(
            {tier: count - before.evicted.get(tier, 0) for tier, count in self.evicted.items()},
            {tier: count - before.hit_tokens.get(tier, 0) for tier, count in self.hit_tokens.items()},
            peak_tokens,
        )


def engine_counts(stats: Mapping[str, Any]) -> CacheCounts:
    """Return the counts of an engine's statistics."""
    shared = stats["shared"]._asdict()
    evicted = {
        name.removeprefix("evicted").strip("_") or "all": int(count)
        for name, count in shared.items()
        if name.startswith("evicted") and not name.endswith("bytes")
    }
    return CacheCounts({**evicted, "to disk": stats["disk_evictions"]}, dict(stats["hit_tokens"]))


def metric_counts(text: str) -> CacheCounts:
    """Return the counts in a server's metrics, in Prometheus' text format. Empty for another server."""
    evicted: dict[str, int] = {}
    hit_tokens: dict[str, int] = {}
    for found in SAMPLE.finditer(text):
        tier = TIER.search(found["labels"] or "")
        for name, into, untold in (
            ("prefix_cache_evictions", evicted, "all"),
            ("prefix_cache_disk_evictions", evicted, "to disk"),
            ("tier_hit_tokens", hit_tokens, "all"),
        ):
            if found["name"] == name:
                key = tier[1] if tier else untold
                into[key] = into.get(key, 0) + int(float(found["value"]))
    return CacheCounts(evicted, hit_tokens)


@dataclass(frozen=True)
class CacheUse:
    """Use of a prefix cache.

    Attributes:
        hit: cached prompt tokens over prompt tokens of the answered requests.
        ceiling: the same for an unlimited cache on the same prompts.
        optimal: the same for a cache with the peak tokens that evicts the tokens which are needed last. None: the
            peak is not known.
        first: 50th, 90th and 99th percentile of the seconds to the first token.
        first_hit, first_miss: median seconds to the first token of requests whose prompt an unlimited cache has at
            least half of, and of the rest. None: there is none.
        token: mean seconds per token after the first.
        refused: refused requests.
        counts: evictions and hits by tier.
    """

    hit: float
    ceiling: float
    optimal: float | None
    first: Sequence[float]
    first_hit: float | None
    first_miss: float | None
    token: float | None
    refused: int
    counts: CacheCounts

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def cache_use(answers: Sequence[Answered], tree: PromptTree, counts: CacheCounts) -> CacheUse | None:
    """Summarize answers. Returns None if no request was answered.

    Args:
        answers: one for each of the last prompts of the tree, in order.
        tree: the prompts, after those that were prefilled before the first request.
        counts: counts of the prefix cache over the same time.
    """
    answered = [number for number, one in enumerate(answers) if not one.problem]
    if not answered:
        return None
    tokens, known = (counted[-len(answers) :] for counted in (tree.prompt_tokens, unlimited_hits(tree)))
    total = sum(tokens[number] for number in answered)
    peak = counts.peak_tokens
    optimal = None if peak is None else optimal_hits(tree, peak)[-len(answers) :]
    firsts = {number: answers[number].first_seconds for number in answered}
    timed = {number: seconds for number, seconds in firsts.items() if seconds is not None}
    pauses = [pause for number in answered if (pause := answers[number].token_seconds) is not None]
    hits = [seconds for number, seconds in timed.items() if known[number] >= HIT_SHARE * tokens[number]]
    misses = [seconds for number, seconds in timed.items() if known[number] < HIT_SHARE * tokens[number]]
    prompts = sum(answers[number].prompt_tokens for number in answered)
    return CacheUse(
        hit=sum(answers[number].cached_tokens for number in answered) / max(1, prompts),
        ceiling=sum(known[number] for number in answered) / total,
        optimal=None if optimal is None else sum(optimal[number] for number in answered) / total,
        first=[float(value) for value in np.percentile(list(timed.values()), PERCENTILES)] if timed else [],
        first_hit=float(np.median(hits)) if hits else None,
        first_miss=float(np.median(misses)) if misses else None,
        token=float(np.mean(pauses)) if pauses else None,
        refused=sum(one.refused for one in answers),
        counts=counts,
    )
