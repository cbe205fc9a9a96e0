"""Training queries: sampled while a layer reads, moved to where decoding happens, handed to the index."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import indexed_from
from retrieval_attn.index import RoarGraphIndex
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.model.rope import length_rope
from retrieval_attn.model.rotation import Rotation, RotationTables
from retrieval_attn.offload import work as host_work
from retrieval_attn.offload.queries import SPAN, TrainingQueries
from retrieval_attn.runner.prefill import finish_prefill
from tests.tiny_models import QUESTION, build_model, needle_text, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("small_graphs")

TOTAL = 200
GRAPH = {"beam": 64}


def _rotated(model: Any, attention: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """query (1, heads, n, head_dim) before RoPE, turned by the model's own tables at positions (n,)."""
    import sys

    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    cos, sin = model.model.rotary_emb(query, positions[None])
    turned: torch.Tensor = apply(query, query, cos, sin)[0]
    return turned


@pytest.mark.parametrize("name", ["llama", "llama31", "qwen3", "phi3", "gpt_oss"])
def test_queries_stand_where_decoding_happens(name: str) -> None:
    """The same token asked at every position must come out as it would after the context; fails without the move."""
    model = tiny_model(name)
    length_rope(model)  # the rotary embedding counts the text below, as a read does; else the last test's text counts
    attention = model.model.layers[0].self_attn
    plain = torch.randn(1, 6, 1, attention.head_dim).expand(-1, -1, TOTAL, -1)
    asked = _rotated(model, attention, plain, torch.arange(TOTAL))
    sample = TrainingQueries(TOTAL, 40)
    for start in range(0, TOTAL, 70):
        sample.take(asked[:, :, start : start + 70], start)
    moved = sample.on_device(model, attention, 0, None)
    assert moved.shape == (6, 40, attention.head_dim) and moved.dtype == torch.float32
    after = _rotated(model, attention, plain[:, :, :1].expand(-1, -1, SPAN, -1), torch.arange(TOTAL, TOTAL + SPAN))[0]
    gaps = torch.cdist(moved, after).amin(-1)
    assert gaps.max() < 2e-2 * float(plain.norm(dim=-1).max())
    left = torch.cdist(asked[0], after).amin(-1)
    assert left.max() > 10 * gaps.max(), "queries at their own positions are no better: the test has no teeth"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_of_a_pass_share_the_tables_that_turn_their_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of their kind: once for each sample; with the bits of tables made anew, and others for another pass."""
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name == "gemma3" else {}
    model, made = build_model(name, num_hidden_layers=4, **types), list[int]()
    usual = Rotation.turn

    def turn(self: Rotation, positions: torch.Tensor, *args: Any) -> RotationTables:
        made.append(len(positions))
        return usual(self, positions, *args)

    monkeypatch.setattr(Rotation, "turn", turn)
    layers = [layer.self_attn for layer in model.model.layers]
    kinds = {Rotation.of(model, layer).kind for layer in layers}
    assert len(kinds) == (2 if name == "gemma3" else 1) < len(layers)
    real = torch.ones(301, dtype=torch.bool)
    for total in (300, 301):
        made.clear()
        found = []
        query = torch.randn(1, 4, total, layers[0].head_dim)
        for layer in layers:
            for count in (40, 60):
                sample = TrainingQueries(total, count)
                sample.take(query, 0)
                found.append((sample, layer, sample.on_device(model, layer, 0, None)))
        assert sorted(made) == [40] * len(kinds) + [60] * len(kinds)
        for sample, layer, moved in found:  # of a row with padding, tables are its own
            assert torch.equal(moved, sample.on_device(model, layer, 0, real[:total]))
        assert len(made) == 2 * len(kinds) + len(found)


@pytest.mark.parametrize("beside", [False, True], ids=["on the spot", "in threads"])
def test_a_pass_leaves_no_tables_behind(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once for all layers, and gone when the indexes are built: texts of other lengths have no use for them."""
    model, made = build_model("llama", num_hidden_layers=4), list[weakref.ref[RotationTables]]()
    usual = Rotation.turn

    def turn(self: Rotation, *args: Any) -> RotationTables:
        new = usual(self, *args)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(Rotation, "turn", turn)
    monkeypatch.setattr(host_work, "overlaps", lambda device: beside)
    config = ra.Config(sink=4, window=16, index="sketch")
    ra.enable(model, config)
    for number, total in enumerate((300, 400, 500)):
        cache = ra.RetrievalCache(model, config)
        with torch.no_grad():
            model(input_ids=random_ids(1, total), past_key_values=cache)
        finish_prefill(cache)
        gc.collect()
        assert len(made) == 2 * (number + 1) and not any(one() for one in made)


def test_sample_leaves_padding_out_and_is_the_same_in_any_chunks() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    query = torch.randn(2, 6, TOTAL, attention.head_dim)
    whole, parts = TrainingQueries(TOTAL, 60), TrainingQueries(TOTAL, 60)
    whole.take(query, 0)
    for start in range(0, TOTAL, 33):
        parts.take(query[:, :, start : start + 33], start)
    valid = torch.ones(TOTAL, dtype=torch.bool)
    assert torch.equal(whole.on_device(model, attention, 1, None), parts.on_device(model, attention, 1, None))
    valid[:150] = False
    kept = whole.on_device(model, attention, 1, valid)
    assert 0 < kept.shape[1] < 60
    assert whole.on_device(model, attention, 1, torch.zeros_like(valid)).shape[1] == 0


@pytest.mark.parametrize(
    ("kind", "tokens", "count"),
    [
        ("roargraph", 4_096, 2048),
        ("roargraph", 65_536, 4096),
        ("roargraph", 131_072, 8192),
        ("roargraph", 1_048_576, 8192),
        ("sketch", 131_072, 2048),
        ("auto", 131_072, 2048),
        ("flat", 131_072, 0),
    ],
)
def test_graphs_train_on_more_queries_of_longer_contexts(kind: str, tokens: int, count: int) -> None:
    assert IndexSpec.of(kind).training_queries(tokens) == count


def test_a_layer_samples_what_its_index_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tokens of which a graph gets one in 16, once 2,048 of them is no longer the least."""
    monkeypatch.setattr("retrieval_attn.index.base.TRAIN_QUERIES", 100)
    model = tiny_model("llama")
    trained: list[int] = []
    make = RoarGraphIndex.build.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, keys: Any, fmt: Any, options: Any, training: Any) -> RoarGraphIndex:
        trained.append(training.queries.shape[1])
        return make(cls, keys, fmt, options, training)

    monkeypatch.setattr(RoarGraphIndex, "build", classmethod(noted))
    config = ra.Config(sink=8, window=64, retrieve=5, index="roargraph", index_options=GRAPH)
    with torch.no_grad():
        ra.enable(model, config)
        model(random_ids(1, 4_000), past_key_values=ra.RetrievalCache(model, config))
    ra.disable(model)
    assert trained and set(trained) == {250}


def test_a_context_answers_through_a_graph(loaded: tuple[Any, Any]) -> None:
    """A needle 1,200 tokens back, found by a graph that scores a part of the keys, the question retrieving as well."""
    config = ra.Config(sink=8, window=64, retrieve=50, index="roargraph", index_options=GRAPH)
    context = ra.Context(*loaded, config).read(needle_text(16_000), progress=False)
    answer = context.ask(QUESTION, max_new_tokens=24, question_attention="retrieval")
    assert "7391846" in answer.text
    assert answer.stats.indexes == {"roargraph": 10}
    asked = len(loaded[1](QUESTION)["input_ids"]) + answer.stats.new_tokens - 1
    assert answer.stats.keys_scanned < 0.5 * asked * context.num_tokens * 5 * 8


def test_a_short_turn_extends_the_index_and_a_long_one_builds_it_anew() -> None:
    """Fails if every turn rebuilds (the dear way), or if a context that begins short never gets a trained index."""
    model = tiny_model("llama")
    config = ra.Config(sink=4, window=16, index="roargraph", index_options=GRAPH)
    cache = ra.RetrievalCache(model, config)
    with torch.no_grad():
        ra.enable(model, config)
        built = []
        for tokens in (200, 60, 900):
            ids = random_ids(1, tokens)
            model(ids, past_key_values=cache)
            layer = cache.layers[0]
            assert isinstance(layer, RetrievalLayer)
            index = layer.hosts[0].segments[0]._index
            assert index is not None
            built.append(index.heads[0])
            assert indexed_from(layer.hosts[0], 0) == layer.columns - config.window - config.sink
    ra.disable(model)
    assert built[0] is built[1], "60 tokens after 180 are inserted"
    assert built[1] is not built[2], "900 tokens after 240 are built anew"
