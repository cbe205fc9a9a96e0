"""SnapKV and PyramidKV: at the end of the prompt each head keeps what its last queries looked at.

Follows "SnapKV: LLM Knows What You are Looking for Before Generation", section 4, and "PyramidKV", section 4.
The query heads of one key-value head vote together, and one set per key-value head is kept; the papers' models have
one query head each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from retrieval_attn.testing import Partial
from retrieval_attn_eval.baselines.options import PyramidKV
from retrieval_attn_eval.baselines.policy import Policy, attend_all
from retrieval_attn_eval.baselines.tokens import TokenBuffer, pick


class Snap(Policy):
    """Keeps `capacity` tokens of the context and everything after it."""

    one_by_one = False

    def __init__(self, options: object, layer: int, layers: int) -> None:
        super().__init__(options, layer, layers)
        self._last: tuple[Tensor, ...] = ()  # the context's last queries so far; replaced, never changed
        self._scale = 1.0
        self.kept: Tensor | None = None  # (kv_heads, capacity) positions, ascending; None: all

    def observe(self, query: Tensor, start: int, scale: float) -> None:
        self._scale = scale
        recent = query[:, :, -self.options.observe :]
        self._last = (torch.cat([*self._last, recent], dim=2)[:, :, -self.options.observe :].clone(),)

    def start(self) -> None:
        whole, kept = self.tokens, TokenBuffer()
        capacity = self._capacity(whole.length)
        if whole.length <= capacity:
            # nothing to evict; still a copy, since answers grow it
            kept.append(whole.key, whole.value)
        else:
            self.kept = self._choose(whole.key, capacity)
            kept.append(pick(whole.key, self.kept), pick(whole.value, self.kept))
        self.tokens = kept

    def _capacity(self, tokens: int) -> int:
        if isinstance(self.options, PyramidKV):
            return self.options.layer_capacity(self.layer, self.layers, tokens)
        capacity: int = self.options.capacity
        return capacity

    def _choose(self, key: Tensor, capacity: int) -> Tensor:
        """Positions to keep, (kv_heads, capacity) ascending."""
        (last,) = self._last
        scores = votes(last, key, self._scale)  # (kv_heads, tokens before the window)
        kernel = self.options.kernel
        pool = functional.avg_pool1d if self.options.pooling == "avg" else functional.max_pool1d
        pooled = pool(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
        observed = last.shape[2]
        # pooled votes tie with their neighbours': the earlier token first, on every machine
        best = pooled.sort(dim=1, descending=True, stable=True).indices[:, : capacity - observed]
        window = torch.arange(key.shape[2] - observed, key.shape[2], device=key.device)
        return torch.cat([best.sort(dim=1).values, window.expand(len(best), -1)], dim=1)

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        count = query.shape[2]
        self.meter.add(count, self.tokens.length - (count - 1) / 2)
        return attend_all(query, self.tokens, scale)


def votes(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Attention that the last queries pay to the tokens before them, (kv_heads, tokens - queries) float32.

    query: (1, q_heads, observed, head_dim), the last tokens' of key (1, kv_heads, tokens, head_dim).  Softmax over
    all tokens, causal within the window, summed over the window and the query heads of a key-value head.
    """
    count, tokens, kv_heads = query.shape[2], key.shape[2], key.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=key.device).triu(1)
    grouped = query[0].reshape(kv_heads, -1, count, query.shape[3])
    total = torch.zeros(kv_heads, tokens - count, dtype=torch.float32, device=key.device)
    for head in range(kv_heads):  # one head at a time: a window's scores at 128K are 32 MiB per query head
        for rows in grouped[head]:
            scores = (rows @ key[0, head].T).float() * scale
            scores[:, tokens - count :].masked_fill_(later, -torch.inf)
            total[head] += scores.softmax(dim=-1)[:, : tokens - count].sum(dim=0)
    return total
