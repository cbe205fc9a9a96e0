"""InfLLM and InfiniGen against their papers' definitions, computed a second time without the package.

`test_the_references_notice` breaks each method and expects a difference. Others: test_baselines_papers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.tests.baselines_reference import (
    CONTEXT,
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    QUESTION,
    SCALE,
    answer,
    causal,
    close,
    eager,
    full_pass,
    make_cache,
    model,
    watch,
)
from retrieval_attn_eval.baselines.cache import attention_modules
from retrieval_attn_eval.baselines.infinigen import LayerInputs, Speculation
from retrieval_attn_eval.baselines.infllm import Blocks, local_scores
from retrieval_attn_eval.baselines.options import InfiniGen, InfLLM
from retrieval_attn_eval.baselines.policy import Dense

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- InfLLM ------------------------------------------------------------------------------------------------


def infllm_blocks(options: InfLLM, end: int) -> int:
    """Complete blocks once `end` tokens have been answered."""
    return max(0, (end - options.sink - options.window) // options.block)


def infllm_choice(options: InfLLM, blocks: int, rows: range) -> list[int]:
    """Blocks that the chunk of queries `rows` looks up, by the formulas, one token and head at a time."""
    query, key = full_pass()["query"], full_pass()["key"]
    stand_in = np.zeros((HEADS, blocks, DIM))
    for head in range(HEADS):
        own = key[head // GROUP]
        for block in range(blocks):
            low = options.sink + block * options.block
            scores = [
                np.mean([query[head, m + j] @ own[m] for j in range(1, options.window + 1)])
                for m in range(low, low + options.block)
            ]
            best = low + np.argsort(-np.array(scores))[: options.representatives]
            stand_in[head, block] = own[best].mean(0)
    relevance = np.einsum("hqd,hbd->b", query[:, rows.start : rows.stop], stand_in)
    return sorted(int(one) for one in np.argsort(-relevance)[: options.blocks])


def infllm_mask(options: InfLLM, chunks: list[range], allowed: Tensor) -> Tensor:
    """The mask with each chunk's rows restricted to sinks, looked-up blocks and tail."""
    for rows in chunks:
        blocks = infllm_blocks(options, rows.start)
        seen = torch.zeros(allowed.shape[-1], dtype=torch.bool)
        seen[: options.sink] = True
        seen[options.sink + blocks * options.block :] = True
        for block in infllm_choice(options, blocks, rows):
            low = options.sink + block * options.block
            seen[low : low + options.block] = True
        allowed[:, rows.start : rows.stop] &= seen
    return allowed


@pytest.mark.parametrize("prefill", ["full", "blocks"])
def test_infllm_is_full_attention_over_the_looked_up_blocks(prefill: str) -> None:
    """Section 3, positions left alone: representatives by the mean score of the window's queries, blocks by the sum
    over queries, heads and representatives."""
    options = InfLLM(
        sink=3, window=20, block=8, blocks=3, representatives=2, chunk=30, positions="true", prefill=prefill
    )
    made = make_cache(lambda layer, layers: Blocks(options, layer, layers, model()), chunk=60)
    got = answer(made, one_by_one=False)
    reading = [range(low, min(low + 30, CONTEXT)) for low in range(0, CONTEXT, 30)] if prefill == "blocks" else []
    chunks = [*reading, range(CONTEXT, CONTEXT + QUESTION)]
    allowed = infllm_mask(options, chunks, causal())
    assert close(got, eager(allowed).logits[0, -1])
    assert made.own[0].acting.blocks == infllm_blocks(options, CONTEXT + QUESTION) == 16
    assert made.meters()[0].attended == pytest.approx(float(allowed[0, CONTEXT:].sum()))


def test_infllm_generated_tokens_become_blocks() -> None:
    """Token by token: blocks complete while decoding, with the queries that came then."""
    options = InfLLM(sink=3, window=20, block=4, blocks=2, representatives=1, positions="true", prefill="full")
    made = make_cache(lambda layer, layers: Blocks(options, layer, layers, model()), chunk=60)
    got = answer(made)
    chunks = [range(row, row + 1) for row in range(CONTEXT, CONTEXT + QUESTION)]
    assert close(got, eager(infllm_mask(options, chunks, causal())).logits[0, -1])
    assert infllm_blocks(options, CONTEXT + QUESTION) > infllm_blocks(options, CONTEXT)


def test_infllm_representative_scores() -> None:
    """r_m against the double loop, over a group of heads, with more queries than needed."""
    rng = np.random.default_rng(0)
    queries, key = rng.standard_normal((4, 30, 8)), rng.standard_normal((2, 12, 8))
    got = local_scores(torch.tensor(queries), torch.tensor(key), 7)
    for head in range(4):
        for m in range(12):
            expected = np.mean([queries[head, m + j] @ key[head // 2, m] for j in range(7)])
            assert float(got[head, m]) == pytest.approx(expected, abs=1e-5)


def rotated(vector: np.ndarray, position: float) -> np.ndarray:
    """Rotary embedding of llama (halves are pairs, base 10,000), written out."""
    half = DIM // 2
    angle = position * 10000.0 ** (-np.arange(half) / half)
    left, right = vector[:half], vector[half:]
    return np.concatenate([left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_infllm_gives_distant_tokens_one_distance(one_by_one: bool) -> None:
    """Section 3.2: tokens beyond the window stand at the window's distance; all blocks looked up here."""
    window = 20
    options = InfLLM(sink=3, window=window, block=8, blocks=99, representatives=1, prefill="full")
    made = make_cache(lambda layer, layers: Blocks(options, layer, layers, model()))
    seen: dict[str, Any] = {}
    with watch(attention_modules(model())[0], seen):
        answer(made, one_by_one)
    got = seen["heads"][0, -1].numpy().reshape(HEADS, DIM)
    data, last = full_pass(), CONTEXT + QUESTION - 1
    for head in range(HEADS):
        query, kv = data["plain_query"][head, last], head // GROUP
        scores = [rotated(query, min(last - at, window)) @ data["plain_key"][kv, at] * SCALE for at in range(last + 1)]
        weight = np.exp(np.array(scores) - max(scores))
        expected = weight @ data["value"][kv, : last + 1] / weight.sum()
        assert np.abs(got[head] - expected).max() < 1e-4


# ---- InfiniGen ---------------------------------------------------------------------------------------------


def infinigen(options: InfiniGen) -> tuple[Any, Any, Tensor]:
    """Two layers, the question through the method: the second layer's policy, its guess, what it fetched."""
    inputs = LayerInputs(attention_modules(model(2)))
    notes: dict[str, Any] = {}

    class Noting(Speculation):
        def choose(self, guess: Tensor, scale: float) -> Tensor:
            notes["guess"], notes["ids"] = guess, super().choose(guess, scale)
            return notes["ids"]

    def policy(layer: int, layers: int) -> Any:
        return Dense(options, layer, layers) if layer == 0 else Noting(options, layer, layers, inputs)

    made = make_cache(policy, layers=2)
    with inputs:
        answer(made, one_by_one=False, layers=2)
    return made.own[1].acting, notes["guess"], notes["ids"]


@torch.no_grad()
def layer_tensors() -> dict[str, Any]:
    """Of the two-layer model: input of each attention, and the second layer's rotated queries and keys."""
    from transformers.models.llama import modeling_llama

    modules: list[Any] = attention_modules(model(2))
    first, second = modules
    seen: dict[str, Any] = {}
    with watch(first, seen):
        eager(causal(), layers=2)
    before, (cos, sin) = seen["hidden"], seen["rotary"]
    with watch(second, seen):
        eager(causal(), layers=2)

    def turn(hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = second.q_proj(hidden).view(1, -1, HEADS, DIM).transpose(1, 2)
        key = second.k_proj(hidden).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
        return query[0], key[0]

    query, key = turn(seen["hidden"])
    return {"guess": turn(before)[0][:, -1], "query": query, "key": key}


def test_infinigen_speculates_from_the_layer_before() -> None:
    """Section 4.3: this layer's query weight applied to the input of the attention before it."""
    _, guess, _ = infinigen(InfiniGen())
    expected = layer_tensors()
    assert close(guess, expected["guess"], 1e-3)
    assert not close(guess, expected["query"][:, -1], 1e-1)


def test_infinigen_skews_and_keeps_the_largest_columns() -> None:
    """Section 4.2: an orthogonal matrix from the queries' singular vectors leaves scores as they are; the columns
    with the largest absolute sums carry the speculation."""
    policy, _, _ = infinigen(InfiniGen(partial=0.25))
    tensors = layer_tensors()
    for head in range(KV_HEADS):
        queries = tensors["query"][head * GROUP : (head + 1) * GROUP, :CONTEXT].reshape(-1, DIM).double()
        right = torch.linalg.svd(queries, full_matrices=False).Vh.T
        skew = policy.skew[head].double()
        assert torch.allclose(skew.T @ skew, torch.eye(DIM, dtype=torch.float64), atol=1e-4)
        assert torch.allclose((skew * right).sum(0).abs()[:4], torch.ones(4, dtype=torch.float64), atol=1e-2)
        weight = (queries @ skew).abs().sum(0)
        assert set(policy.columns[head].tolist()) == set(weight.topk(4).indices.tolist())


@pytest.mark.parametrize("options", [InfiniGen(alpha=2.0), InfiniGen(alpha=50.0), InfiniGen(tokens=12)])
def test_infinigen_fetches_the_same_count_for_each_head(options: InfiniGen) -> None:
    """Section 4.3: speculated scores within alpha of the best, mean count over heads, at most a fifth of the cache;
    or the count that is asked for."""
    policy, guess, got = infinigen(options)
    key = layer_tensors()["key"]
    newest = key.shape[1] - 1
    scores = np.zeros((HEADS, newest))
    for head in range(HEADS):
        skew, columns = policy.skew[head // GROUP], policy.columns[head // GROUP]
        partial_query, partial_key = (guess[head] @ skew)[columns], (key[head // GROUP] @ skew)[:newest, columns]
        scores[head] = (partial_key @ partial_query).numpy() * SCALE
    near = (scores > scores.max(1, keepdims=True) - options.alpha).sum(1).mean()
    count = options.tokens - 1 if options.tokens else min(int(near), int(newest * 0.2))
    for head in range(HEADS):
        assert set(got[head].tolist()) == {newest, *np.argsort(-scores[head])[:count].tolist()}


@pytest.mark.parametrize(
    ("where", "name", "broken", "check"),
    [
        (
            Blocks,
            "relevance",
            lambda real: lambda self, q, p: -real(self, q, p),
            lambda: test_infllm_is_full_attention_over_the_looked_up_blocks("full"),
        ),
        (
            Blocks,
            "_distant",
            lambda real: lambda self, q, p: q,
            lambda: test_infllm_gives_distant_tokens_one_distance(True),
        ),
        (
            Speculation,
            "speculated_query",
            lambda real: lambda self, q, r: q[0, :, 0].float(),
            lambda: test_infinigen_speculates_from_the_layer_before(),
        ),
    ],
    ids=["infllm-order", "infllm-positions", "infinigen-layer"],
)
def test_the_references_notice(
    where: Any, name: str, broken: Any, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong method must fail its own test."""
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check()
