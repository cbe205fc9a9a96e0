"""Quest: pages of keys with element-wise bounds; each query attends to the pages whose bound is highest.

Follows "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", section 3.  Each query head chooses
its own pages.  The newest page, which holds the query's own token, is always one of them; the paper's kernels do the
same, its accuracy script lets it compete.  Tokens of a question asked after the context go one by one, as generated
ones do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.testing import Partial
from retrieval_attn_eval.baselines.policy import Policy, attend_picked, distinct
from retrieval_attn_eval.baselines.tokens import TokenBuffer


class QuestPages(Policy):
    """Pages of all tokens, per key-value head."""

    def start(self) -> None:
        """Bounds of every page; the page axis of `_bounds` holds the smallest, then the largest, elements."""
        key = self.tokens.key[0]
        kv_heads, tokens, dim = key.shape
        page = self.options.page
        whole = tokens // page
        pages = key[:, : whole * page].reshape(kv_heads, whole, page, dim)
        self._bounds = TokenBuffer()
        self._bounds.append(pages.amin(dim=2)[None], pages.amax(dim=2)[None])
        self._extend(whole * page)

    def append(self, key: Tensor, value: Tensor) -> None:
        start = self.tokens.length
        super().append(key, value)
        self._extend(start)

    def _extend(self, start: int) -> None:
        """Tokens from `start` on are new: renew the bounds of their pages."""
        page = self.options.page
        first = start // page
        self._bounds.truncate(first)
        for low in range(first * page, self.tokens.length, page):
            held = self.tokens.key[:, :, low : min(low + page, self.tokens.length)]
            self._bounds.append(held.amin(dim=2, keepdim=True), held.amax(dim=2, keepdim=True))

    def scores(self, query: Tensor) -> Tensor:
        """Upper bound of q.k over each page for query (1, q_heads, 1, head_dim): (q_heads, pages) float32."""
        least, most = self._bounds.key[0].float(), self._bounds.value[0].float()
        grouped = query[0, :, 0].float().reshape(least.shape[0], -1, query.shape[3])
        bound = grouped.clamp_min(0) @ most.transpose(1, 2) + grouped.clamp_max(0) @ least.transpose(1, 2)
        return bound.reshape(query.shape[1], -1)

    def choose(self, query: Tensor) -> Tensor:
        """Pages that each query head attends to, (q_heads, pages) int64; the newest is the last of them."""
        scores = self.scores(query)
        newest = scores.shape[1] - 1
        older = min(self.options.pages - 1, newest)
        best = scores[:, :newest].topk(older, dim=1).indices
        return torch.cat([best, best.new_full((len(best), 1), newest)], dim=1)

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        page, tokens = self.options.page, self.tokens.length
        chosen = self.choose(query)
        ids = (chosen[:, :, None] * page + torch.arange(page, device=query.device)).reshape(len(chosen), -1)
        ids = ids[:, : ids.shape[1] - (-tokens) % page]  # the newest page, last in every row, may not be full
        self.meter.add(1, ids.shape[1], distinct(ids, self.tokens.key.shape[1], tokens))
        return attend_picked(query, self.tokens, ids, scale)
