"""New keys of several rows on their way to the host as one copy: the bytes of rows alone, errors with their row."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.index.formats import Format
from retrieval_attn.offload import packed_work
from retrieval_attn.offload import work as host_work
from retrieval_attn.offload.packed_work import PackedWork, RowWork
from retrieval_attn.offload.staging import Staging
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.offload.work import HostWork

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
HEADS, KEY_DIM, VALUE_DIM = 2, 16, 24


@pytest.fixture(params=[False, True], ids=["at once", "in threads"])
def threaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it happens as beside a GPU."""
    if request.param:
        monkeypatch.setattr(host_work, "overlaps", lambda device: True)
    return bool(request.param)


def tokens(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (1, heads, count, dim) as linear layers leave them: token by token."""
    made = torch.Generator().manual_seed(count)
    flat = (torch.randn(1, count, HEADS, dim, generator=made) for dim in (KEY_DIM, VALUE_DIM))
    key, value = (part.to(device, dtype).transpose(1, 2) for part in flat)
    return key, value


def packed(
    spans: list[slice], kv: tuple[torch.Tensor, torch.Tensor], fmt: Format
) -> tuple[PackedWork, list[RowWork], list[SequenceKV]]:
    """A pack of such rows, each with a path that holds three tokens already."""
    work = PackedWork(fmt, kv[0].device)
    rows, paths = [], []
    for span in spans:
        path = SequenceKV(HEADS, KEY_DIM, VALUE_DIM, fmt)
        first = HostWork(0, fmt, None, LayerStats(), tokens(3))
        first.append(0, path, None)
        first.copy_now()
        rows.append(work.row(span)(0, fmt, None, LayerStats(), tuple(part[:, :, span] for part in kv)))
        rows[-1].append(0, path, None)
        paths.append(path)
    return work, rows, paths


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", list(Format), ids=str)
@pytest.mark.parametrize("size", [4000, 32 << 20])
def test_rows_get_the_bytes_that_they_get_alone(
    size: int, fmt: Format, device: str, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in pieces that end within rows; tokens between the rows are nobody's."""
    ring = Staging(torch.device(device), size, 2)
    monkeypatch.setattr(packed_work, "staging", lambda device: ring)
    kv = tokens(120, device)
    spans = [slice(5, 6), slice(6, 50), slice(60, 61), slice(61, 119)]
    work, rows, paths = packed(spans, kv, fmt)
    work.start_copy(*kv)
    for row in rows:
        row.start_copy()
        row.start_build()
    work.start_build()
    for row, path, span in zip(rows, paths, spans, strict=True):
        row.finish()
        assert row.done
        alone = SequenceKV(HEADS, KEY_DIM, VALUE_DIM, fmt)
        one = HostWork(0, fmt, None, LayerStats(), tuple(part[:, :, span] for part in kv))  # type: ignore[arg-type]
        one.append(0, alone, None)
        one.copy_now()
        for mine, wanted in zip(path.read(3, len(path)), alone.read(0, len(alone)), strict=True):
            assert np.array_equal(mine, wanted)
    assert work.done and not work.leaving() and not work.building()


def test_a_row_is_given_up_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get theirs, and who waits for it is told."""
    monkeypatch.setattr(host_work, "overlaps", lambda device: True)
    kv = tokens(30)
    work, rows, paths = packed([slice(0, 10), slice(10, 20), slice(20, 30)], kv, Format.FLOAT32)
    held = threading.Event()
    before: Any = host_work.copier().submit(held.wait, 20)
    work.start_copy(*kv)
    rows[1].abandon()
    assert not rows[0].done and work.leaving()
    held.set()
    rows[0].finish()
    rows[2].finish()
    with pytest.raises(CacheMismatchError, match="interrupted"):
        rows[1].finish()
    assert before.result() and [len(path) for path in paths] == [13, 3, 13]


def test_a_copy_that_fails_is_every_rows(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise MemoryError("no page-locked memory")

    monkeypatch.setattr(Staging, "_send", broken)
    monkeypatch.setattr(packed_work, "packed_to_host", broken)
    kv = tokens(20)
    work, rows, paths = packed([slice(0, 10), slice(10, 20)], kv, Format.FLOAT32)
    work.start_copy(*kv)
    for row in rows:
        with pytest.raises(MemoryError, match="page-locked"):
            row.finish()
    assert [len(path) for path in paths] == [3, 3]
