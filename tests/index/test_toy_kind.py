"""A kind of index in one file: the class below is all there is of it, and everything that indexes do works with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import retrieval_attn as ra
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError, ConfigError
from retrieval_attn.index import Format, IndexSpec, KeyIndex, register
from retrieval_attn.index.base import StateValue, Training
from retrieval_attn.index.formats import from_float32, to_float32
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.task.scans import called_search, candidate_search, compile_candidate_search
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest
from tests.index.building import built


@dataclass(frozen=True)
class LastOptions:
    """skip: how many of the newest keys are passed over."""

    skip: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.skip, bool) or not isinstance(self.skip, int) or self.skip < 0:
            raise ConfigError(f"skip={self.skip!r} must be a whole number >= 0")


@register(compile_tasks=lambda options, fmt: compile_candidate_search(fmt))
class LastKeys(KeyIndex):
    """The last k keys, whatever the query."""

    kind: ClassVar[str] = "test-last"
    Options = LastOptions

    def __init__(self, keys: StoredKeys, options: LastOptions) -> None:
        self._keys, self._options = keys, options

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: LastOptions, training: Training) -> LastKeys:
        return cls(StoredKeys(keys, fmt), options)

    def _last(self, k: int, visible: int) -> npt.NDArray[np.int32]:
        stop = visible - self._options.skip if visible >= self._options.skip + k else visible
        return np.arange(max(0, stop - k), stop, dtype=np.int32)

    def task(self, request: SearchRequest) -> CompiledSearch:
        last = self._last(request.k, request.visible)
        ids = np.ascontiguousarray(np.broadcast_to(last, (request.queries, len(last))))
        return candidate_search(request, ids, len(last))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        self._keys.add(keys)

    def state(self) -> dict[str, StateValue]:
        return {"skip": self._options.skip}

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> LastKeys:
        return cls(StoredKeys(keys, fmt), LastOptions(int(str(state["skip"]))))


@register()
class LastKeysEager(LastKeys):
    """Searched by Python, as a first version of a kind would be."""

    kind: ClassVar[str] = "test-last-eager"

    def task(self, request: SearchRequest) -> CompiledSearch:
        return called_search(request, self._keys.head_dim, request.k, lambda *given: self._found(request.k, *given))

    def _found(
        self, k: int, queries: npt.NDArray[np.float32], limit: int, threads: int
    ) -> tuple[npt.NDArray[np.int32], int]:
        last = self._last(k, limit)
        return np.broadcast_to(last, (len(queries), len(last))), last.size


SMALL = ra.Config(sink=4, window=16, retrieve=12, index="test-last", tail=False)


def test_it_answers_a_context_as_a_longer_window_does(loaded: tuple[Any, Any]) -> None:
    """The last 12 keys before a window of 16 are the last 4 before one of 24: the same tokens, through all of it."""
    from retrieval_attn_eval.text.prose import prose

    text, answers = prose(3_000, seed=3), []
    configs = [SMALL, SMALL.replace(index="test-last-eager"), SMALL.replace(window=24, retrieve=4)]
    for config in (*configs, SMALL.replace(index_options={"skip": 200})):
        context = ra.Context(*loaded, config).read(text, progress=False)
        assert set(context.cache.index_kinds()) == {config.index}
        answer = context.ask("What is this text about?", max_new_tokens=7, question_attention="exact")
        answers.append(answer.tokens)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("batch", [1, 2])
def test_it_decodes_in_graphs(batch: int) -> None:
    """The emulated capture gives the eager logits, and a longer window's; a kind without a compiled search says so."""
    from retrieval_attn.errors import CaptureError
    from tests.runner.graph_cases import Decoded, enabled

    model = enabled("llama")
    try:
        eager = Decoded(model, False, config=SMALL, batch=batch, prompt=200, new=7)
        captured = Decoded(model, True, config=SMALL, batch=batch, prompt=200, new=7)
        assert captured.decoder.captures == 1 and captured.difference(eager) <= 2e-5
        wider = Decoded(model, False, config=SMALL.replace(window=24, retrieve=4), batch=batch, prompt=200, new=7)
        assert wider.difference(eager) <= 2e-5
        slow = SMALL.replace(index="test-last-eager")
        assert Decoded(model, False, config=slow, batch=batch, prompt=200, new=7).difference(eager) <= 2e-5
        other = Decoded(model, False, config=SMALL.replace(index_options={"skip": 100}), prompt=200, new=1)
        assert float((other.logits[1][0] - eager.logits[1][0]).abs().max()) > 1e-4
        with pytest.raises(CaptureError, match="no compiled search"):
            Decoded(model, True, config=slow, prompt=200, new=1)
    finally:
        ra.disable(model)


def test_it_saves_loads_and_refuses_options() -> None:
    keys = np.random.default_rng(0).standard_normal((90, 16), dtype=np.float32)
    spec = IndexSpec.of("test-last", {"skip": 7})
    assert spec == IndexSpec.of("test-last", {"skip": 7}) and not spec.trains and not spec.list_length(10**6)
    index = spec.build(keys, Format.FLOAT32)
    found = spec.cls.from_state(keys, Format.FLOAT32, index.state()).search(keys[:2], 5)
    assert sorted(found.ids[0].tolist()) == [78, 79, 80, 81, 82]
    np.testing.assert_array_equal(found.scores, index.search(keys[:2], 5).scores)
    with pytest.raises(ConfigError, match="no option last; its options: skip"):
        IndexSpec.of("test-last", {"last": 1})
    with pytest.raises(ConfigError, match="skip=-1"):
        IndexSpec.of("test-last", {"skip": -1})


def test_it_is_in_the_benchmark(tmp_path: Path) -> None:
    """By its name, beside the others, without a line there."""
    from retrieval_attn_eval.bench.heads import Source
    from retrieval_attn_eval.bench.index import measure
    from retrieval_attn_eval.bench.variants import choose

    variants, notes = choose("flat,test-last")
    source = Source("synthetic:mid", 30, 32, 0, tmp_path)
    points = measure(source, 800, variants, 1, 20, tokens=1, threads=1, progress=False)
    flat, last = (float(np.mean(point.recall)) for point in points)
    assert not notes and flat == 1.0 and last < 0.9


def test_its_scores_are_exact() -> None:
    """In any storage format, over keys that came in pieces."""
    rng = np.random.default_rng(1)
    for fmt in (Format.FLOAT32, Format.INT8):
        keys = from_float32(rng.standard_normal((60, 16), dtype=np.float32), fmt)
        index = built(LastKeys, keys[:40], fmt)
        index.insert(keys[40:].copy())
        queries = rng.standard_normal((3, 16), dtype=np.float32)
        found = index.search(queries, 8, limit=50)
        exact = np.einsum("qd,qkd->qk", queries, to_float32(keys, fmt)[found.ids])
        np.testing.assert_allclose(found.scores, exact, rtol=1e-4, atol=1e-4)
        assert set(found.ids.ravel().tolist()) == set(range(42, 50))


def test_an_error_in_python_is_raised_where_it_is_searched() -> None:
    """By the index's own search, and by a step, which says where it was."""

    class Broken(LastKeysEager):
        def _found(self, k: int, *given: Any) -> Any:
            raise RuntimeError("nothing to find")

    keys = np.random.default_rng(0).standard_normal((2, 90, 16), dtype=np.float32)
    heads = [Broken(StoredKeys(head, Format.FLOAT32), LastOptions()) for head in keys]
    with pytest.raises(RuntimeError, match="nothing to find"):
        heads[0].search(keys[0, :2], 5)
    path = SequenceKV(2, 16, 16, Format.FLOAT32)
    path.append(keys, keys)
    path.segments[0].take_index(0, tuple(heads))
    with pytest.raises(BackendError, match="key-value head .: the search of its index raised") as raised:
        attend_path(path, keys[:, :1], 0, 90, 5, scale=1.0)
    assert isinstance(raised.value.__cause__, RuntimeError)
