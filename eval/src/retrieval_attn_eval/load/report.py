"""What a replay measured: times, rates, what was cached, and errors by their status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from retrieval_attn_eval.load.reply import Bounds, Reply

__all__ = ["summary", "table"]


def summary(replies: Sequence[Reply], bounds: Bounds) -> dict[str, Any]:
    """Plain values, ready for JSON. Percentiles are None where nothing was answered; times are seconds.

    first, gap, whole: to the first token, from piece to piece of an answer's text, to its end. good: requests within
    the bounds, per second and of all. cached: share of the prompts' tokens that the server did not read; None where it
    does not say. late: how long after they were due requests were sent, by this side.
    """
    answered = [one for one in replies if one.status == "ok"]
    counted = [one.usage for one in answered if one.usage is not None]
    prompts = sum(usage.prompt_tokens for usage in counted)
    tokens = sum(one.tokens for one in answered)
    seconds = max((one.end for one in replies), default=0.0)
    good = sum(one.is_good(bounds) for one in replies)
    errors = Counter(one.status for one in replies if one.status != "ok")
    problems = {one.status: one.problem for one in reversed(replies) if one.status != "ok"}
    return {
        "requests": len(replies),
        "answered": len(answered),
        "errors": dict(errors.most_common()),
        "problems": problems,
        "seconds": seconds,
        "offered_per_second": _rate(len(replies) - 1, max((one.due for one in replies), default=0.0)),
        "answered_per_second": _rate(len(answered), seconds),
        "tokens_per_second": _rate(tokens, seconds),
        "prompt_tokens": prompts,
        "answer_tokens": tokens,
        "short_answers": sum(one.tokens < one.wanted for one in answered),
        "first": _percentiles([one.first_seconds for one in answered if one.first_seconds is not None]),
        "gap": _percentiles([gap for one in answered for gap in one.gaps]),
        "whole": _percentiles([one.end - one.due for one in answered]),
        "late": _percentiles([one.sent - one.due for one in replies]),
        "bounds": {"first_seconds": bounds.first_seconds, "token_seconds": bounds.token_seconds},
        "good_per_second": _rate(good, seconds),
        "good": good / len(replies) if replies else None,
        "cached": sum(usage.cached_tokens for usage in counted) / prompts if prompts else None,
    }


def table(found: Mapping[str, Any]) -> str:
    """The summary for people."""
    bounds = found["bounds"]
    errors = ", ".join(f"{status}: {count}" for status, count in found["errors"].items()) or "none"
    rows = [
        ("requests", f"{found['requests']:,} in {found['seconds']:.1f} s, {found['answered']:,} answered"),
        ("errors by status", errors),
        ("offered, answered per second", f"{found['offered_per_second']:.3g}, {found['answered_per_second']:.3g}"),
        ("generated tokens per second", f"{found['tokens_per_second']:.1f}"),
        ("first token, p50 p99, s", _pair(found["first"], 1)),
        ("token to token, p50 p99, ms", _pair(found["gap"], 1000)),
        ("whole answer, p50 p99, s", _pair(found["whole"], 1)),
        (
            f"goodput (first <= {bounds['first_seconds']:g} s, tokens <= {bounds['token_seconds'] * 1000:g} ms)",
            f"{found['good_per_second']:.3g} per second" + ("" if found["good"] is None else f", {found['good']:.0%}"),
        ),
        ("cached share of prompts", "not said" if found["cached"] is None else f"{found['cached']:.1%}"),
        ("sent late, p50 p99, ms", _pair(found["late"], 1000)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += [f"{status}: {problem}" for status, problem in found["problems"].items() if problem]
    if found["short_answers"]:
        lines.append(f"{found['short_answers']:,} answers are shorter than the trace's; see --body")
    return "\n".join(lines)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    import numpy as np

    half, most = np.percentile(values, [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(half), "p99": float(most)}


def _pair(found: Mapping[str, float] | None, scale: float) -> str:
    return "none" if found is None else f"{found['p50'] * scale:.3g} {found['p99'] * scale:.3g}"


def _rate(count: int, seconds: float) -> float:
    return max(0, count) / seconds if seconds > 0 else 0.0
