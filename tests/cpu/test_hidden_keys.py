"""A range that begins inside an index: its first keys are never found, and the others as well as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.store import SequenceKV, indexed_from
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.roargraph import index as graph_module
from retrieval_attn.index.sketch import build as sketch_module
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn_eval.bench.synthetic import SyntheticHead, synthetic_head
from tests.cpu.reference import look_at_share

TOKENS, SINKS, TAIL, DIM, GROUP, K = 6000, 4, 300, 64, 2, 20
HIDDEN = {"flat": 1800, "sketch": 1800, "roargraph": 500}
"""A graph with more hidden keys is scanned."""
SCALE = 0.09
EXACT: tuple[str, dict[str, Any]] = ("flat", {"codes": "none"})
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("flat", {"codes": "int8"}),
    ("sketch", {"key_bytes": 16}),
    ("roargraph", {"beam": 48}),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, cpus=()) as made:
        yield made


@pytest.fixture(scope="module")
def heads() -> list[SyntheticHead]:
    return [synthetic_head(TOKENS, head_dim=DIM, group=GROUP, train=512, decode=24, seed=seed) for seed in (0, 1)]


def indexed(pool: Pool, heads: list[SyntheticHead], kind: str, options: dict[str, Any], fmt: Format) -> SequenceKV:
    """An index over all but the sinks and the last tokens; values of tokens that are to be hidden are huge."""
    path = SequenceKV(2, DIM, DIM, fmt, index=IndexSpec.of(kind, options), pool=pool)
    keys = from_float32(np.stack([head.keys for head in heads]), fmt)
    values = np.random.default_rng(5).standard_normal((2, TOKENS, DIM)).astype(np.float32)
    values[:, : SINKS + HIDDEN[kind]] = 1e4
    path.append(keys, from_float32(values, fmt))
    path.build_index(SINKS, TOKENS - TAIL, np.concatenate([head.train_rotated for head in heads]))
    return path


@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.INT8])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda one: one if isinstance(one, str) else "")
def test_hidden_keys_are_not_found_and_the_others_are(
    pool: Pool, heads: list[SyntheticHead], kind: str, options: dict[str, Any], fmt: Format, monkeypatch: Any
) -> None:
    """The share of the best keys' weight that is found, and far fewer scores than a scan; inserts go on."""
    monkeypatch.setattr(sketch_module, "MIN_LEAVES", 32)
    look_at_share(monkeypatch, 0.1)
    monkeypatch.setattr(graph_module, "EXACT_BELOW", 0)
    path, exact = indexed(pool, heads, kind, options, fmt), indexed(pool, heads, *EXACT, fmt)
    queries = np.concatenate([head.decode for head in heads])[:, :24]
    path.tail_tokens = TAIL
    lses = [attend_path(one, queries, SINKS, TOKENS - TAIL, K, scale=SCALE).lse for one in (path, exact)]
    before = float(np.exp(lses[0] - lses[1]).mean())
    assert before > 0.85
    hidden = SINKS + HIDDEN[kind]
    for start in (hidden, hidden + HIDDEN[kind] // 4):
        for stop in (TOKENS - TAIL, TOKENS):
            got = attend_path(path, queries, start, stop, K, scale=SCALE)
            best = attend_path(exact, queries, start, stop, K, scale=SCALE)
            assert np.abs(got.out).max() < 10, "a hidden key was attended to"
            assert np.exp(got.lse - best.lse).mean() > before - 0.04 and (got.lse <= best.lse + 1e-5).all()
            if kind == "flat":
                np.testing.assert_allclose(got.lse, best.lse, atol=1e-5)
                assert got.cost.keys_scanned == best.cost.keys_scanned
            else:
                assert got.cost.keys_scanned < best.cost.keys_scanned
    path.tail_tokens = 0
    attend_path(path, queries, hidden, TOKENS, K, scale=SCALE)
    assert indexed_from(path, 0) == TOKENS - SINKS
    got = attend_path(path, queries, hidden, TOKENS, K, scale=SCALE)
    assert np.abs(got.out).max() < 10
    whole = attend_path(path, queries, SINKS, TOKENS, K, scale=SCALE)
    assert np.abs(whole.out).max() > 1e3, "there is nothing to hide"


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_range_with_few_keys_of_an_index_is_scanned(
    pool: Pool, heads: list[SyntheticHead], kind: str, options: dict[str, Any]
) -> None:
    """Also one that begins behind the index."""
    path = indexed(pool, heads, kind, options, Format.BFLOAT16)
    exact = indexed(pool, heads, *EXACT, Format.BFLOAT16)
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    for start, stop in ((TOKENS - TAIL - 30, TOKENS), (TOKENS - TAIL, TOKENS), (TOKENS - 10, TOKENS - 2)):
        got, best = (attend_path(one, queries, start, stop, K, scale=SCALE) for one in (path, exact))
        np.testing.assert_allclose(got.lse, best.lse, atol=1e-5)
        np.testing.assert_allclose(got.out, best.out, atol=1e-5)
