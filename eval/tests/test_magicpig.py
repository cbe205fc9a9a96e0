"""MagicPIG: the probability to be sampled, estimates without bias, budgets, full attention where all are sampled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retrieval_attn_eval.baselines.magicpig import LshSampling, sampled_probability
from retrieval_attn_eval.baselines.options import MagicPIG
from retrieval_attn_eval.baselines.policy import attend_all
from retrieval_attn_eval.baselines.tokens import TokenBuffer

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 8, 60
SCALE = DIM**-0.5


def tensors(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Query (1, HEADS, 1, DIM), keys and values (1, KV_HEADS, tokens, DIM); the keys are not centred."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, HEADS, 1, DIM, generator=generator) * 2
    key = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator) + 1.5
    return query, key, torch.randn(1, KV_HEADS, tokens, DIM, generator=generator)


def started(options: MagicPIG, key: Tensor, value: Tensor, query: Tensor) -> LshSampling:
    """A policy that has read all tokens."""
    policy = LshSampling(options, 0, 1)
    policy.tokens = TokenBuffer()
    policy.tokens.append(key, value)
    policy.observe(query, key.shape[2] - 1, SCALE)
    policy.start()
    return policy


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (3, 5), (10, 150), (15, 150)])
def test_probability_is_that_of_two_tables_or_more(bits: int, tables: int) -> None:
    """By summing the binomial distribution, down to chances that differences of numbers near 1 cannot hold."""
    for cosine in (-0.999, -0.5, 0.0, 0.7, 1.0):
        same = (1 - math.acos(cosine) / math.pi) ** bits
        wanted = math.fsum(
            math.comb(tables, often) * same**often * (1 - same) ** (tables - often) for often in range(2, tables + 1)
        )
        got = float(sampled_probability(torch.tensor([cosine], dtype=torch.float64), bits, tables))
        assert got == pytest.approx(wanted, rel=1e-4)
    assert float(sampled_probability(torch.tensor([-1.0]), bits, tables)) > 0


def test_estimates_are_unbiased() -> None:
    """Mean over projections of the weighted sums that attention divides, within four standard errors."""
    query, key, value = tensors()
    key_of, value_of = (x[0].repeat_interleave(HEADS // KV_HEADS, dim=0).double() for x in (key, value))
    weights = ((key_of @ query[0].double().transpose(1, 2))[..., 0] * SCALE).exp()
    exact = torch.cat([weights.sum(dim=1, keepdim=True), torch.einsum("hn,hnd->hd", weights, value_of)], dim=1)
    found, sampled = [], []
    for seed in range(300):
        policy = started(MagicPIG(bits=3, tables=8, sink=2, window=3, seed=seed), key, value, query)
        out, lse = policy.attend(query, TOKENS - 1, 0, SCALE)
        total = lse[0].double().exp()
        found.append(torch.cat([total, total * out[0, :, 0].double()], dim=1))
        sampled.append(policy.meter.attended)
    rows = torch.stack(found)
    error = rows.std(dim=0) / len(rows) ** 0.5
    assert ((rows.mean(dim=0) - exact).abs() < 4 * error).all()
    assert 10 < sum(sampled) / len(sampled) < 40  # most tokens are left out
    assert (error[:, 0] < 0.1 * exact[:, 0]).all()  # four of them see a weight that is half as large or twice


def test_sampled_are_those_that_share_two_codes() -> None:
    """Each token's codes against the query's, one by one; sinks and window are always there."""
    query, key, value = tensors()
    policy = started(MagicPIG(bits=4, tables=6, sink=2, window=3), key, value, query)
    mean = key[0].mean(dim=1, keepdim=True)
    mine, theirs = policy.codes(query[0].reshape(KV_HEADS, -1, DIM)), policy.codes(key[0] - mean)
    wanted = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    for head in range(HEADS):
        for token in range(TOKENS):
            same = int((mine[head // 2, head % 2] == theirs[head // 2, token]).sum())
            wanted[head, token] = same >= 2 or token < 2 or token >= TOKENS - 3
    policy.attend(query, TOKENS - 1, 0, SCALE)
    assert policy.meter.attended == pytest.approx(float(wanted.sum()) / HEADS)
    assert int(theirs.max()) > 7 and wanted.sum() < HEADS * TOKENS


@pytest.mark.parametrize(
    "options",
    [
        MagicPIG(sink=40, window=21),
        MagicPIG(tokens=TOKENS, sink=2, window=3),
        MagicPIG(bits=1, tables=4000, sink=0, window=1),
    ],
    ids=["static", "budget", "tables"],
)
def test_everything_sampled_is_full_attention(options: MagicPIG) -> None:
    query, key, value = tensors()
    policy = started(options, key, value, query)
    new = tensors(1)[1:]
    policy.append(*new)
    got = policy.attend(query, TOKENS, 0, SCALE)
    exact = attend_all(query, policy.tokens, SCALE)
    assert policy.meter.attended == TOKENS + 1
    assert torch.allclose(got.out, exact.out, atol=1e-5) and torch.allclose(got.lse, exact.lse, atol=1e-5)


def test_a_budget_settles_bits_and_tables() -> None:
    """A larger one takes more tables or fewer bits, never more than are given; the sampled tokens follow."""
    query, key, value = tensors(2000)
    seen = []
    for tokens in (100, 300, 1000):
        policy = started(MagicPIG(tokens=tokens), key, value, query)
        assert 1 <= policy.bits <= 10 and 2 <= policy.tables <= 150
        counts = []
        for seed in range(8):
            policy = started(MagicPIG(tokens=tokens, seed=seed), key, value, query)
            policy.attend(query, 1999, 0, SCALE)
            counts.append(policy.meter.attended)
        seen.append(sum(counts) / len(counts))
        assert seen[-1] == pytest.approx(tokens, rel=0.25)
    again = started(MagicPIG(tokens=1000, seed=7), key, value, query)
    assert torch.equal(again.attend(query, 1999, 0, SCALE).out, policy.attend(query, 1999, 0, SCALE).out)
