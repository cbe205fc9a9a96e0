"""InfLLM: blocks of the past behind representative tokens, looked up by the relevance to a chunk of queries.

Follows "InfLLM: Training-Free Long-Context Extrapolation with an Efficient Context Memory", section 3: sinks, a local
window, and between them blocks; a block's representatives are the tokens that the queries following them in the
local window score highest, r_m = mean over the window of q_(m+j) . k_m; a chunk attends to the blocks with the
highest sum of q . k over its queries, all heads and the representatives.
What the paper leaves open is done as its published code does it: representatives per query head and averaged into
one key per head, blocks chosen once for all heads of a layer, tokens between the last complete block and the window
attended.  That code ranks tokens by attention weights instead of dot products.
Offloading, which only saves memory, is left out.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.testing import Partial, Rotation, attend, merge
from retrieval_attn_eval.baselines.policy import Policy
from retrieval_attn_eval.baselines.tokens import pick


class Blocks(Policy):
    """Sinks, blocks with representatives, and a tail that holds the window and an incomplete block."""

    one_by_one = False

    def __init__(self, options: Any, layer: int, layers: int, model: nn.Module) -> None:
        super().__init__(options, layer, layers)
        self._model = model
        self._rotation: Rotation | None = None
        self.blocks = 0  # complete blocks; block i covers tokens sink + [i, i + 1) * block
        self._stand_ins: list[Tensor] = []  # (q_heads, new blocks, head_dim) float32 each
        self._queries: list[Tensor] = []  # (q_heads, tokens, head_dim) each, together from _first_query on
        self._first_query = 0

    def bind(self, module: nn.Module) -> None:
        if self.options.positions == "unified" and self._rotation is None:
            self._rotation = Rotation.of(self._model, module)

    def fork(self) -> Self:
        other = super().fork()
        other._stand_ins, other._queries = list(self._stand_ins), list(self._queries)
        return other

    def observe(self, query: Tensor, start: int, scale: float) -> None:
        self._remember(query, start)

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        parts = []
        for first in range(0, query.shape[2], self.options.chunk):
            rows = query[:, :, first : first + self.options.chunk]
            parts.append(self._attend_chunk(rows, position + first, scale))
            self._remember(rows, position + first)
        return Partial(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))

    # -- representatives ----------------------------------------------------------------------------

    def _remember(self, query: Tensor, start: int) -> None:
        """Queries from `start` on have been answered: blocks that left the window get their representatives."""
        if not self._queries:
            self._first_query = start
        self._queries.append(query[0])
        size = self.options.block
        ready = start + query.shape[2] - self.options.sink - self.options.window
        count = max(0, ready // size) - self.blocks
        if count <= 0:
            return
        queries = torch.cat(self._queries, dim=1)
        low = self.options.sink + self.blocks * size
        self._stand_ins.append(self._represent(queries[:, low + 1 - self._first_query :], low, count))
        self.blocks += count
        # the next block's first token is scored by the queries after it
        drop = low + count * size + 1 - self._first_query
        self._queries = [queries[:, drop:].clone()]
        self._first_query += drop

    def _represent(self, queries: Tensor, low: int, count: int) -> Tensor:
        """Mean of the representatives' keys of `count` blocks from token `low` on: (q_heads, count, head_dim).

        queries: (q_heads, tokens, head_dim) from token low + 1 on.
        """
        size, top = self.options.block, self.options.representatives
        key = self.tokens.key[:, :, low : low + count * size]
        scores = local_scores(queries, key[0], self.options.window)
        best = scores.reshape(-1, count, size).topk(top, dim=2).indices
        ids = (best + torch.arange(count, device=key.device)[:, None] * size).reshape(len(best), -1)
        chosen = pick(key, ids)[0].float()
        if self._rotation is not None:
            chosen = torch.stack(
                [self._rotation.move(one[None], at + low, 0)[0] for one, at in zip(chosen, ids, strict=True)]
            )
        return chosen.reshape(len(best), count, top, -1).mean(dim=2)

    # -- attention ----------------------------------------------------------------------------------

    def relevance(self, query: Tensor, position: int) -> Tensor:
        """Of every block to a chunk of queries (1, q_heads, count, head_dim): (blocks,) float32."""
        if len(self._stand_ins) > 1:
            self._stand_ins = [torch.cat(self._stand_ins, dim=1)]
        mean = self._distant(query, position).float().mean(dim=2)[0]
        return torch.einsum("hd,hbd->b", mean, self._stand_ins[0])

    def choose(self, query: Tensor, position: int) -> Tensor:
        """Blocks that a chunk of queries attends to, ascending."""
        if self.blocks <= self.options.blocks:
            return torch.arange(self.blocks, device=query.device)
        return self.relevance(query, position).topk(self.options.blocks).indices.sort().values

    def past(self, query: Tensor, position: int) -> Tensor:
        """Tokens before `position` that a chunk of queries starting there attends to: sinks, blocks, tail."""
        sink, size, device = self.options.sink, self.options.block, query.device
        blocks = self.choose(query, position)
        inside = (sink + blocks[:, None] * size + torch.arange(size, device=device)).flatten()
        tail = torch.arange(min(sink + self.blocks * size, position), position, device=device)
        return torch.cat([torch.arange(min(sink, position), device=device), inside, tail])

    def _attend_chunk(self, query: Tensor, position: int, scale: float) -> Partial:
        past = self.past(query, position)
        end = position + query.shape[2]
        if self._rotation is not None and end > self.options.window:
            return self._attend_unified(query, position, past, scale, self._rotation)
        self.meter.add(query.shape[2], len(past) + (query.shape[2] + 1) / 2)
        key, value = self.tokens.key, self.tokens.value
        own = slice(position, end)
        parts = [attend(query, key[:, :, own], value[:, :, own], scale=scale, causal=True)]
        if len(past):
            parts.append(attend(query, key[:, :, past], value[:, :, past], scale=scale))
        return merge(parts)

    def _attend_unified(self, query: Tensor, position: int, past: Tensor, scale: float, rotation: Rotation) -> Partial:
        """Tokens closer than the window at their distance, all others at the window's length."""
        window, count = self.options.window, query.shape[2]
        key, value = self.tokens.key, self.tokens.value
        at = torch.arange(position, position + count, device=query.device)[:, None]
        near = torch.arange(max(0, position - window + 1), position + count, device=query.device)
        span = slice(int(near[0]), position + count)
        seen = (near <= at) & (near > at - window)
        far = past[past <= position + count - 1 - window]
        out_of_window = far <= at - window
        self.meter.add(count, float(seen.sum() + out_of_window.sum()) / count)
        mask = None if count == 1 else seen[None, None]
        parts = [attend(query, key[:, :, span], value[:, :, span], scale=scale, mask=mask)]
        if len(far):
            moved = rotation.move(key[0][:, far].float(), far, 0)[None].to(query.dtype)
            mask = None if bool(out_of_window.all()) else out_of_window[None, None]
            distant = self._distant(query, position)
            parts.append(attend(distant, moved, value[:, :, far], scale=scale, mask=mask))
        return merge(parts)

    def _distant(self, query: Tensor, position: int) -> Tensor:
        """Queries as tokens outside of the window meet them."""
        if self._rotation is None:
            return query
        positions = torch.arange(position, position + query.shape[2], device=query.device)
        return self._rotation.move(query[0].float(), positions, self.options.window)[None].to(query.dtype)


def local_scores(queries: Tensor, key: Tensor, window: int) -> Tensor:
    """r_m = mean over j = 1..window of q_(m+j) . k_m, for consecutive tokens m: (q_heads, n) float32.

    key: (kv_heads, n, head_dim).  queries: (q_heads, at least n - 1 + window, head_dim), from the second token on.
    """
    kv_heads, n, dim = key.shape
    # sums over a window as differences of running sums; float64 keeps the differences exact enough
    running = nn.functional.pad(queries[:, : n - 1 + window].double().cumsum(dim=1), (0, 0, 1, 0))
    mean = ((running[:, window:] - running[:, :-window]) / window).float()
    return (mean.reshape(kv_heads, -1, n, dim) * key[:, None].float()).sum(dim=3).reshape(-1, n)


def require_rotation(model: nn.Module, module: nn.Module) -> None:
    """Raise UnsupportedModelError if the model's keys cannot be given another position."""
    try:
        Rotation.of(model, module)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f'infllm with positions="unified" cannot run here: {error} Use positions="true".'
        ) from error
