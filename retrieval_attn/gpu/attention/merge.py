"""Partials: attention over a part of the keys, and their exact merge.

A partial is a pair (out, lse), both float32. `out` is normalised over its own keys; `lse` is the natural
log-sum-exp of the scaled scores. An empty part is out = 0, lse = -inf. Merging is associative, so parts
can be computed anywhere and merged once (RetrievalAttention, equation 4; Hydragen, section 3.1).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.decode.kernels import kernels_for


class Partial(NamedTuple):
    """Attention of queries over one part of their keys.

    out: (batch, q_heads, queries, value_dim), float32.
    lse: (batch, q_heads, queries), float32, natural log; -inf where the part is empty.
    """

    out: Tensor
    lse: Tensor


def empty_partial(query: Tensor, value_dim: int) -> Partial:
    """The partial of no keys at all for `query` (batch, q_heads, queries, head_dim)."""
    shape = query.shape[:-1]
    out = torch.zeros(*shape, value_dim, dtype=torch.float32, device=query.device)
    return Partial(out, torch.full(shape, -torch.inf, dtype=torch.float32, device=query.device))


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge partials over disjoint key sets into the partial over their union.

    m = max lse_i; out = sum exp(lse_i - m) out_i / sum exp(lse_i - m); lse = m + log sum exp(lse_i - m).
    Where every part is empty the result is out 0, lse -inf, never NaN. Raises ShapeError when there is no
    part, when shapes disagree, or when a part is not float32 (rounding between merges does not compose). Two parts at a
    time, on a GPU by one kernel.
    """
    if not parts:
        raise ShapeError("merge needs at least one partial, got none; pass empty_partial() for no keys.")
    first = parts[0]
    for part in parts:
        if part.out.dtype != torch.float32 or part.lse.dtype != torch.float32:
            raise ShapeError(f"partials must be float32, got {part.out.dtype} and {part.lse.dtype}.")
        if part.out.shape != first.out.shape or part.lse.shape != first.out.shape[:-1]:
            raise ShapeError(
                f"partials must share one shape, got out {tuple(part.out.shape)} with lse "
                f"{tuple(part.lse.shape)} after out {tuple(first.out.shape)}."
            )
    kernels = kernels_for(first.out, "attention.merge_triton")
    if kernels is not None and not any(part.out.requires_grad for part in parts):
        # each operation of `_merge_two` reads and writes whole partials, which is seconds of a long prompt
        return functools.reduce(lambda whole, part: Partial(*kernels.merge_two(*whole, *part)), parts[1:], first)
    return functools.reduce(_merge_two, parts[1:], first)


def _merge_two(whole: Partial, part: Partial) -> Partial:
    """Every layer of a token merges, and a launch costs more than these few numbers: as few operations as will do.

    The second part's weight is 1 / (1 + exp(its distance from the first's lse)). Two -inf have none: they are moved to
    the least finite number.
    """
    least = torch.finfo(torch.float32).min
    weight = torch.sigmoid(part.lse.clamp(min=least) - whole.lse.clamp(min=least))
    return Partial(torch.lerp(whole.out, part.out, weight.unsqueeze(-1)), torch.logaddexp(whole.lse, part.lse))


def sink_logit_partial(logits: Tensor, query: Tensor, value_dim: int) -> Partial:
    """The partial of a learned attention sink: weight exp(logit), value 0 (GPT-OSS `s_aux`).

    logits: (q_heads,). Returns out 0 and lse = logit for every query of `query` (batch, q_heads, queries, d).
    """
    part = empty_partial(query, value_dim)
    return Partial(part.out, logits.float().view(1, -1, 1).expand_as(part.lse).contiguous())


class Scoring(NamedTuple):
    """scale * q.k, soft-capped unless softcap is None."""

    scale: float
    softcap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Return the logits of inner products."""
        logits = products * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
