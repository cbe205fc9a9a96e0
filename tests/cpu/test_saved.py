"""A path that was saved and comes back: the same bits, now and after everything that may happen to a path next."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.cpu.clusters import KeyClusters, PathClusters, largest_clusters, mean_values
from retrieval_attn.cpu.host_attend import attend_paths
from retrieval_attn.cpu.samples import SampledKeys
from retrieval_attn.cpu.saved import State, path_from_states, path_state
from retrieval_attn.cpu.segment import HeadCoders
from retrieval_attn.cpu.store import SequenceKV, cluster_table
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.codes import DeviceCoder

HEADS, GROUP = 2, 2
SPECS: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat-int8": {"codes": "int8"},
    "sketch": {},
    "roargraph": {"exact_below": 0, "list_k": 20, "tail": 64},
    "device": {},
    "device-cpu": {},
    "auto": {},
}


def spec_of(name: str) -> IndexSpec:
    return IndexSpec.of(name.split("-")[0], SPECS[name])


def coder_of(name: str) -> HeadCoders | None:
    return DeviceCoder(torch.device("cpu"), HEADS) if name == "device-cpu" else None


def new_path(name: str, fmt: Format, dim: int) -> SequenceKV:
    return SequenceKV(HEADS, dim, dim, fmt, index=spec_of(name)).reserve(1 << 14)


def rows(rng: np.random.Generator, n: int, dim: int, fmt: Format) -> tuple[Any, Any]:
    """Keys whose channels differ in size, so that kinds which learn find something; values."""
    keys = rng.standard_normal((HEADS, n, dim), dtype=np.float32) * np.linspace(2, 0.1, dim, dtype=np.float32)
    return from_float32(keys, fmt), from_float32(rng.standard_normal((HEADS, n, dim), dtype=np.float32), fmt)


def filled(name: str, fmt: Format, dim: int, tokens: int, clusters: int = 0) -> SequenceKV:
    """A path with an index over all tokens but the last 200, clusters if any are asked for."""
    rng = np.random.default_rng(7)
    path = new_path(name, fmt, dim)
    path.append(*rows(rng, tokens, dim, fmt))
    train = rng.standard_normal((HEADS * GROUP, 96, dim), dtype=np.float32)
    path.build_index(4, tokens - 200, train if path.spec.trains else None, coder=coder_of(name))
    if clusters:
        take_some_clusters(path, rng, clusters)
    return path


def take_some_clusters(path: SequenceKV, rng: np.random.Generator, clusters: int) -> None:
    shape = (HEADS, clusters, path.head_dim)
    probes = rng.standard_normal(shape, dtype=np.float32)
    samples = SampledKeys.of(rng.standard_normal((HEADS, path.head_dim, clusters * 3), dtype=np.float32), clusters)
    offsets = rng.standard_normal(shape[:2], dtype=np.float32)
    late = largest_clusters(probes, offsets, rng.random(shape[:2], dtype=np.float32))
    distances = rng.random(HEADS, dtype=np.float32)
    shared = KeyClusters(probes, offsets, None, late, distances, samples)
    path.clusters = PathClusters.empty(shared, path.fmt, path.value_dim)
    table = cluster_table(path, 4, len(path) - 150)
    assert table is not None
    shared.mean_values = mean_values(table)


def through_file(state: State, folder: Path) -> State:
    """As a store gives it back: JSON, and arrays that are maps of a file, copied on write."""
    plain, arrays = state
    places, name = {}, folder / f"{len(list(folder.iterdir()))}.bin"
    with open(name, "wb") as file:
        for key, array in arrays.items():
            assert array.dtype.kind in "buif" and array.dtype.itemsize <= 8
            file.write(b"\0" * (-file.tell() % 64))
            places[key] = file.tell(), array.dtype, array.shape
            file.write(np.ascontiguousarray(array).tobytes())
        file.write(b"\0" * 64)
    raw = np.memmap(name, np.uint8, "c")
    back = {}
    for key, (at, dtype, shape) in places.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        back[key] = raw[at : at + size].view(dtype).reshape(shape)
    return json.loads(json.dumps(plain)), back


def loaded(states: Sequence[State], like: SequenceKV, name: str) -> SequenceKV:
    path = SequenceKV(HEADS, like.head_dim, like.value_dim, like.fmt, index=like.spec)
    path.tail_tokens = like.tail_tokens
    path_from_states(states, path, coder_of(name))
    return path


def assert_same(one: SequenceKV, other: SequenceKV, seed: int = 0, top_k: Any = 25) -> None:
    """Bit-equal partials over what a step reads, for one query and for several."""
    assert len(one) == len(other)
    rng = np.random.default_rng(seed)
    for n in (1, 3):
        queries = rng.standard_normal((HEADS * GROUP, n, one.head_dim), dtype=np.float32)
        for span in ((4, len(one) - 40), (0, len(one))):
            found, wanted = (attend_paths([path], [queries], [span], top_k, scale=0.2)[0] for path in (other, one))
            np.testing.assert_array_equal(found.out, wanted.out)
            np.testing.assert_array_equal(found.lse, wanted.lse)
            assert (found.keys_scanned, found.bytes_read) == (wanted.keys_scanned, wanted.bytes_read)
            assert (found.rest is None) == (wanted.rest is None)
            if found.rest is not None and wanted.rest is not None:
                np.testing.assert_array_equal(found.rest, wanted.rest)


def grow(paths: Sequence[SequenceKV], work: Callable[[SequenceKV, np.random.Generator], None], seed: int = 1) -> None:
    """The same for all of them."""
    for path in paths:
        work(path, np.random.default_rng(seed))


def append(n: int) -> Callable[[SequenceKV, np.random.Generator], None]:
    return lambda path, rng: path.append(*rows(rng, n, path.head_dim, path.fmt))


CASES = [(name, Format.BFLOAT16, 64) for name in SPECS]
CASES += [("flat-int8", fmt, 128) for fmt in Format] + [("device-cpu", fmt, 128) for fmt in Format]
CASES += [("roargraph", Format.INT8, 64), ("sketch", Format.INT8, 64), ("sketch", Format.FLOAT32, 128)]


@pytest.mark.parametrize(("name", "fmt", "dim"), CASES)
def test_a_loaded_path_is_the_one_that_was_saved(name: str, fmt: Format, dim: int, tmp_path: Path) -> None:
    """At once, and after appended tokens, insertions into the loaded index, a crop and forks of both."""
    path = filled(name, fmt, dim, 9000 if name == "sketch" else 2600, clusters=8)
    state = through_file(path_state(path, 0), tmp_path)
    other = loaded([state], path, name)
    assert other.index_kinds == path.index_kinds and other.index_notes == path.index_notes
    assert [(s.length, s.capacity, s.frozen) for s in other.segments] == [(len(path), len(path), True)]
    assert_same(path, other)
    assert_same(path, other, top_k=None)
    grow((path, other), append(300))
    assert_same(path, other)
    stop = len(path) - 320  # within the first segment: into the index that was loaded
    grow((path, other), lambda one, rng: one.extend_index(stop))
    assert_same(path, other)
    grow((path, other), lambda one, rng: one.extend_index(len(one)))
    grow((path, other), lambda one, rng: one.truncate(len(one) - 500))
    assert_same(path, other)
    forks = path.fork(), other.fork()
    grow(forks, append(700))
    grow((path, other), append(100), seed=2)
    assert_same(*forks)
    assert_same(path, other)
