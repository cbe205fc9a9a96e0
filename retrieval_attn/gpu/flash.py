"""Exact attention over keys that are in device memory, by the first backend that can serve the call.

One signature for all: (query, key, value) -> Partial, natural-log lse, fp32. Backends are tried in order;
each says why it cannot serve a call, and the choice is logged once per device, dtype and head size.
FlashAttention kernels return lse in natural log and shape (batch, q_heads, queries), as used here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, ShapeError
from retrieval_attn.gpu.merge import Partial, empty_partial

logger = logging.getLogger(__name__)

# The math backend works through the queries in blocks whose score matrix stays under this many elements.
MAX_SCORES = 1 << 26


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention of `query` over all of `key`, as a Partial (float32 out and natural-log lse).

    query: (batch, q_heads, queries, head_dim). key: (batch, kv_heads, keys, head_dim), value: (batch,
    kv_heads, keys, value_dim); q_heads must be a multiple of kv_heads. scale multiplies q.k.
    causal: query i attends keys 0..i; queries and keys must then be equally many.
    mask: bool, broadcastable to (batch, q_heads, queries, keys), True = attend; not together with causal.
    softcap: scores become cap * tanh(score / cap) (Gemma-2).
    No keys, or a query whose mask is all False: out 0, lse -inf.
    Raises ShapeError for shapes that cannot be attended.
    """
    _check(query, key, value, causal, mask)
    if key.shape[2] == 0 or query.shape[2] == 0:
        return empty_partial(query, value.shape[3])
    refusals: list[str] = []
    for name, refuse, run in _BACKENDS:
        reason = refuse(query, key, value, mask, softcap)
        if reason is None:
            _log_choice(name, str(query.device.type), str(query.dtype), query.shape[3], tuple(refusals))
            return run(query, key, value, scale, causal, mask, softcap)
        refusals.append(f"{name}: {reason}")
    raise BackendError(
        f"No attention backend serves query {tuple(query.shape)} {query.dtype} on {query.device} with key "
        f"{tuple(key.shape)}; tried {'; '.join(refusals)}. Use float32, bfloat16 or float16."
    )


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> None:
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ShapeError(
            "attend needs (batch, heads, tokens, dim) tensors, got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ShapeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not belong "
            "together: batch, key count and head_dim must agree."
        )
    if query.shape[1] % key.shape[1]:
        raise ShapeError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly.")
    if causal and (mask is not None or query.shape[2] != key.shape[2]):
        raise ShapeError(
            f"causal attention needs as many queries as keys and no mask, got {query.shape[2]} queries, "
            f"{key.shape[2]} keys{' and a mask' if mask is not None else ''}; split the past off and merge."
        )


@cache
def _log_choice(name: str, device: str, dtype: str, head_dim: int, refusals: tuple[str, ...]) -> None:
    because = "; ".join(refusals) if refusals else "first choice"
    logger.info("attention backend %s for %s %s head_dim %d (%s)", name, device, dtype, head_dim, because)


def _refuse_cuda_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None
) -> str | None:
    if query.device.type != "cuda":
        return f"needs a CUDA device, query is on {query.device.type}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {query.dtype}"
    if query.shape[3] > 256 or query.shape[3] % 8 or value.shape[3] != query.shape[3]:
        return f"needs one head_dim <= 256 and a multiple of 8, got {query.shape[3]} and {value.shape[3]}"
    if mask is not None or softcap is not None:
        return "takes neither mask nor soft-cap"
    return None


def _run_cuda_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None,
) -> Partial:
    # PyTorch's own FlashAttention-2 op: tokens before heads, key heads may be fewer than query heads.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        False,
        scale=scale,
    )
    return Partial(out.transpose(1, 2).float(), lse.float())


def _refuse_cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None
) -> str | None:
    if query.device.type != "cpu":
        return f"needs the CPU, query is on {query.device.type}"
    if value.shape[3] != query.shape[3]:
        return f"needs one head_dim, got {query.shape[3]} and {value.shape[3]}"
    if mask is not None or softcap is not None:
        return "takes neither mask nor soft-cap here"
    return None


def _run_cpu_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None,
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=None, scale=scale
    )
    return Partial(out.float(), lse.float())


def _run_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None,
) -> Partial:
    """Plain float32 score matrices, in blocks of queries. Takes everything the kernels above refuse."""
    batch, q_heads, queries, _ = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = q_heads // kv_heads
    key32 = key.float().unsqueeze(2)  # (batch, kv_heads, 1, keys, head_dim)
    value32 = value.float().unsqueeze(2)
    out = torch.empty(batch, q_heads, queries, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, q_heads, queries, dtype=torch.float32, device=query.device)
    block = max(1, MAX_SCORES // max(1, batch * q_heads * keys))
    key_index = torch.arange(keys, device=query.device)
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        rows = query[:, :, start:stop].float().reshape(batch, kv_heads, group, stop - start, -1)
        scores = (rows @ key32.transpose(3, 4)).mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap)
        scores = scores.reshape(batch, q_heads, stop - start, keys)
        if causal:
            query_index = torch.arange(start, stop, device=query.device)
            scores.masked_fill_(key_index > query_index[:, None], -torch.inf)
        elif mask is not None:
            part = mask.expand(*mask.shape[:-2], queries, keys)[..., start:stop, :]
            scores = scores.masked_fill(~part, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
        weights = torch.exp_(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        lse[:, :, start:stop] = (top + torch.log(total)).squeeze(-1)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
        mixed = weights.reshape(batch, kv_heads, group, stop - start, keys) @ value32
        out[:, :, start:stop] = mixed.reshape(batch, q_heads, stop - start, value_dim)
    return Partial(out, lse)


def _refuse_math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None) -> str | None:
    return None if query.dtype.is_floating_point else f"needs a floating dtype, got {query.dtype}"


_Refuse = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], str | None]
_Run = Callable[[Tensor, Tensor, Tensor, float, bool, Tensor | None, float | None], Partial]
_BACKENDS: tuple[tuple[str, _Refuse, _Run], ...] = (
    ("torch-flash-cuda", _refuse_cuda_flash, _run_cuda_flash),
    ("torch-flash-cpu", _refuse_cpu_flash, _run_cpu_flash),
    ("math", _refuse_math, _run_math),
)
