"""What a run would cost, before it starts: tokens of every block, memory of the longest context, rough time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieval_attn.eval.needle.command import _bytes, _costs, _minutes
from retrieval_attn.eval.suite.runner import SuiteRun

__all__ = ["overview"]


def overview(test: SuiteRun, model_config: Any, model: str, methods: Sequence[str], device: str) -> str:
    """Text of --dry-run.  Raises what a run would raise for rows that cannot be made or do not fit."""
    rows = sum(len(block.indices) for block in test.blocks)
    answers = rows * len(methods) * len(test.positions)
    lines = [
        f"model {model}, methods {', '.join(methods)}, question {' and '.join(test.positions)}: {rows} samples,"
        f" {answers} answers",
        f"{'task':>24}{'length':>10}{'samples':>9}{'prompt tokens':>15}{'fill':>8}{'answer tokens':>15}",
    ]
    lengths: list[int] = []
    new_tokens = 0
    test.check_contexts()
    for block in test.blocks:
        _, row = next(test.rows(block, block.indices[:1]))
        tokens = len(test.prompts.of(row))
        used = "" if block.length is None else f"{(tokens + row.max_new_tokens) / block.length:.1%}"
        length = "file" if block.length is None else str(block.length)
        lines.append(
            f"{block.task:>24}{length:>10}{len(block.indices):>9}{tokens:>15}{used:>8}{row.max_new_tokens:>15}"
        )
        lengths += [tokens] * len(block.indices)
        new_tokens += row.max_new_tokens * len(block.indices)
    lines += [f"note: {note}" for note in getattr(test.suite, "notes", ())]
    kv, flops = _costs(model_config, max(lengths), lengths)
    reads = len(methods)
    lines += [
        "tokens are those of each block's first sample",
        f"keys and values of {max(lengths)} tokens: {_bytes(kv)} per context",
        f"prefill: {sum(lengths) / 1e6:.2f} M tokens, at most {reads} times where methods cannot share it:"
        f" {flops * reads / 1e12:.1f} TFLOP ({_minutes(flops * reads, device)})",
        f"decode: at most {new_tokens * reads * len(test.positions)} tokens, fewer where answers end earlier",
    ]
    return "\n".join(lines)
