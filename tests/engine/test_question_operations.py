"""Torch operations of questions on a cached text: a launch costs more than the few tokens that it moves."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import retrieval_attn as ra
from retrieval_attn.engine.batched_prefill import BatchedPrefill
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.offload import work as host_work
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.test_saved_contexts import NEVER
from tests.tiny_models import build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled")

LAYERS, ROWS = 6, 7
TEXT = tuple(random_ids(1, 2000, 1)[0].tolist())


class Operations(TorchDispatchMode):
    """Counts the operations that the package calls, views included, not those of transformers' modules."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "torch":
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("retrieval_attn."):
            self._counts[f"{frame.f_code.co_filename}:{frame.f_lineno} {func}"] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the operations of the threads that read prompts and that run the engine."""
    counts: Counter[str] = Counter()

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            with Operations(counts):
                return real(*given, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(BatchedPrefill, "_run", watched(BatchedPrefill._run))
        patch.setattr(Engine, "_do", watched(Engine._do))
        yield counts


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Return an engine that has read TEXT. Its copies to the host run in threads, as they do with a GPU."""
    monkeypatch.setattr(host_work, "overlaps", lambda device: True)

    class Loaded:
        model = ra.enable(build_model("llama", num_hidden_layers=LAYERS))
        tokenizer = number_tokenizer(97)
        config = ra.Config(index="device", sink=16, window=64, retrieve=20)

    with Engine(Loaded()) as found:
        found._prefills.made_ready()
        ask(found, 1, 0)
        ask(found, ROWS, 1)
        yield found


def ask(engine: Engine, rows: int, seed: int) -> list[tuple[int, ...]]:
    """First tokens of `rows` questions of different lengths, submitted at once."""
    questions = [tuple(random_ids(1, 10 + row % 3, 100 * seed + row)[0].tolist()) for row in range(rows)]
    with engine._changed:
        handles = [engine.submit(Request((TEXT, one), 1, stop_ids=NEVER)) for one in questions]
    found = [handle.result() for handle in handles]
    assert all(one.error is None for one in found)
    return [one.tokens for one in found]


def per_layer(counts: Counter[str]) -> float:
    return counts.total() / LAYERS


@pytest.mark.parametrize(("rows", "most"), [(1, 50), (ROWS, 14 * ROWS)], ids=["one question", "seven questions"])
def test_a_question_costs_few_operations(
    engine: Engine, rows: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per layer: a fork shares windows, a row is a view, and the windows of all rows slide by one gather."""
    with counted(monkeypatch) as counts:
        ask(engine, rows, 2)
    found = per_layer(counts)
    assert found <= most, "\n".join(f"{count / LAYERS:6.1f} {site}" for site, count in counts.most_common(40))


def test_further_questions_add_few_operations(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven questions on one text, read by one forward, each adds at most twelve operations of a layer to one's."""
    found = {}
    for rows in (1, ROWS):
        with counted(monkeypatch) as counts:
            ask(engine, rows, 3)
        found[rows] = per_layer(counts)
    assert (found[ROWS] - found[1]) / (ROWS - 1) <= 12
