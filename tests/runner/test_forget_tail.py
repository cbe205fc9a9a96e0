"""What is forgotten is neither retrieved nor estimated: every kind of index, eager and captured, as defined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import retrieval_attn as ra
from retrieval_attn.cpu.clusters import mean_values
from retrieval_attn.cpu.store import cluster_table
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.runner.forget import forget_tokens
from tests.attention.tail_reference import Watch, watched
from tests.attention.test_tail import CLIPPED, EXACT, ROUNDED, Session, config_of, model_of, tolerance
from tests.runner.graph_cases import CONFIG, DEVICE, ROARGRAPH, Decoded, enabled
from tests.tiny_models import QUESTION, Loaded, needle_text

pytestmark = pytest.mark.usefixtures("one_thread", "small_graphs")
KINDS = ("flat", "sketch", "device")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with watched(monkeypatch) as found:
        yield found


@pytest.mark.parametrize(
    "index,group,dim", [("flat", 1, 64), ("sketch", 4, 128), ("device", 1, 64), ("device", 4, 128)]
)
def test_tokens_attend_to_what_is_left_as_defined(index: str, group: int, dim: int, watch: Watch) -> None:
    """Its best keys, the estimate of the others by clusters of them alone; over spills, turns, forks and crops."""
    session = Session(model_of("llama", group, dim), config_of(index))
    whole = session.fork()
    forget_tokens(session.cache, session.model, 3, 150)
    session.feed(1, 18)
    watch.check(tolerance(index))
    assert (watch.named > 0) == (index == "device") and watch.late
    forget_tokens(session.cache, session.model, 3, 171)
    session.feed(1, 2)
    fork = session.fork()
    for one in (session, fork):
        one.feed(40)
        one.feed(1, 3)
        one.cache.crop(-47)
        one.feed(1, 12)
    watch.check(CLIPPED if index == "device" else EXACT)
    whole.feed(1, 3)
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
@pytest.mark.parametrize("family,changes", [("gemma2", {}), ("gpt_oss", {}), ("llama", {"host_dtype": "int8"})])
def test_families_and_formats(family: str, changes: dict[str, Any], index: str, watch: Watch) -> None:
    """Soft-capped scores beside sliding layers, learned sinks, int8 rows."""
    session = Session(model_of(family), config_of(index, **changes))
    forget_tokens(session.cache, session.model, 4, 150)
    session.feed(1, 10)
    watch.check(max(tolerance(index), ROUNDED if "host_dtype" in changes else 0))


@pytest.mark.parametrize("index", KINDS)
def test_samples_and_mean_values_are_of_keys_that_are_left(index: str) -> None:
    session = Session(model_of("llama"), config_of(index))
    fork = session.fork()
    path: Any = fork.cache.batch.hosts(1)[0]
    before = path.clusters.shared
    forget_tokens(session.cache, session.model, 3, 150)
    mine: Any = session.cache.batch.hosts(1)[0]
    layer: Any = session.cache.layers[1]
    assert path.clusters.shared is before and mine.clusters.shared is not before
    start, stop = layer.held.ranges[0]
    assert start == 150 and (mine.clusters.start, mine.clusters.stop) == (150, stop)
    keys = to_float32(mine.read(start, stop)[0], mine.fmt)
    shared = mine.clusters.shared
    if shared.samples is not None:
        rounded = to_float32(from_float32(keys, Format.BFLOAT16), Format.BFLOAT16)
        for head, samples in enumerate(shared.samples.to_float32()):
            found = samples.T
            near = np.abs(found[:, None] - rounded[head][None]).max(axis=2).min(axis=1)
            assert ((near == 0) | (found == 0).all(axis=1)).all() and (near == 0).any()
    else:
        table = cluster_table(mine, start, stop)
        assert table is not None
        np.testing.assert_array_equal(shared.mean_values, mean_values(table))
        assert not np.array_equal(shared.mean_values, before.mean_values)


CASES: dict[str, dict[str, Any]] = {
    "flat": {"batch": 2},
    "shared": {"repeats": 3},
    "roargraph": {"config": CONFIG.replace(**ROARGRAPH)},
    "sketch": {"config": CONFIG.replace(index="sketch")},
    "device": {"config": CONFIG.replace(**DEVICE)},
    "device shared": {"config": CONFIG.replace(**DEVICE), "repeats": 2},
    "no tail": {"config": CONFIG.replace(**DEVICE, tail=False)},
}


@pytest.mark.parametrize(
    "name,case",
    [*(("llama31", case) for case in CASES), ("gemma3", "flat"), ("gpt_oss", "flat"), ("gpt_oss", "device")],
)
def test_captured_steps_equal_eager_ones(name: str, case: str, emulated_graphs: None) -> None:
    """Across two spills; and a context that forgets nothing has other logits."""
    model = enabled(name)
    options = {"prompt": 300, "new": 20, **CASES[case]}
    eager = Decoded(model, False, forgotten=(3, 120), **options)
    graphed = Decoded(model, True, forgotten=(3, 120), **options)
    assert graphed.difference(eager) <= 2e-5 and graphed.steps.replays == options["new"]
    whole = Decoded(model, False, **{**options, "new": 1})
    assert (whole.logits[1] - eager.logits[1]).abs().max() > 1e-4


def test_a_bound_context_forgets_between_two_answers(loaded: Loaded, emulated_graphs: None) -> None:
    """Captured steps of the same decoder go on with what is left: the same tokens as without a graph."""
    answers = []
    for graph in (True, False):
        config = ra.Config(sink=8, window=64, retrieve=50, index="flat", graph=graph)
        context = ra.Context(*loaded, config).read(needle_text(3000), progress=False)
        tokens = [context.ask(QUESTION, max_new_tokens=12).tokens]
        for stop in (100, 500):
            context.forget(8, stop)
            tokens.append(context.ask(QUESTION, max_new_tokens=12).tokens)
        answers.append(tokens)
    assert answers[0] == answers[1]
