"""Codes on a device: of keys that are lent there, and of keys that cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ConfigError, InputDataError, MemoryPlanError, ShapeError
from retrieval_attn.gpu.codes.codes import DeviceCodes, encoded
from retrieval_attn.index.base import Training
from retrieval_attn.index.device import PLANNED, CodeLayout, DeviceIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.sketch.index import SketchIndex
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload import codes as codes_module
from retrieval_attn.offload.codes import DeviceCoder, SentCodes, _Spaces
from tests.cpu.reference import recall
from tests.index.building import built
from tests.tiny_models import build_model, random_ids

CPU = torch.device("cpu")


def path_of(keys: np.ndarray[Any, Any]) -> tuple[SequenceKV, DeviceCoder]:
    """A path of these keys (2, n, 32) whose index is yet to be built, and its coder."""
    coder = DeviceCoder(CPU, 2)
    path = SequenceKV(2, 32, 32, Format.FLOAT32, index=IndexSpec.of("device"), layer=0)
    path.append(keys, keys)
    return path, coder


def codes_of(path: SequenceKV) -> list[Any]:
    indexes: list[Any] = [index for segment in path.segments for index in segment.indexes]
    assert all(isinstance(index, DeviceIndex) for index in indexes)
    return [index.codes.device for index in indexes]


def test_lent_keys_are_coded_in_place_of_those_that_would_cross() -> None:
    """Each head its own, once: what is inserted later crosses; a loan of another length is not taken."""
    rng = np.random.default_rng(3)
    keys, others = (rng.standard_normal((2, 700, 32), dtype=np.float32) for _ in range(2))
    path, coder = path_of(keys)
    with coder.lent(torch.from_numpy(others), None):
        path.build_index(0, 700, coder=coder)
    more = rng.standard_normal((2, 40, 32), dtype=np.float32)
    path.append(more, more)
    path.extend_index(740)
    for head, codes in enumerate(codes_of(path)):
        wanted = np.concatenate([others[head], more[head]])
        assert codes.length == 740
        assert torch.equal(codes.codes[:740], encoded(codes.space, torch.from_numpy(wanted)))
    path, coder = path_of(keys)
    with coder.lent(torch.from_numpy(others[:, :600]), None):
        path.build_index(0, 700, coder=coder)
    for head, codes in enumerate(codes_of(path)):
        assert torch.equal(codes.codes[:700], encoded(codes.space, torch.from_numpy(keys[head])))


@pytest.mark.parametrize("options", [{}, {"key_bytes": 16, "rescore": 6, "finer_bytes": 32}])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_heads_are_coded_together_as_they_are_alone(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads coded in two calls have the same bytes; a call sends the spaces once and waits once for the keys."""
    rng = np.random.default_rng(5)
    keys = (rng.standard_normal((6, 900, 64)) * np.geomspace(3, 0.3, 64)).astype(np.float32)
    queries = rng.standard_normal((6, 50, 64), dtype=np.float32)
    coder, spec = DeviceCoder(torch.device(device), 6), IndexSpec.of(PLANNED, options)
    path = SequenceKV(6, 64, 64, Format.FLOAT32, index=spec)
    path.append(keys, keys)
    sent, flags = list[_Spaces](), list[int]()
    send, add = _Spaces.send, codes_module.add_to_heads

    def noted_send(spaces: _Spaces) -> None:
        sent.append(spaces)
        send(spaces)

    def noted_add(heads: Sequence[DeviceCodes], keys: Sequence[torch.Tensor]) -> bool:
        flags.append(len(heads))
        return add(heads, keys)

    monkeypatch.setattr(_Spaces, "send", noted_send)
    monkeypatch.setattr(codes_module, "add_to_heads", noted_add)
    with coder.lent(torch.from_numpy(keys).to(device), None):
        path.build_index(0, 900, queries, coder=coder)
    assert (len(sent), flags) == (2, [4, 2])
    for head, together in enumerate(path.segments[0].indexes):
        training = Training(queries[head : head + 1], coder=coder.for_head(head))
        alone = DeviceIndex.build(keys[head], Format.FLOAT32, CodeLayout(**options), training)
        mine, own = together.state(), alone.state()
        assert mine.keys() == own.keys() and ("finer_codes" in mine) == bool(options)
        for name, value in mine.items():
            assert type(value) is type(own[name]) and np.array_equal(np.asarray(value), np.asarray(own[name])), name
        assert together.search(queries[head], 10).ids.tolist() == alone.search(queries[head], 10).ids.tolist()


def test_lent_keys_that_are_not_finite_are_refused() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((2, 300, 32), dtype=np.float32)
    path, coder = path_of(keys)
    bad = torch.from_numpy(keys.copy())
    bad[1, 7, 3] = torch.inf
    with coder.lent(bad, None), pytest.raises(ShapeError, match="finite"):
        path.build_index(0, 300, coder=coder)


@pytest.mark.parametrize("options", [{}, {"key_bytes": 16, "rescore": 6, "finer_bytes": 32}])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_saved_codes_come_back_in_parts(
    device: str, together: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were there, and the same answers; keys that come later are coded as if nothing had happened.

    together: they are sent by threads; of one head more keys come before they have arrived.
    """
    monkeypatch.setattr("retrieval_attn.offload.codes.SENT_BYTES", 5000)
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((2, 3001, 64), dtype=np.float32)
    more = rng.standard_normal((2, 5000, 64), dtype=np.float32)  # more than there is room for
    queries = rng.standard_normal((6, 64), dtype=np.float32)
    sent = SentCodes(1)
    coder = DeviceCoder(torch.device(device), 2)
    other = DeviceCoder(torch.device(device), 2, sent if together else None)
    for head in range(2):
        made = DeviceIndex.build(
            keys[head], Format.FLOAT32, CodeLayout(**options), Training(queries[None], coder=coder.for_head(head))
        )
        state = made.state()
        back = DeviceIndex.from_state(keys[head], Format.FLOAT32, state, coder=other.for_head(head), trusted=True)
        for index in (made, back):
            codes: Any = index.codes
            assert codes.device.codes.device.type == device and codes.device.length == len(index)
        alone = DeviceIndex.from_state(keys[head], Format.FLOAT32, state)  # where there is no device
        for rows, same in zip(alone.codes.rows(), made.codes.rows(), strict=True):
            assert (rows is None and same is None) or np.array_equal(np.asarray(rows), np.asarray(same))
        if head:
            sent.wait()
        else:
            for index in (made, back):
                index.insert(more[head])
        for _ in range(2):
            assert np.array_equal(made.codes.rows().codes.copy(), back.codes.rows().codes)
            finer = [index.codes.rows().finer for index in (made, back)]
            assert all(one is None for one in finer) != bool(options) and np.array_equal(finer[0], finer[1])  # type: ignore[arg-type]
            found, wanted = (index.search(queries, 20) for index in (back, made))
            assert np.array_equal(found.ids, wanted.ids) and np.array_equal(found.scores, wanted.scores)
            for index in (made, back):
                index.insert(more[head])
        for one, same_space in ((made.space, back.space), (made.finer_space, back.finer_space)):
            for part, other_part in zip(one or (), same_space or (), strict=True):
                assert np.array_equal(np.asarray(part), np.asarray(other_part))
        assert (made.finer_space is not None) == bool(options)


@pytest.mark.parametrize("memory", ["managed", "page-locked"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_finer_codes_are_those_of_the_same_keys(device: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, whatever was added, cut, or left behind; a search without a device has the same."""
    taken: list[Any] = []
    if memory == "managed":
        monkeypatch.setattr("retrieval_attn.offload.managed.lock_array", lambda array: pytest.fail("page-locked"))
    else:
        monkeypatch.setattr("retrieval_attn.offload.managed.managed_bytes", lambda *given: taken.append(given))
    keys = np.random.default_rng(10).standard_normal((1, 9000, 64), dtype=np.float32)[0]
    options = CodeLayout(key_bytes=16, rescore=6, finer_bytes=32)
    coder = DeviceCoder(torch.device(device), 1)
    index = DeviceIndex.build(keys[:3000], Format.FLOAT32, options, Training(coder=coder.for_head(0)))
    plain = DeviceIndex.build(keys[:3000], Format.FLOAT32, options, Training())
    for one in (index, plain):
        one.insert(keys[3000:9000])  # more than there is room for
        one.truncate(8500)
        assert sum(one.memory) >= 8500 * 32
        one.insert(keys[:40])
    held: Any = index.codes
    finer = held.device.finer
    assert (finer.codes.device.type, finer.length, finer.codes.data_ptr() % 64) == ("cpu", 8540, 0)
    assert bool(taken) == (device == "cuda" and memory == "page-locked")
    # a number on the edge of two steps aside
    for written, same in zip(index.codes.rows(), plain.codes.rows(), strict=True):
        assert np.mean(written == same) > 0.999
    behind = held.device.behind(96)
    assert behind.finer.length == 8444 and torch.equal(behind.finer.codes[:8444], finer.codes[96:8540])
    queries = torch.from_numpy(keys[:2]).to(held.device.codes.device)
    ids = torch.tensor([[0, -1, 700], [8539, 1, 96]], dtype=torch.int32, device=queries.device)
    said = finer.scores_of(queries, ids).cpu().numpy()
    exact = np.einsum("md,mnd->mn", keys[:2], np.concatenate([keys[:8500], keys[:40]])[ids.cpu().numpy()])
    assert said[0, 1] == -np.inf
    np.testing.assert_allclose(said[ids.cpu().numpy() >= 0], exact[ids.cpu().numpy() >= 0], atol=4.0)
    assert finer.best_of(queries, ids, 2)[0].tolist() == [0, 700]


def test_keys_that_find_no_room_are_not_added_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pieces of them had room, on the device and on the host."""
    monkeypatch.setattr("retrieval_attn.offload.codes.SENT_AT_ONCE", 1000)
    keys = np.random.default_rng(11).standard_normal((9000, 64), dtype=np.float32)
    options = CodeLayout(key_bytes=16, rescore=6, finer_bytes=32)
    coder = DeviceCoder(CPU, 1)
    index = DeviceIndex.build(keys[:3000], Format.FLOAT32, options, Training(coder=coder.for_head(0)))

    def refused(*given: Any) -> Any:
        raise MemoryPlanError("no room")

    monkeypatch.setattr("retrieval_attn.offload.managed.host_rows", refused)
    with pytest.raises(MemoryPlanError):
        index.insert(keys[3000:])
    held: Any = index.codes
    assert len(index) == held.device.length == held.device.finer.length == 3000


def test_options_of_finer_codes() -> None:
    """They are more than the others, which must be said; and name fewer keys, or there are none."""
    wrong: list[dict[str, Any]] = [
        {"finer_bytes": 32},
        {"finer_bytes": 16, "key_bytes": 16},
        {"finer_bytes": 4, "key_bytes": 2},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            CodeLayout(**options)
    spec = IndexSpec.of(PLANNED, {"key_bytes": 24, "rescore": 12, "finer_bytes": 64})
    assert spec.code_shape(128, 100, True) == (24, 600, 64, 157)
    assert spec.code_shape(128, 100, False) == (24, 1200, 64, 200)
    assert spec.code_shape(32, 100, True) == (24, 600, 32, 157) and spec.code_shape(24, 100, True) == (24, 600, 0, 0)
    assert spec.code_shape(128, 1, True) == (24, 33, 0, 0)
    assert IndexSpec.of("device").code_shape(128, 100, True) == (64, 157, 0, 0)


def test_codes_of_other_keys_or_another_space_are_refused() -> None:
    keys = np.random.default_rng(9).standard_normal((300, 64), dtype=np.float32)
    state = built(DeviceIndex, keys, Format.FLOAT32).state()
    changes: list[dict[str, Any]] = [{"codes": state["codes"][:-1]}, {"wide": 10}, {"wide": "8"}, {"rescore": None}]  # type: ignore[index]
    changes += [{"shift": np.zeros(3, np.float32)}, {"estimate": np.zeros((2, 64))}, {"narrow": -2}]
    changes += [{"finer_codes": state["codes"]}, {f"finer_{name}": state[name] for name in state if name != "codes"}]
    for change in changes:
        with pytest.raises(InputDataError, match="build the index again"):
            DeviceIndex.from_state(keys, Format.FLOAT32, {**state, **change})
    with pytest.raises(InputDataError, match="build the index again"):
        DeviceIndex.from_state(keys[:, :32].copy(), Format.FLOAT32, state)
    assert len(DeviceIndex.from_state(keys, Format.FLOAT32, state)) == 300


def sketches_of(path: SequenceKV) -> list[SketchIndex]:
    found = [index for segment in path.segments for index in segment.indexes]
    return [index for index in found if isinstance(index, SketchIndex)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_sketch_is_the_same_where_its_keys_lie(device: str) -> None:
    """Rows made by a device of keys that are lent there are those of the host's pass, but for numbers at the border of
    two codes: orders of leaves, codes and what is found agree.
    """
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((2, 20_000, 32), dtype=np.float32) * np.linspace(2, 0.1, 32, dtype=np.float32)
    queries = rng.standard_normal((4, 128, 32), dtype=np.float32)
    spec = IndexSpec.of("sketch")
    paths = []
    for lent in (None, torch.from_numpy(keys).to(device)):
        path = SequenceKV(2, 32, 32, Format.FLOAT32, index=spec)
        path.append(keys, keys)
        coder = DeviceCoder(torch.device(device), 2)
        if lent is None:
            path.build_index(0, 20_000, queries)
        else:
            with coder.lent(lent, None):
                path.build_index(0, 20_000, queries, coder=coder)
        paths.append(path)
    for host, other in zip(*map(sketches_of, paths), strict=True):
        mine, theirs = host.search_arguments(), other.search_arguments()
        assert mine.leaves.share == theirs.leaves.share and mine.leaves.ordered == theirs.leaves.ordered == 1250
        assert (mine.ids == theirs.ids).mean() > 0.9
        same = mine.ids[: 1250 * 16] == theirs.ids[: 1250 * 16]
        rows = [search.keys.rows[: 1250 * 16][same] for search in (mine, theirs)]
        assert (rows[0] == rows[1]).mean() > 0.999
        found = [index.search(queries[0, :8], 20).ids for index in (host, other)]
        assert recall(found[0], found[1]) > 0.98


def test_a_sketch_of_lent_keys_that_are_not_finite_is_refused() -> None:
    rng = np.random.default_rng(6)
    keys = rng.standard_normal((1, 9000, 32), dtype=np.float32)
    path = SequenceKV(1, 32, 32, Format.FLOAT32, index=IndexSpec.of("sketch"))
    path.append(keys, keys)
    bad = torch.from_numpy(keys.copy())
    bad[0, 7, 3] = torch.nan
    coder = DeviceCoder(CPU, 1)
    with coder.lent(bad, None), pytest.raises(ShapeError, match="finite"):
        path.build_index(0, 9000, rng.standard_normal((2, 64, 32), dtype=np.float32), coder=coder)


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prefill_on_a_gpu_codes_the_keys_that_the_host_has(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing crosses twice; the codes are those of the host's keys."""
    monkeypatch.setattr(
        "retrieval_attn.offload.codes._PinnedBuffer.filled", lambda *given: pytest.fail("keys cross again")
    )
    model: Any = build_model("llama").to(torch.bfloat16).cuda()
    config = ra.Config(sink=4, window=16, retrieve=8, index="device", prefill_chunk=256)
    ra.enable(model, config)
    try:
        cache = ra.RetrievalCache(model, config)
        with torch.no_grad():
            model(input_ids=random_ids(batch, 1500).cuda(), past_key_values=cache)
        layers: list[Any] = list(cache.layers)
        for layer in layers:
            layer.finish_index()
            for host in layer.hosts:
                (segment,) = host.segments
                keys, _ = segment.read(*segment.indexed)
                for head, codes in enumerate(codes_of(host)):
                    stored = torch.from_numpy(keys[head]).view(torch.bfloat16).float().cuda()
                    assert codes.length == len(stored) > 1000
                    same = codes.codes[: codes.length] == encoded(codes.space, stored)
                    assert same.float().mean() > 0.999  # products in another order, at the edge of a step
    finally:
        ra.disable(model)
