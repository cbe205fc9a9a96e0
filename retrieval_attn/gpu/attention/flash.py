"""Exact attention over keys that are in device memory, by the first backend that can serve the call.

One signature for all: (query, key, value) -> Partial, natural-log lse, float32. `backends.py` lists them in
the order of preference; each says why it is missing or cannot serve a call, and the choice is logged once per device,
dtype, head size and list of reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.gpu.attention.backends import BACKENDS, Backend, Call, prefers_cudnn
from retrieval_attn.gpu.attention.merge import Partial, empty_partial

logger = logging.getLogger(__name__)

CUDNN_QUERIES = 1024
"""From so many queries on cuDNN comes first: a plan for each shape is made once, and costs milliseconds."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
    backends: Sequence[str] | None = None,
) -> Partial:
    """Attention of `query` over all of `key`, as a Partial (float32 out and natural-log lse).

    query: (batch, q_heads, queries, head_dim). key: (batch, kv_heads, keys, head_dim), value: (batch,
    kv_heads, keys, value_dim); q_heads must be a multiple of kv_heads. scale multiplies q.k.
    causal: the last query sits at the last key (bottom-right); query i sees keys 0..keys - queries + i.
    mask: bool, broadcastable to (batch, q_heads, queries, keys), True = attend; not together with causal.
    softcap: scores become cap * tanh(score / cap) (Gemma-2).
    backends: names of BACKENDS to ask instead of all of them, in this order; for tests and comparisons.
    No keys, or a query that sees none: out 0, lse -inf.
    Raises ShapeError for shapes that cannot be attended, ConfigError for an unknown backend's name and
    BackendError, with every backend's reason, when none serves the dtype, device or head size.
    """
    _check(query, key, value, causal, mask)
    names = BACKENDS if backends is None else backends
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ConfigError(f"Unknown attention backends {unknown}; there are {', '.join(BACKENDS)}.")
    queries, keys = query.shape[2], key.shape[2]
    if keys == 0 or queries == 0:
        return empty_partial(query, value.shape[3])
    # Kernels read rows of head_dim; PyTorch's CPU kernel returns garbage, not an error, for a strided last axis.
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    blind = max(0, queries - keys) if causal else 0  # these queries come before the first key
    rest = query[:, :, blind:]
    # the last query sees every key: for a query alone, causal hides nothing
    call = Call(rest, key, value, scale, causal and rest.shape[2] > 1, mask, softcap)
    part = _choose(call, names).run(call)
    if not blind:
        return part
    empty = empty_partial(query[:, :, :blind], value.shape[3])
    return Partial(torch.cat([empty.out, part.out], dim=2), torch.cat([empty.lse, part.lse], dim=2))


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
    if not query.device == key.device == value.device:
        raise ShapeError(f"attend needs one device, got {query.device}, {key.device} and {value.device}.")
    if causal and mask is not None:
        raise ShapeError("attend takes causal or a mask, not both; put the causal part into the mask.")


def _choose(call: Call, names: Sequence[str] | dict[str, Backend]) -> Backend:
    refusals: list[str] = []
    device = call.query.device
    for name in _ordered(call, names):
        backend = BACKENDS[name]
        reason = backend.missing(device) or backend.refuse(call)
        if reason is None:
            _log_choice(name, device.type, str(call.query.dtype), call.head_dim, tuple(refusals))
            return backend
        refusals.append(f"{name}: {reason}")
    raise BackendError(
        f"No attention backend serves query {tuple(call.query.shape)} {call.query.dtype} on {device} with key "
        f"{tuple(call.key.shape)} {call.key.dtype} and value {tuple(call.value.shape)} {call.value.dtype}; "
        f"tried {'; '.join(refusals) or 'none'}. Use float32, bfloat16 or float16."
    )


def _ordered(call: Call, names: Sequence[str] | dict[str, Backend]) -> list[str]:
    """The names in order of preference: cuDNN first for many queries on a device where it is far faster."""
    ordered = list(names)
    if "torch-cudnn" in ordered and names is BACKENDS and call.queries >= CUDNN_QUERIES and prefers_cudnn(call):
        ordered.remove("torch-cudnn")
        ordered.insert(0, "torch-cudnn")
    return ordered


@lru_cache(maxsize=256)
def _log_choice(name: str, device: str, dtype: str, head_dim: int, refusals: tuple[str, ...]) -> None:
    because = "; ".join(refusals) if refusals else "first choice"
    # Score matrices on a GPU are right but slow: worth a warning, not only a note.
    level = logging.WARNING if name == "math" and device == "cuda" else logging.INFO
    logger.log(level, "attention backend %s for %s %s head_dim %d (%s)", name, device, dtype, head_dim, because)
