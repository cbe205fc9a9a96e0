"""Caches that no graph served once, emulated: they are served when what refused them has changed, and not sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.memory.reclaim import register
from retrieval_attn.runner import graph_runner as bucket_refusals
from retrieval_attn.runner.graph.signature import KnownModel
from retrieval_attn.runner.graph_runner import GraphRunner
from tests.runner.graph_cases import graph_step
from tests.runner.test_graph_runner import Rows
from tests.runner.test_rows import Pair, read
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")

RETRY = 6


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_refusals, "RETRY_STEPS", RETRY)


def replayed(rows: Rows, pairs: list[Pair], count: int) -> list[int]:
    """So many steps; of each, how many rows were in a graph."""
    found = []
    for _ in range(count):
        before = rows.runner.replays
        rows.steps(pairs, 1)
        found.append(0 if rows.runner.replays == before else len(rows.runner._pool.rows))  # type: ignore[union-attr]
    return found


def test_a_hook_that_is_removed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While it is there, the model is looked at once in so many steps."""
    rows = Rows(build_model("llama"), [100, 200])
    hook = rows.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert replayed(rows, rows.pairs, 1) == [0]
    looks: list[object] = []
    look = KnownModel.look
    monkeypatch.setattr(KnownModel, "look", lambda known, model: looks.append(known) or look(known, model))  # type: ignore[func-returns-value]
    assert replayed(rows, rows.pairs, RETRY + 2) == [0] * (RETRY + 2)
    assert 0 < len(looks) <= 2 * len(rows.pairs)  # compared, and noted anew
    hook.remove()
    assert 2 in replayed(rows, rows.pairs, RETRY)
    assert replayed(rows, rows.pairs, 3) == [2] * 3
    assert caplog.text.count("has a forward hook") == 1 and rows.runner.reason == "" and not len(rows.runner._refusals)
    rows.check_books()


def test_an_adapter_that_is_switched_off() -> None:
    """Rows that came meanwhile have another model's weights; one that is there stays in its graph."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build_model("llama"), lora).eval()
    rows = Rows(model.get_base_model(), [100])
    assert replayed(rows, rows.pairs, 2) == [1, 1]
    other = Pair(rows.model, read(rows.model, 150, 7))
    caches = [rows.pairs[0].row, other.row]

    def step() -> int:
        graph_step(rows.runner, caches, [5, 5], [cache.get_seq_length() for cache in caches])
        return len(rows.runner._pool.rows)  # type: ignore[union-attr]

    with model.disable_adapter():
        assert [step() for _ in range(2)] == [1, 1]
    assert 2 in [step() for _ in range(RETRY + 2)] and step() == 2
    rows.runner.close()


def test_a_place_that_is_free_again() -> None:
    """More rows than there are places: one that is left out joins when another has left."""
    rows = Rows(build_model("llama"), [100, 200, 150])
    rows.runner = GraphRunner(rows.model, 2)
    assert replayed(rows, rows.pairs, 2) == [2, 2]
    left = rows.pairs[1:]
    found = replayed(rows, left, RETRY + 2)
    assert found[0] == 1 and found[-1] == 2
    rows.check_books()


def test_rows_of_another_shape_that_left() -> None:
    """The group is theirs; whoever comes next has it then."""
    model = build_model("llama")
    rows = Rows(model, [100])
    rows.pairs.append(Pair(model, read(model, 150, 3, retrieve=9)))
    assert replayed(rows, rows.pairs, 2) == [1, 1]
    found = replayed(rows, rows.pairs[1:], RETRY + 2)
    assert found[0] == 0 and found[-1] == 1
    rows.check_books()


def test_who_never_is_served_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """graph=False, and another number of keys than the others have, who stay."""
    model = build_model("llama")
    rows = Rows(model, [100])
    rows.steps(rows.pairs, 1)
    asked: list[Any] = []
    real = GraphRunner._refusal
    monkeypatch.setattr(GraphRunner, "_refusal", lambda runner, cache: asked.append(cache) or real(runner, cache))  # type: ignore[func-returns-value]
    rows.pairs += [Pair(model, read(model, 150, 3, **options)) for options in ({"graph": False}, {"retrieve": 9})]
    assert replayed(rows, rows.pairs, 3 * RETRY) == [1] * (3 * RETRY)
    assert len(asked) == 2
    rows.check_books()


def test_graphs_wait_for_rows_like_theirs() -> None:
    """A batch of rows of another kind uses the same window buffers, and leaves the graphs of the first kind as they
    are: rows of that kind are captured once. Rows with larger windows get buffers of their own.
    """
    model = build_model("llama")
    rows = Rows(model, [100])
    others = [Pair(model, read(model, 150, 3, retrieve=9)), Pair(model, read(model, 150, 4, window=32))]
    first = list(rows.pairs)
    assert replayed(rows, first, 2) == [1, 1]
    pool = rows.runner._pool
    assert pool is not None and rows.runner.captures == 1
    rows.pairs.append(others[0])
    replayed(rows, others[:1], RETRY + 2)
    assert rows.runner._pool is not pool and rows.runner._pool is not None
    assert rows.runner._pool.buffers is pool.buffers
    rows.pairs.append(Pair(model, read(model, 120, 5)))
    assert replayed(rows, rows.pairs[-1:], RETRY + 2)[-1] == 1
    assert rows.runner._pool is pool and rows.runner.captures == 1
    rows.pairs.append(others[1])
    assert replayed(rows, others[1:], RETRY + 2)[-1] == 1
    assert rows.runner._pool.buffers is not pool.buffers and not rows.runner._waiting
    rows.check_books()


@pytest.mark.parametrize("idle", [True, False])
def test_windows_take_the_memory_of_idle_texts(
    idle: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps stay in graphs if prefix cache entries that nobody uses hold the memory of the windows: these are evicted.
    Without such entries the rows are stepped eagerly, and the reason is told.
    """
    tree = RadixCache()
    register(tree)

    class Text:
        sizes = Sizes(device=1 << 30)

    if idle:
        tree.insert(tree.root, [1, 2, 3], Text(), "")
    allocated = bucket_refusals.new_buffers
    tries: list[int] = []

    def allocate(*given: Any) -> Any:
        tries.append(len(tree))
        if len(tree) or not idle:
            raise torch.OutOfMemoryError
        return allocated(*given)

    monkeypatch.setattr(bucket_refusals, "new_buffers", allocate)
    rows = Rows(build_model("llama"), [100, 200])
    assert replayed(rows, rows.pairs, 3) == ([2, 2, 2] if idle else [0, 0, 0])
    assert tries[:2] == ([1, 0] if idle else [0, 0]) and len(tree) == 0
    assert ("has no memory for the windows" in caplog.text) is not idle
