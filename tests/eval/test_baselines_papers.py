"""Each baseline against its paper's definition, computed a second time without the package.

The reference is transformers' eager attention with a dense mask per head: a one-layer model with random weights, whose
attention weights, queries and keys are read with hooks. `test_the_references_notice` breaks each method and
expects a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.config import Config
from retrieval_attn.eval.baselines.cache import ContextCache, attention_modules
from retrieval_attn.eval.baselines.infinigen import LayerInputs, Speculation
from retrieval_attn.eval.baselines.infllm import Blocks, local_scores
from retrieval_attn.eval.baselines.options import InfiniGen, InfLLM, PyramidKV, Quest, SnapKV, StreamingLLM
from retrieval_attn.eval.baselines.policy import Dense
from retrieval_attn.eval.baselines.quest import QuestPages
from retrieval_attn.eval.baselines.reader import feed
from retrieval_attn.eval.baselines.snapkv import Snap
from retrieval_attn.eval.baselines.streaming import Streaming
from tests.tiny_models import config_of, random_ids

CONTEXT, QUESTION = 150, 6
HEADS, KV_HEADS, DIM = 6, 2, 16
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5


def model(layers: int = 1) -> Any:
    """A llama with random weights whose attention is far from uniform. Shared: leave it as it was."""
    return _model(layers)


@cache
def _model(layers: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = config_of(
        "llama", vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(layers)
    made: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(12.0)
    return made


def ids() -> Tensor:
    return random_ids(1, CONTEXT + QUESTION)


@torch.no_grad()
def eager(allowed: Tensor, layers: int = 1, **options: Any) -> Any:
    """transformers' own forward; allowed: bool, broadcastable to (heads, tokens, tokens)."""
    tokens = allowed.shape[-1]
    mask = torch.zeros(1, *allowed.shape).masked_fill(~allowed[None], torch.finfo(torch.float32).min)
    return model(layers)(input_ids=ids()[:, :tokens], attention_mask=mask, use_cache=False, **options)


def causal(tokens: int = CONTEXT + QUESTION) -> Tensor:
    """(1, tokens, tokens) bool."""
    return torch.ones(1, tokens, tokens, dtype=torch.bool).tril()


def make_cache(policy: Callable[[int, int], Any], layers: int = 1, context: int = CONTEXT, chunk: int = 64) -> Any:
    """A cache that has read the context (in chunks) and acts as `policy`; `start` is the caller's."""
    made = ContextCache(model(layers), {"it": policy}, Config(index="flat"))
    feed(model(layers), made, ids()[0, :context].tolist(), 0, chunk)
    made.context_tokens = context
    made.act("it")
    return made


def answer(made: Any, one_by_one: bool = True, layers: int = 1) -> Tensor:
    """Logits of the question's last token, the question fed after the context was finished."""
    made.start()
    question = ids()[0, CONTEXT:].tolist()
    if not one_by_one:
        return feed(model(layers), made, question, CONTEXT, 4096)[0]
    for place, token in enumerate(question):
        logits = feed(model(layers), made, [token], CONTEXT + place, 4096)
    return logits[0]


@cache
def full_pass() -> dict[str, Any]:
    """Weights, queries and keys of the one layer over all tokens, as numpy; heads first."""
    module: Any = attention_modules(model())[0]
    seen: dict[str, Any] = {}
    from transformers.models.llama import modeling_llama

    with torch.no_grad(), watch(module, seen):
        out = eager(causal(), output_attentions=True)
        hidden, (cos, sin) = seen["hidden"], seen["rotary"]
        query = module.q_proj(hidden).view(1, -1, HEADS, DIM).transpose(1, 2)
        key = module.k_proj(hidden).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        value = module.v_proj(hidden).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        plain = query[0].numpy(), key[0].numpy()
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    return {
        "weights": out.attentions[0][0].numpy(),
        "query": query[0].numpy(),
        "key": key[0].numpy(),
        "value": value[0].numpy(),
        "plain_query": plain[0],
        "plain_key": plain[1],
        "logits": out.logits[0, -1],
    }


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def watch(module: Any, seen: dict[str, Any]) -> Iterator[None]:
    """Notes the module's input, rotary tables, and what enters its output projection."""

    def before(_: Any, args: Any, kwargs: Any) -> None:
        seen["hidden"], seen["rotary"] = kwargs["hidden_states"], kwargs["position_embeddings"]

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.o_proj.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0])),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> bool:
    return float((left - right).abs().max()) <= tolerance


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


# ---- all ---------------------------------------------------------------------------------------------------


GENEROUS: dict[str, Callable[[int, int], Any]] = {
    "streaming_llm": lambda i, n: Streaming(StreamingLLM(sink=4, window=999), i, n),
    "streaming_llm read": lambda i, n: Streaming(StreamingLLM(sink=4, window=999, prefill="window"), i, n),
    "snapkv": lambda i, n: Snap(SnapKV(capacity=999, observe=16), i, n),
    "pyramidkv": lambda i, n: Snap(PyramidKV(capacity=999, observe=16), i, n),
    "quest": lambda i, n: QuestPages(Quest(budget=999, dense_layers=0), i, n),
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
    names = ["quest", "snapkv", "infllm true"]
    small = {
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
    assert len({float(logits.sum()) for logits in alone.values()}) == 3


@pytest.mark.parametrize(
    ("where", "name", "broken", "check"),
    [
        (Streaming, "attend", lambda real: lambda self, q, p, r, s: real(self, q, p - 1, r, s),
         lambda: test_streaming_is_full_attention_with_its_mask(4, 20, True, "full")),
        (Snap, "_choose", lambda real: lambda self, key, c: real(self, key.flip(2), c),
         lambda: test_snapkv_keeps_what_the_window_votes_for(40, 16, 5, "avg", "after")),
        (Snap, "observe", lambda real: lambda self, q, p, s: real(self, q, p, 2 * s),
         lambda: test_snapkv_keeps_what_the_window_votes_for(100, 8, 7, "max", "after")),
        (QuestPages, "scores", lambda real: lambda self, q: -real(self, q),
         lambda: test_quest_attends_to_the_pages_with_the_highest_bound(16, 48)),
        (QuestPages, "_extend", lambda real: lambda self, start: real(self, start) if not start % 16 else None,
         lambda: test_quest_attends_to_the_pages_with_the_highest_bound(7, 70)),
        (Blocks, "relevance", lambda real: lambda self, q, p: -real(self, q, p),
         lambda: test_infllm_is_full_attention_over_the_looked_up_blocks("full")),
        (Blocks, "_distant", lambda real: lambda self, q, p: q,
         lambda: test_infllm_gives_distant_tokens_one_distance(True)),
        (Speculation, "speculated_query", lambda real: lambda self, q, r: q[0, :, 0].float(),
         lambda: test_infinigen_speculates_from_the_layer_before()),
    ],
    ids=["streaming", "snapkv-keys", "snapkv-scale", "quest-order", "quest-growth", "infllm-order",
         "infllm-positions", "infinigen-layer"],
)  # fmt: skip
def test_the_references_notice(
    where: Any, name: str, broken: Any, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong method must fail its own test."""
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check()
