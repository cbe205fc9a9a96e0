"""How a Plan looks as text: two aligned lists of memory, the limits, the verdict and the advice."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from retrieval_attn.memory.units import show_bytes

if TYPE_CHECKING:
    from retrieval_attn.memory.plan import Item, Plan

WIDTH = 100


def table(plan: Plan) -> str:
    """The whole answer of `plan` as lines of at most WIDTH columns (model names may be longer)."""
    shape = plan.shape
    sequences = f"{plan.batch} x " if plan.batch > 1 else ""
    lines = [
        f"{shape.name} ({shape.model_type}, {shape.layers} layers, {shape.kv_heads} KV heads x "
        f"{shape.key_dim}, "
        f"{shape.dtype})",
        f"{sequences}{plan.context:,} tokens of context; KV {show_bytes(plan.kv_bytes_per_token)} per token, "
        f"{show_bytes(plan.batch * plan.context * plan.kv_bytes_per_token)} in all",
        "",
        *_section(f"{_gpu(plan)}, at the peak of prefill", plan.device, plan.device_bytes, plan.gpu_memory),
        f"  {'while generating':<30}{show_bytes(plan.decode_bytes):>12}",
        "",
        *_section("Host", plan.host, plan.host_bytes, plan.host_memory),
        "",
        f"largest prefill chunk that fits     {plan.largest_chunk:>12,} tokens (planned {plan.config.prefill_chunk:,})",
        f"largest context that fits           {plan.largest_context:>12,} tokens",
    ]
    if shape.max_positions is not None:
        lines.append(f"positions of the model              {shape.max_positions:>12,} tokens")
    lines += ["", "It fits." if plan.fits else "It does not fit:"]
    for text in plan.reasons:
        lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    for text in plan.advice:
        lines += ["", *textwrap.wrap(text, WIDTH)]
    return "\n".join(lines)


def _gpu(plan: Plan) -> str:
    return "GPU" if plan.gpus == 1 else f"Fullest of {plan.gpus} GPUs that share {plan.split}"


def _section(title: str, items: tuple[Item, ...], total: int, limit: int) -> list[str]:
    rows = [f"  {item.name:<30}{show_bytes(item.bytes):>12}  {item.detail}" for item in items]
    return [title, *rows, f"  {'sum':<30}{show_bytes(total):>12}  of {show_bytes(limit)}"]
