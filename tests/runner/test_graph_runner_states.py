"""Rows of models whose other layers keep states, in emulated graphs: every row is as it would be alone."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from retrieval_attn.attention.state import StateLayer
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.runner.graph.states import StepStates
from retrieval_attn.runner.graph_runner import GraphRunner
from retrieval_attn.runner.rows import step as eager_step
from tests.emulation import runtime as emulate
from tests.engine.audit import check_engine
from tests.engine.test_engine import CONFIG, alone, ids, llm_of, same
from tests.model.test_hybrid import CONFIGS, new_model
from tests.runner.graph_cases import graph_step
from tests.runner.test_graph_runner import GraphFailure, Rows

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")


def moved_by_states(name: str, **changes: Any) -> Any:
    """A new model with weights so large that its states move the logits."""
    return new_model(name, initializer_range=0.2, **changes)


def rows_of(name: str, lengths: list[int], **options: Any) -> Rows:
    rows = Rows(moved_by_states(name), lengths, **options)
    for pair in rows.pairs:
        pair.tolerance = 1e-4  # as with weights so large
    return rows


def break_states(rows: Rows, how: str) -> None:
    """Rows that have made a step go on with others' states, or with those from before it."""
    states = rows.runner._pool.buffers.states  # type: ignore[union-attr]
    for current, kept in zip(states.current, states.kept[0], strict=True):
        for key, state in current.items():
            state.copy_(kept[key] if how == "of the step before" else state.roll(1, dims=0))


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_join_leave_and_fork(name: str) -> None:
    """Thirty steps with random members, across spills and sizes of graphs; forks of rows that are in one."""
    rows = rows_of(name, [40, 150, 300])
    for _ in rows.come_and_go(random.Random(name), 30, {4: 1, 12: 0, 20: 3}, crop=0):
        pass
    assert (rows.runner.replays, rows.runner.reason) == (30, "") and rows.runner.captures <= 3
    rows.check_books()


def test_a_smaller_graph_takes_over_what_stays() -> None:
    """The row's states move to a place of the smaller one."""
    rows = rows_of("qwen3_next", [40, 60, 80, 100, 120])
    rows.steps(rows.pairs, 2)
    rows.steps(rows.pairs[-1:], 36)
    assert set(rows.runner._pool.graphs) == {1, 8}  # type: ignore[union-attr]
    rows.steps(rows.pairs, 2)
    assert rows.runner.captures == 2
    rows.check_books()


@pytest.mark.parametrize("cause", ["exchange", "interrupt"])
def test_a_replay_that_does_not_count_leaves_no_trace(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has advanced the states by then."""
    rows = rows_of("qwen3_next", [100, 200])
    rows.steps(rows.pairs, 2)
    before = [pair.row.get_seq_length() for pair in rows.pairs]
    with monkeypatch.context() as patch:
        if cause == "exchange":
            patch.setattr(GraphFailure.of(rows.runner), "failure", lambda *given: "no answer came")
            rows.steps(rows.pairs, 1)  # made again, eagerly
        else:
            wait = emulate.EmulatedRuntime.synchronize

            def interrupted(runtime: Any) -> None:
                patch.setattr(emulate.EmulatedRuntime, "synchronize", wait)
                raise KeyboardInterrupt

            patch.setattr(emulate.EmulatedRuntime, "synchronize", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rows.logits(rows.pairs)
            assert [pair.row.get_seq_length() for pair in rows.pairs] == before
    rows.steps(rows.pairs, 9)
    assert rows.runner.reason == "" and rows.runner.captures == 1


@torch.no_grad()
def test_eager_steps_between_replays() -> None:
    """Of a row that somebody else steps meanwhile, in the place that it has in the graphs."""
    rows = rows_of("lfm2", [100, 60])
    rows.steps(rows.pairs, 2)
    one = rows.pairs[0]
    one.expect(eager_step(rows.model, [one.row], [one.token], [one.row.get_seq_length()])[0])
    rows.steps(rows.pairs, 3)
    rows.check_books()


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "nemotron_h"])
def test_the_others_change_no_bit(name: str) -> None:
    """In a bucket of four, whoever has the other rows, or had them before."""
    model = moved_by_states(name)
    rows = Rows(model, [90, 200, 300, 40, 70])
    one, *others = [pair.row for pair in rows.pairs]
    seen: list[list[torch.Tensor]] = []
    for company in (others[:3], others[1:], others[:2], others[2:]):
        runner, row, found = GraphRunner(model, 4), one.fork(), []
        graph_step(runner, [other.fork() for other in others], [5] * 4, [other.get_seq_length() for other in others])
        present = [company[0].fork(), row, *(other.fork() for other in company[1:])]
        for token in range(10):
            places = [cache.get_seq_length() for cache in present]
            found.append(graph_step(runner, present, [token + 9] * len(present), places)[1].clone())
        assert set(runner._pool.graphs) == {4}  # type: ignore[union-attr]
        seen.append(found)
    for found in seen[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(found, seen[0], strict=True))


def test_states_of_who_left_are_their_own() -> None:
    """They do not lie in the group's buffers, and go with their cache; one copy beside the states is all there is."""
    rows = rows_of("lfm2", [60, 80])
    rows.steps(rows.pairs, 2)
    layer: Any = next(layer for layer in rows.pairs[1].row.layers if isinstance(layer, StateLayer))
    inside = next(state for _, state in layer.states())
    rows.steps(rows.pairs[:1], 1)
    outside = next(state for _, state in layer.states())
    group: Any = rows.runner._pool
    buffer = next(iter(group.buffers.states.current[0].values()))
    memory = buffer.untyped_storage().data_ptr()
    assert inside.untyped_storage().data_ptr() == memory != outside.untyped_storage().data_ptr()
    own = sum(one.nbytes for one in rows.pairs[0].row.layers if isinstance(one, StateLayer))
    assert group.graphs[2].decoder.states.nbytes == 2 * 2 * own
    gone = weakref.ref(outside)
    del rows.pairs[1], layer, outside, inside
    gc.collect()
    assert gone() is None
    rows.check_books()


@pytest.mark.parametrize("broken", ["of another place", "of the step before", "not undone"])
def test_the_comparison_has_teeth(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that goes on with another's states, its earlier ones, or those after a trial, has other logits."""
    rows = rows_of("qwen3_next", [100, 200])
    if broken == "not undone":
        monkeypatch.setattr(StepStates, "undo", lambda memory, keep=0: memory._launched.fill_(memory.confirmed))
    else:
        rows.steps(rows.pairs, 1)
        break_states(rows, broken)
    with pytest.raises(AssertionError):
        rows.steps(rows.pairs, 1)


def test_an_engine_decodes_by_graphs() -> None:
    """Every answer is the one that its request gets alone, after a warm-up too."""
    llm = llm_of(CONFIG)
    llm.model = moved_by_states("qwen3_next")
    document = ids(300, 1)
    requests = [Request((document, ids(5 + number, number)), 4 + 3 * number) for number in range(4)]
    requests += [Request((ids(20 * number, number),), 12) for number in range(1, 4)]
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        engine.warm_up(rows=4, tokens=400)
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
        runner = engine._stepper._runner
        assert runner.reason == "" and runner.replays > 10
    for request, one in zip(requests, found, strict=True):
        assert one.error is None and same(one, alone(llm, request)), request
