"""MagicPIG: keys are sampled by hash tables, and each counts by the inverse of its probability to be sampled.

Follows "MagicPIG: LSH Sampling for Efficient LLM Generation" (arXiv 2410.16179), section 4: signs of random projections
of the centred keys make one code of `bits` bits per table; a key is sampled if it has the query's code in at least two
of the tables; its exponential is divided by the probability of that, which follows from the angle between query and
centred key. Sinks and a local window are attended exactly. Numerator and denominator of the softmax are then each
unbiased over the random projections.
Unlike the paper: (1) a budget in tokens takes fewer tables, and fewer bits where all tables sample too few, so that the
context's last queries sample that many on average; the paper chooses both by hand. (2) Keys are centred by the mean of
the context's, which stays. (3) Codes are compared instead of looked up; whom they sample is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.testing import Partial
from retrieval_attn_eval.baselines.policy import Policy
from retrieval_attn_eval.baselines.tokens import TokenBuffer

__all__ = ["LshSampling", "sampled_probability"]

SAMPLE_QUERIES, SAMPLE_KEYS = 16, 4096
"""Of the context's last queries and of its keys, by which the number of tables follows a budget."""
_HASHED_AT_ONCE = 4096


class LshSampling(Policy):
    """Hash codes of all tokens, per key-value head."""

    def __init__(self, options: object, layer: int, layers: int) -> None:
        super().__init__(options, layer, layers)
        self._last: tuple[Tensor, ...] = ()  # the context's last queries so far; replaced, never changed
        self.bits = self.tables = 0

    def observe(self, query: Tensor, start: int, scale: float) -> None:
        self._last = (torch.cat([*self._last, query], dim=2)[:, :, -SAMPLE_QUERIES:].clone(),)

    def start(self) -> None:
        key = self.tokens.key
        self._mean = key[0].float().mean(dim=1, keepdim=True)  # (kv_heads, 1, head_dim)
        self.bits, self.tables = self._settle(key)
        generator = torch.Generator().manual_seed(self.options.seed * 1009 + self.layer)
        planes = torch.randn(key.shape[3], self.tables * self.bits, generator=generator)
        self._planes = planes.to(key.device)
        self._codes = TokenBuffer()
        self._hash(key)

    def append(self, key: Tensor, value: Tensor) -> None:
        super().append(key, value)
        self._hash(key)

    def _hash(self, key: Tensor) -> None:
        for low in range(0, key.shape[2], _HASHED_AT_ONCE):
            codes = self.codes(key[0, :, low : low + _HASHED_AT_ONCE].float() - self._mean)[None]
            self._codes.append(codes, codes[..., :0], room=key.shape[2])

    def codes(self, vectors: Tensor) -> Tensor:
        """Codes of vectors (heads, n, head_dim) float32 in every table, (heads, n, tables) int16."""
        signs = (vectors @ self._planes > 0).unflatten(2, (self.tables, self.bits))
        weights = 1 << torch.arange(self.bits, device=vectors.device)
        return (signs * weights).sum(dim=3).to(torch.int16)

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        key, value = self.tokens.key[0].float(), self.tokens.value[0].float()
        kv_heads, tokens, dim = key.shape
        grouped = query[0, :, 0].float().reshape(kv_heads, -1, dim)
        products = grouped @ key.transpose(1, 2)  # (kv_heads, group, tokens)
        chance = sampled_probability(self._cosines(grouped, products, key), self.bits, self.tables)
        taken = self._collide(grouped)
        near = torch.arange(tokens, device=key.device)
        near = (near < self.options.sink) | (near >= tokens - self.options.window)
        weight = products * scale - chance.log().float().masked_fill(near, 0.0)
        taken |= near
        weight = weight.masked_fill(~taken, -torch.inf)
        self.meter.add(1, float(taken.sum()) / query.shape[1], float(taken.any(dim=1).sum()) / kv_heads)
        lse = weight.logsumexp(dim=2)
        out = (weight - lse[..., None]).exp() @ value
        return Partial(out.reshape(1, -1, 1, value.shape[2]), lse.reshape(1, -1, 1))

    def _collide(self, grouped: Tensor) -> Tensor:
        """Whether grouped queries (kv_heads, group, head_dim) sample each token, (kv_heads, group, tokens) bool."""
        if not self.bits:
            return torch.ones(*grouped.shape[:2], self._codes.length, dtype=torch.bool, device=grouped.device)
        mine, codes = self.codes(grouped), self._codes.key[0]
        return torch.stack([(codes == mine[:, [one]]).sum(dim=2) >= 2 for one in range(grouped.shape[1])], dim=1)

    def _cosines(self, grouped: Tensor, products: Tensor, key: Tensor) -> Tensor:
        """Of the angle between each query and each centred key, (kv_heads, group, tokens)."""
        centred = products - grouped @ self._mean.transpose(1, 2)
        lengths = grouped.norm(dim=2)[..., None] * (key - self._mean).norm(dim=2)[:, None]
        return centred / lengths.clamp_min(torch.finfo(torch.float32).tiny)

    def _settle(self, key: Tensor) -> tuple[int, int]:
        """Bits and tables: as given, or those with which the last queries sample what the budget leaves."""
        options = self.options
        wanted, keys = options.tokens, key[0].float()
        if wanted is None:
            return options.bits, options.tables
        wanted -= min(options.sink + options.window, keys.shape[1])
        middle = keys[:, options.sink : max(options.sink, keys.shape[1] - options.window)]
        total = middle.shape[1]
        middle = middle[:, :: -(-total // SAMPLE_KEYS) or 1]
        if wanted >= total:
            return 0, 2  # codes of no bits are all the same: everything is sampled
        queries = self._last[0][0].float()
        grouped = queries.reshape(len(keys), -1, keys.shape[2])
        cosines = self._cosines(grouped, grouped @ middle.transpose(1, 2), middle)

        def sampled(bits: int, tables: int) -> float:
            return float(sampled_probability(cosines, bits, tables).mean()) * total

        bits = next((bits for bits in range(options.bits, 0, -1) if sampled(bits, options.tables) >= wanted), 1)
        low, high = 2, options.tables
        while low < high:
            tables = (low + high) // 2
            low, high = (low, tables) if sampled(bits, tables) >= wanted else (tables + 1, high)
        return bits, low


def sampled_probability(cosines: Tensor, bits: int, tables: int) -> Tensor:
    """Of two vectors at these cosines to share their code in at least two of `tables`; float64, above 0.

    A code is `bits` signs of independent random projections, each the same with probability 1 - angle / pi.
    """
    same = (1 - cosines.double().clamp(-1, 1).arccos() / torch.pi).pow(bits)
    differ = torch.log1p(-same)
    once = tables * same * ((tables - 1) * differ).exp()
    chance = -torch.expm1(tables * differ) - once
    # what cancels where codes are rarely the same is at least the chance of exactly two
    twice = tables * (tables - 1) / 2 * same.square() * (1 - same).pow(tables - 2)
    return torch.maximum(chance, twice).clamp(torch.finfo(torch.float64).tiny, 1.0)
