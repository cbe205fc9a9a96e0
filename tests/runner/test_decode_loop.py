"""The token loop: the same tokens eagerly, by a graph, and where the device runs a step ahead; its ends and errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.config import GraphMode
from retrieval_attn.errors import BackendError
from retrieval_attn.runner.decode import PromptState, TokenChoice, forward, run
from retrieval_attn.runner.generate import ProcessedTokens
from retrieval_attn.runner.graph.pool import GraphPool
from tests.runner.graph_cases import CONFIG, PROMPT, ROARGRAPH, enabled, greedily
from tests.tiny_models import random_ids

pytestmark = pytest.mark.usefixtures("emulated_graphs", "small_graphs")


def read(model: Any, cache: Any, ids: Tensor, new: int) -> tuple[PromptState, StoppingCriteriaList]:
    """Read ids (batch, tokens) without padding: what `run` continues, and what ends it after `new` tokens."""
    batch, count = ids.shape
    place = torch.arange(count)[None].expand(batch, -1)
    with torch.no_grad():
        logits = forward(model, cache, ids, mask=None, position_ids=place)
    return PromptState(ids, logits, place[:, -1]), StoppingCriteriaList([MaxLengthCriteria(count + new)])


def generated(model: Any, graph: GraphMode, **options: Any) -> Any:
    """The whole token loop: ids, and what chose them with its scores."""
    cache = ra.RetrievalCache(model, CONFIG)
    prompt, criteria = read(model, cache, random_ids(2, PROMPT), 12)
    tokens: list[list[int]] = []
    choose = ProcessedTokens(do_sample=True, keep_scores=True, keep_logits=True, **options)
    result = run(model, cache, prompt, TokenChoice(criteria, choose), on_token=tokens.append, graph=graph)
    assert torch.tensor(tokens).T.tolist() == result.sequences[:, PROMPT:].tolist()
    return result.sequences, choose


def test_the_token_loop_is_the_same() -> None:
    """Sampling with a seed, a processor that writes to the scores it is given, kept scores and logits."""

    def flatten(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.div_(2.0)

    model = enabled("llama")
    for processors in (LogitsProcessorList(), LogitsProcessorList([flatten])):
        pairs = []
        for graph in (False, True):
            torch.manual_seed(3)
            pairs.append(generated(model, graph, processors=processors))
        (eager_ids, eager), (graphed_ids, graphed) = pairs
        assert torch.equal(eager_ids, graphed_ids)
        for name in ("scores", "logits"):
            mine, others = torch.stack(getattr(graphed, name)), torch.stack(getattr(eager, name))
            assert (mine - others).abs().max() <= 1e-5


@pytest.mark.parametrize("new", [1, 2, 3, 7, 24])
def test_the_lookahead_chooses_as_the_loop_does(new: int) -> None:
    """Lengths and ends of text, one row and several; a row that ends before the others gets padding."""
    model = enabled("llama")
    for batch in (1, 3):
        ids = random_ids(batch, 90)
        plain = texts(model, ids, new, graph=False)
        assert texts(model, ids, new, graph=True) == plain
        for row in range(batch):
            end = plain[0][row][new // 2]  # the token that this row ends with now
            shorter = texts(model, ids, new, graph=False, end=end)
            assert texts(model, ids, new, graph=True, end=end) == shorter
            assert len(shorter[1]) < new or new < 3 or batch > 1


def texts(model: Any, ids: torch.Tensor, new: int, graph: Any, end: int | None = None) -> tuple[Any, ...]:
    """New ids of every row, what `on_token` was told, and the cache's length."""
    cache = ra.RetrievalCache(model, CONFIG)
    count = ids.shape[1]
    prompt, criteria = read(model, cache, ids, new)
    if end is not None:
        criteria.append(EosTokenCriteria(end))
    told: list[list[int]] = []
    done = run(model, cache, prompt, TokenChoice(criteria, pad_id=7), on_token=told.append, graph=graph)
    assert done.new_tokens == len(told) == done.sequences.shape[1] - count
    return done.sequences[:, count:].tolist(), told, cache.get_seq_length()


@pytest.mark.parametrize("samples", [False, True], ids=["lookahead", "loop"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_loop_that_is_cancelled_ends_at_once(graph: GraphMode, samples: bool) -> None:
    """The token at hand is the last, the cache holds one column less than the ids; what continues it is the same."""
    model = enabled("llama")
    cancelled = threading.Event()
    results = []
    for stop in (None, 5):
        cache = ra.RetrievalCache(model, CONFIG)
        prompt, criteria = read(model, cache, random_ids(2, PROMPT), 12)
        seen: list[list[int]] = []

        def on_token(token: list[int], seen: list[list[int]] = seen, stop: int | None = stop) -> None:
            seen.append(token)
            if len(seen) == stop:
                cancelled.set()

        torch.manual_seed(3)
        drawn = ProcessedTokens(LogitsProcessorList(), do_sample=True)
        choice = TokenChoice(criteria, drawn if samples else None)
        done = run(model, cache, prompt, choice, on_token=on_token, cancelled=cancelled, graph=graph)
        assert done.new_tokens == len(seen) == done.sequences.shape[1] - PROMPT == (stop or 12)
        assert cache.get_seq_length() == PROMPT + len(seen) - 1
        assert all(layer.graph is None for layer in cache.layers)  # type: ignore[union-attr]
        assert done.how == ("eager" if graph is False else "graph")
        results.append(done.sequences)
    whole, ids = results
    place = torch.full((2,), PROMPT + 4)
    with torch.no_grad():
        logits = forward(model, cache, ids[:, -1:], mask=None, position_ids=place[:, None])
    rest = run(model, cache, PromptState(ids, logits, place), choice, graph=graph)
    assert torch.equal(rest.sequences, whole)


def test_an_error_ahead_comes_after_the_token_before() -> None:
    """A search that fails in a step that went ahead: the token before is told and stays, the error names the layer."""
    model = enabled("llama")
    told: list[list[int]] = []
    results = []
    for broken in (False, True):
        cache = ra.RetrievalCache(model, CONFIG.replace(**ROARGRAPH))
        ids = random_ids(1, 200)
        prompt, criteria = read(model, cache, ids, 8)
        layer: Any = cache.layers[1]
        layer.finish_index()
        found = layer.hosts[0].segments[0].indexes[1].search_arguments().graph
        told.clear()

        def on_token(token: list[int], broken: bool = broken, found: Any = found) -> None:
            told.append(token)
            if broken and len(told) == 4:
                found.ids[:] = -5

        if broken:
            with pytest.raises(BackendError, match="layer 1, sequence 0, key-value head 1"):
                run(model, cache, prompt, TokenChoice(criteria), on_token=on_token, graph=True)
        else:
            run(model, cache, prompt, TokenChoice(criteria), on_token=on_token, graph=True)
        results.append((list(told), cache.get_seq_length()))
    (right, full), (until, length) = results
    assert len(right) == 8 and full == 207
    assert until == right[: len(until)] and 4 <= len(until) < 8 and length == 200 + len(until) - 1


def test_an_interrupt_in_a_replay_loses_only_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt where the CPU waits: the loop ends, the cache holds what was confirmed, the next run works."""
    model = enabled("llama")
    cache = ra.RetrievalCache(model, CONFIG)
    ids = random_ids(1, PROMPT)
    prompt, criteria = read(model, cache, ids, 12)
    count = [0]
    confirm = GraphPool.confirm

    def interrupted(pool: GraphPool) -> float:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return confirm(pool)

    monkeypatch.setattr(GraphPool, "confirm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, cache, prompt, TokenChoice(criteria), graph=True)
    assert cache.get_seq_length() == PROMPT + 3
    assert all(layer.graph is None for layer in cache.layers)  # type: ignore[union-attr]
    monkeypatch.undo()
    cache.crop(-3)
    assert torch.equal(
        run(model, cache, prompt, TokenChoice(criteria), graph=True).sequences, greedily(model, ids, False)
    )
