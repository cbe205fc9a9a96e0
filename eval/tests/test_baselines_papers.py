"""Each baseline against its paper's definition, computed a second time without the package.

`test_the_references_notice` breaks each method and expects a difference. InfLLM and InfiniGen: test_baselines_blocks.
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
    GROUP,
    HEADS,
    KV_HEADS,
    QUESTION,
    answer,
    causal,
    close,
    eager,
    full_pass,
    ids,
    make_cache,
    model,
)
from retrieval_attn.config import Config
from retrieval_attn_eval.baselines.cache import ContextCache, attention_modules
from retrieval_attn_eval.baselines.infinigen import LayerInputs, Speculation
from retrieval_attn_eval.baselines.infllm import Blocks
from retrieval_attn_eval.baselines.magicpig import LshSampling
from retrieval_attn_eval.baselines.options import InfiniGen, InfLLM, MagicPIG, PyramidKV, Quest, SnapKV, StreamingLLM
from retrieval_attn_eval.baselines.policy import Dense
from retrieval_attn_eval.baselines.quest import QuestPages
from retrieval_attn_eval.baselines.reader import feed
from retrieval_attn_eval.baselines.snapkv import Snap
from retrieval_attn_eval.baselines.streaming import Streaming

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- StreamingLLM ------------------------------------------------------------------------------------------


def window_rows(allowed: Tensor, sink: int, window: int, first: int) -> Tensor:
    """The mask with rows from `first` on restricted to sinks and window."""
    at = torch.arange(allowed.shape[1])[:, None]
    token = torch.arange(allowed.shape[2])
    near = (token < sink) | (token > at - window)
    return allowed & (near | (at < first))


@pytest.mark.parametrize(
    ("sink", "window", "one_by_one", "prefill"),
    [
        (4, 20, True, "full"),
        (4, 20, False, "window"),
        (0, 1, False, "full"),
        (30, 7, True, "window"),
        (1, 149, False, "full"),
    ],
)
def test_streaming_is_full_attention_with_its_mask(sink: int, window: int, one_by_one: bool, prefill: str) -> None:
    """Section 3.2: a query sees `sink` first tokens and the `window` last ones, its own included."""
    options = StreamingLLM(sink=sink, window=window, prefill=prefill)
    made = make_cache(lambda layer, layers: Streaming(options, layer, layers), layers=2)
    got = answer(made, one_by_one, layers=2)
    first = 0 if prefill == "window" else CONTEXT
    expected = eager(window_rows(causal(), sink, window, first), layers=2).logits[0, -1]
    assert close(got, expected)
    assert {meter.attended / meter.queries for meter in made.meters()} == {sink + window}


# ---- SnapKV and PyramidKV ----------------------------------------------------------------------------------


def pooled(votes: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """(kv_heads, n): mean (zeros beyond the ends count) or maximum over `kernel` neighbours."""
    half = kernel // 2
    edge = 0.0 if pooling == "avg" else -np.inf
    wide = np.pad(votes, ((0, 0), (half, half)), constant_values=edge)
    windows = np.lib.stride_tricks.sliding_window_view(wide, kernel, axis=1)
    return windows.mean(-1) if pooling == "avg" else windows.max(-1)


def snap_reference(tokens: int, capacity: int, observe: int, kernel: int, pooling: str) -> np.ndarray:
    """Kept tokens per key-value head, bool (kv_heads, tokens), from the model's own attention weights."""
    weights = full_pass()["weights"][:, tokens - observe : tokens, :tokens]
    votes = weights[:, :, : tokens - observe].sum(1).reshape(KV_HEADS, GROUP, -1).sum(1)
    score = pooled(votes, kernel, pooling)
    kept = np.zeros((KV_HEADS, tokens), bool)
    kept[:, tokens - observe :] = True
    for head in range(KV_HEADS):
        kept[head, np.argsort(-score[head], kind="stable")[: capacity - observe]] = True
    return kept


@pytest.mark.parametrize(
    ("capacity", "observe", "kernel", "pooling"),
    [(40, 16, 5, "avg"), (40, 16, 5, "max"), (64, 63, 1, "avg"), (100, 8, 7, "max"), (149, 3, 3, "avg")],
)
@pytest.mark.parametrize("position", ["inside", "after"])
def test_snapkv_keeps_what_the_window_votes_for(
    capacity: int, observe: int, kernel: int, pooling: str, position: str
) -> None:
    """Section 4: softmax weights of the last queries, summed, pooled, top `capacity - observe` per head, plus the
    window itself; then every later query attends to that and to what was generated."""
    options = SnapKV(capacity=capacity, observe=observe, kernel=kernel, pooling=pooling)
    made = make_cache(lambda layer, layers: Snap(options, layer, layers), chunk=10)
    tokens = CONTEXT
    if position == "inside":  # the first half of the question belongs to the prompt
        tokens += QUESTION // 2
        feed(model(), made, ids()[0, CONTEXT:tokens].tolist(), CONTEXT, 4096)
    made.start()
    for place in range(tokens, CONTEXT + QUESTION):
        got = feed(model(), made, [int(ids()[0, place])], place, 4096)[0]
    kept = snap_reference(tokens, capacity, observe, kernel, pooling)
    acting = made.own[0].acting
    mine = np.zeros_like(kept)
    np.put_along_axis(mine, acting.kept.numpy(), True, 1)
    assert (mine == kept).all() and kept.sum(1).tolist() == [capacity] * KV_HEADS
    allowed = causal().repeat(HEADS, 1, 1)
    allowed[:, tokens:, :tokens] &= torch.from_numpy(np.repeat(kept, GROUP, 0))[:, None]
    assert close(got, eager(allowed).logits[0, -1])


def test_snapkv_keeps_a_short_prompt_whole() -> None:
    options = SnapKV(capacity=CONTEXT, observe=16)
    made = make_cache(lambda layer, layers: Snap(options, layer, layers))
    assert close(answer(made), full_pass()["logits"])
    assert made.own[0].acting.kept is None


def test_pyramid_budgets() -> None:
    """Section 4 and the published code: linear from 2 (c - w) - min to min = (c - w) // 20 in whole steps; worked
    by hand for 32 layers, capacity 2048, window 64."""
    pyramid = PyramidKV(capacity=2048, observe=64)
    long = [pyramid.layer_capacity(layer, 32, 131072) for layer in range(32)]
    assert long[0] == 64 + 3869 and long[31] == 64 + 3869 - 31 * 121
    assert {before - after for before, after in zip(long, long[1:], strict=False)} == {121}
    assert abs(sum(long) / 32 - 2048) < 32
    # 4,000 tokens cannot give layer 0 its 3,869 + 64? they can; 3,968 = 2 * 1,984 can too, 3,900 cannot
    clamped = [pyramid.layer_capacity(layer, 32, 3968) for layer in range(32)]
    assert clamped[0] == 64 + 3869
    narrow = PyramidKV(capacity=2048, observe=64, beta=1000)
    assert [narrow.layer_capacity(0, 32, 3968 + extra) for extra in (0, 60, 200)] == [3968, 3968 + 60, 64 + 3967]
    assert [pyramid.layer_capacity(layer, 32, 3900) for layer in (0, 31)] == [2048, 2048]
    assert [pyramid.layer_capacity(layer, 32, 100) for layer in (0, 31)] == [100, 100]
    assert pyramid.layer_capacity(0, 1, 9999) == 2048


def test_pyramid_layers_keep_their_budgets() -> None:
    options = PyramidKV(capacity=40, observe=8, beta=4)
    made = make_cache(lambda layer, layers: Snap(options, layer, layers), layers=3)
    made.start()
    # 32 beyond the window on average: 56, 32, 8
    assert [layer.acting.kept.shape[1] for layer in made.own] == [8 + 56, 8 + 32, 8 + 8]


# ---- Quest -------------------------------------------------------------------------------------------------


def quest_reference(page: int, budget: int, row: int) -> np.ndarray:
    """Tokens each query head attends to at token `row`, bool (heads, tokens): bounds by the paper's formula."""
    key, query = full_pass()["key"], full_pass()["query"][:, row]
    tokens = row + 1
    allowed = np.zeros((HEADS, CONTEXT + QUESTION), bool)
    for head in range(HEADS):
        own = key[head // GROUP, :tokens]
        pages = [own[low : low + page] for low in range(0, tokens, page)]
        bound = [np.maximum(query[head] * p.min(0), query[head] * p.max(0)).sum() for p in pages]
        for exact, most in zip((p @ query[head] for p in pages), bound, strict=True):
            assert exact.max() <= most + 1e-3
        older = np.argsort(-np.array(bound[:-1]), kind="stable")[: budget // page - 1]
        for chosen in (*older, len(pages) - 1):
            allowed[head, chosen * page : min((chosen + 1) * page, tokens)] = True
    return allowed


@pytest.mark.parametrize(("page", "budget"), [(16, 48), (7, 70), (1, 9), (16, 16), (150, 300)])
def test_quest_attends_to_the_pages_with_the_highest_bound(page: int, budget: int) -> None:
    """Section 3: bound of a page = sum over channels of max(q min, q max), an upper bound of its scores; each head's
    top pages. The pages grow while the question arrives."""
    options = Quest(page=page, budget=budget, dense_layers=0, least_pages=1)
    made = make_cache(lambda layer, layers: QuestPages(options, layer, layers))
    got = answer(made, one_by_one=False)
    allowed = causal().repeat(HEADS, 1, 1)
    for row in range(CONTEXT, CONTEXT + QUESTION):
        allowed[:, row] = torch.from_numpy(quest_reference(page, budget, row))
    assert close(got, eager(allowed).logits[0, -1])
    meter = made.meters()[0]
    assert meter.queries == QUESTION
    assert meter.attended == pytest.approx(float(allowed[:, CONTEXT:].sum()) / HEADS)
    union = allowed[:, CONTEXT:].reshape(KV_HEADS, GROUP, QUESTION, -1).any(1)
    assert meter.read == pytest.approx(float(union.sum()) / KV_HEADS)


# ---- all ---------------------------------------------------------------------------------------------------


GENEROUS: dict[str, Callable[[int, int], Any]] = {
    "streaming_llm": lambda i, n: Streaming(StreamingLLM(sink=4, window=999), i, n),
    "streaming_llm read": lambda i, n: Streaming(StreamingLLM(sink=4, window=999, prefill="window"), i, n),
    "snapkv": lambda i, n: Snap(SnapKV(capacity=999, observe=16), i, n),
    "pyramidkv": lambda i, n: Snap(PyramidKV(capacity=999, observe=16), i, n),
    "quest": lambda i, n: QuestPages(Quest(budget=999, dense_layers=0), i, n),
    "magicpig": lambda i, n: LshSampling(MagicPIG(tokens=999, dense_layers=0), i, n),
    "infllm": lambda i, n: Blocks(InfLLM(window=999), i, n, model(2)),
    "infllm true": lambda i, n: Blocks(
        InfLLM(sink=4, window=9, block=8, blocks=99, positions="true", chunk=7), i, n, model(2)
    ),
}


@pytest.mark.parametrize("name", GENEROUS)
@pytest.mark.parametrize(("one_by_one", "chunk"), [(True, 4096), (False, 33)])
def test_with_budget_enough_every_method_is_full_attention(name: str, one_by_one: bool, chunk: int) -> None:
    made = make_cache(GENEROUS[name], layers=2, chunk=chunk)
    assert close(answer(made, one_by_one, layers=2), eager(causal(), layers=2).logits[0, -1])


def test_infinigen_with_budget_enough_is_full_attention() -> None:
    options = InfiniGen(tokens=999)
    inputs = LayerInputs(attention_modules(model(2)))
    made = make_cache(
        lambda i, n: Dense(options, i, n) if i == 0 else Speculation(options, i, n, inputs), layers=2, chunk=33
    )
    with inputs:
        assert close(answer(made, False, layers=2), eager(causal(), layers=2).logits[0, -1])


def test_a_rewound_cache_answers_as_a_new_one() -> None:
    """One reading serves several methods: what one of them evicted, appended or computed must not reach the next."""
    names = ["quest", "snapkv", "magicpig", "infllm true"]
    small = {
        "magicpig": lambda i, n: LshSampling(MagicPIG(bits=3, tables=9, dense_layers=0), i, n),
        "quest": lambda i, n: QuestPages(Quest(budget=32, dense_layers=0), i, n),
        "snapkv": lambda i, n: Snap(SnapKV(capacity=30, observe=8), i, n),
        "infllm true": lambda i, n: Blocks(
            InfLLM(sink=2, window=20, block=4, blocks=2, positions="true", prefill="full"), i, n, model(2)
        ),
    }
    alone = {name: answer(make_cache(small[name], layers=2), False, layers=2) for name in names}
    made = ContextCache(model(2), small, Config(index="flat"))
    feed(model(2), made, ids()[0, :CONTEXT].tolist(), 0, 64)
    made.context_tokens = CONTEXT
    for name in (*names, *reversed(names)):
        made.act(name)
        assert torch.equal(answer(made, False, layers=2), alone[name])
        made.rewind()
    assert len({float(logits.sum()) for logits in alone.values()}) == 4


@pytest.mark.parametrize(
    ("where", "name", "broken", "check"),
    [
        (
            Streaming,
            "attend",
            lambda real: lambda self, q, p, r, s: real(self, q, p - 1, r, s),
            lambda: test_streaming_is_full_attention_with_its_mask(4, 20, True, "full"),
        ),
        (
            Snap,
            "_choose",
            lambda real: lambda self, key, c: real(self, key.flip(2), c),
            lambda: test_snapkv_keeps_what_the_window_votes_for(40, 16, 5, "avg", "after"),
        ),
        (
            Snap,
            "observe",
            lambda real: lambda self, q, p, s: real(self, q, p, 2 * s),
            lambda: test_snapkv_keeps_what_the_window_votes_for(100, 8, 7, "max", "after"),
        ),
        (
            QuestPages,
            "scores",
            lambda real: lambda self, q: -real(self, q),
            lambda: test_quest_attends_to_the_pages_with_the_highest_bound(16, 48),
        ),
        (
            QuestPages,
            "_extend",
            lambda real: lambda self, start: real(self, start) if not start % 16 else None,
            lambda: test_quest_attends_to_the_pages_with_the_highest_bound(7, 70),
        ),
    ],
    ids=["streaming", "snapkv-keys", "snapkv-scale", "quest-order", "quest-growth"],
)
def test_the_references_notice(
    where: Any, name: str, broken: Any, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong method must fail its own test."""
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check()
