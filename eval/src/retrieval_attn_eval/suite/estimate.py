"""What a run would cost, before it starts: tokens of every block, memory of the longest context, rough time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from retrieval_attn.memory.units import show_bytes
from retrieval_attn.testing import heads_config
from retrieval_attn_eval.suite.runner import SuiteRun

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
    about = getattr(test.suite, "about", None)
    lengths: list[int] = []
    new_tokens = 0
    test.check_contexts()
    for block in test.blocks:
        _, row = next(test.rows(block, block.indices[:1]))
        tokens = len(test.prompts.of(row))
        used = "" if block.length is None else f"{(tokens + row.max_new_tokens) / block.length:.1%}"
        length = "file" if block.length is None else str(block.length)
        told = "" if about is None else f"  {about(row)}"
        lines.append(
            f"{block.task:>24}{length:>10}{len(block.indices):>9}{tokens:>15}{used:>8}{row.max_new_tokens:>15}" + told
        )
        lengths += [tokens] * len(block.indices)
        new_tokens += row.max_new_tokens * len(block.indices)
    lines += [f"note: {note}" for note in getattr(test.suite, "notes", ())]
    kv, flops = _costs(model_config, max(lengths), lengths)
    reads = len(methods)
    lines += [
        "tokens are those of each block's first sample",
        f"keys and values of {max(lengths)} tokens: {show_bytes(round(kv))} per context",
        f"prefill: {sum(lengths) / 1e6:.2f} M tokens, at most {reads} times where methods cannot share it:"
        f" {flops * reads / 1e12:.1f} TFLOP ({_minutes(flops * reads, device)})",
        f"decode: at most {new_tokens * reads * len(test.positions)} tokens, fewer where answers end earlier",
    ]
    return "\n".join(lines)


def _costs(config: Any, longest: int, lengths: Sequence[int]) -> tuple[float, float]:
    """Bytes of keys and values of the longest context (2 bytes per number), and operations of one prefill of each."""
    c = config.get_text_config()
    layers, hidden, heads = c.num_hidden_layers, c.hidden_size, c.num_attention_heads
    sizes = heads_config(c)
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    head_dim = getattr(sizes, "head_dim", None) or hidden // heads
    inner = getattr(c, "intermediate_size", None) or 4 * hidden
    weights = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    work = sum(2 * weights * n + 2 * layers * heads * head_dim * n * n for n in lengths)
    return 2 * 2 * layers * kv_heads * head_dim * longest, float(work)


def _minutes(flops: float, device: str) -> str:
    """A rough time: the CPU's speed is measured on one product of matrices, a GPU's assumed."""
    if device.startswith("cuda"):
        return f"about {flops / 2e14 / 60:.1f} minutes at an assumed 200 TFLOP/s"
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    _ = a @ a
    begin = time.perf_counter()
    _ = a @ a @ a @ a
    speed = 3 * 2 * 1024**3 / (time.perf_counter() - begin)
    return f"about {flops / speed / 60 * 1.3:.1f} minutes on this CPU"
