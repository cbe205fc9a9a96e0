"""Keys and values on their way back to a device: the right rows in the right order, page-locked or not."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.segment import restored_segment
from retrieval_attn.cpu.store import SequenceKV, Span
from retrieval_attn.index.formats import Format
from retrieval_attn.offload import page_lock, upload
from retrieval_attn.offload import work as kv_copy
from retrieval_attn.offload.page_lock import lock_pages
from retrieval_attn.offload.staging import all_to_host, pack, unpack
from retrieval_attn.offload.upload import Uploads, UploadSpan, as_blocks
from retrieval_attn.store.bundle import Bundle, BundleFile, write_bundle
from retrieval_attn.store.disk import Disk
from tests.tiny_models import build_model, random_ids

HEADS, DIM, VALUE_DIM = 3, 128, 64
TOKENS = 20_000
"""Enough for a segment in large pages."""
LOCKED = 18_432
"""A whole number of pages for every format."""


def path_of(fmt: Format, seed: int = 0, tokens: int = TOKENS, lock: bool = False) -> SequenceKV:
    """A path of random rows; lock: all but its last tokens are page-locked."""
    generator = torch.Generator().manual_seed(seed)
    host = SequenceKV(HEADS, DIM, VALUE_DIM, fmt).reserve(tokens + 16384)
    rows = all_to_host([torch.randn(HEADS, tokens, dim, generator=generator) for dim in (DIM, VALUE_DIM)], fmt)
    cut = min(LOCKED, tokens)
    host.append(rows[0][:, :cut], rows[1][:, :cut])
    if lock:
        lock_pages(host.segments[0])
        assert host.segments[0].locked_tokens == cut
    host.append(rows[0][:, cut:], rows[1][:, cut:])
    return host


def expected(host: SequenceKV, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _, key, value = next(as_blocks([UploadSpan.of(host, stop)], torch.empty(0, dtype=dtype)))
    return key[0], value[0]


def walked(
    uploads: Uploads, stretch: UploadSpan, dtype: torch.dtype, then: list[UploadSpan] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All blocks of a walk, copied as they come, one after the other."""
    blocks = [(key.clone(), value.clone()) for _, key, value in uploads.walk([stretch], dtype, then or [])]
    keys, values = zip(*blocks, strict=True)
    return torch.cat(keys, 2)[0].cpu(), torch.cat(values, 2)[0].cpu()


def test_on_the_cpu_a_path_is_one_block_in_place() -> None:
    host = path_of(Format.FLOAT32)
    [(number, key, value)] = as_blocks([UploadSpan.of(host)], torch.empty(0))
    assert number == 0
    assert key.shape == (1, HEADS, TOKENS, DIM) and value.shape == (1, HEADS, TOKENS, VALUE_DIM)
    assert key.data_ptr() == host.segments[0].keys.ctypes.data
    assert list(as_blocks([UploadSpan.of(host, 0)], torch.empty(0))) == []


def test_a_large_segment_begins_every_head_on_a_page() -> None:
    for fmt in (Format.FLOAT32, Format.BFLOAT16, Format.INT8):
        segment = path_of(fmt).segments[0]
        assert segment.page_tokens
        for array in (segment.keys, segment.values):
            for head in range(HEADS):
                assert array[head, segment.page_tokens :].ctypes.data % 4096 == 0
                assert array[head].ctypes.data % 4096 == 0


def test_parts_are_cut_where_locked_ranges_end() -> None:
    host = path_of(Format.FLOAT32)
    host.segments[0].locked_ends = (8192, 16384)
    pieces = list(upload._pieces(host.parts(4000, TOKENS)))
    assert [(part.low, part.high, offset, locked) for part, offset, locked in pieces] == [
        (4000, 8192, 0, True),
        (8192, 16384, 4192, True),
        (16384, TOKENS, 12384, False),
    ]


@pytest.fixture(params=["small", "large"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within locked ranges and within the rest, and one block for all."""
    if request.param == "small":
        monkeypatch.setattr(upload, "BLOCK_BYTES", 3 << 20)
        monkeypatch.setattr(upload, "INLINE_BYTES", 1 << 18)


@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16, Format.INT8])
@pytest.mark.parametrize("lock", [True, False])
class TestOnTheDevice:
    pytestmark = pytest.mark.cuda

    def test_blocks_hold_what_the_host_holds(self, fmt: Format, lock: bool, block_bytes: None) -> None:
        device = torch.device("cuda", 0)
        uploads = Uploads(device)
        hosts = [path_of(fmt, seed, lock=lock) for seed in range(3)]
        stretches = [UploadSpan.of(host, stop) for host, stop in zip(hosts, (TOKENS, 19_000, 5), strict=True)]
        dtype = torch.bfloat16
        for number, one in enumerate(stretches):
            then = stretches[number + 1 : number + 2]
            for _ in range(2 if number == 1 else 1):  # one layer asks twice, though something else was sent ahead
                found = walked(uploads, one, dtype, then)
                for mine, theirs in zip(found, expected(one.host, one.stop, dtype), strict=True):
                    assert torch.equal(mine, theirs)

    def test_what_grew_since_it_was_sent_ahead_is_sent_again(self, fmt: Format, lock: bool) -> None:
        uploads = Uploads(torch.device("cuda", 0))
        first, second = path_of(fmt, 1, lock=lock), path_of(fmt, 2, lock=lock)
        walked(uploads, UploadSpan.of(first), torch.float32, [UploadSpan.of(second)])
        key, value = all_to_host([torch.randn(HEADS, 7, dim) for dim in (DIM, VALUE_DIM)], fmt)
        second.append(key, value)
        found = walked(uploads, UploadSpan.of(second), torch.float32)
        for mine, theirs in zip(found, expected(second, TOKENS + 7, torch.float32), strict=True):
            assert torch.equal(mine, theirs)

    def test_a_walk_that_is_left_keeps_nothing(self, fmt: Format, lock: bool, block_bytes: None) -> None:
        uploads = Uploads(torch.device("cuda", 0))
        walk = uploads.walk([UploadSpan.of(path_of(fmt, lock=lock))], torch.float32)
        next(walk)
        walk.close()
        assert not uploads._ahead and not uploads._free


class TestPageLock:
    pytestmark = pytest.mark.cuda

    def test_memory_is_unlocked_before_it_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        locked: list[int] = []
        unlocked: list[int] = []
        register, unregister = page_lock.register, page_lock.unregister

        def noted(address: int, nbytes: int) -> str:
            locked.append(address)
            return register(address, nbytes)

        def noted_end(addresses: list[int]) -> None:
            unlocked.extend(addresses)
            unregister(addresses)

        monkeypatch.setattr(page_lock, "register", noted)
        monkeypatch.setattr(page_lock, "unregister", noted_end)
        host = path_of(Format.BFLOAT16, lock=True)
        view = host.segments[0].keys[0, :5]
        assert torch.from_numpy(host.segments[0].keys[1, :100].view(np.int16)).is_pinned()
        assert len(locked) == 2 * HEADS and not unlocked
        del host
        gc.collect()
        assert len(unlocked) == HEADS  # the values: a view still holds the keys
        del view
        gc.collect()
        assert sorted(unlocked) == sorted(locked)
        path_of(Format.BFLOAT16, lock=True)  # the same addresses, most likely: refused if they were still registered

    def test_a_refusal_is_forgotten(self) -> None:
        """Memory that is not there is refused by the driver; the next kernel must not report it."""
        assert page_lock.register(4096, 4096)
        assert torch.ones(3, device="cuda").sum().item() == 3.0

    @pytest.mark.parametrize("host_dtype", ["auto", "int8"])
    def test_a_turn_reads_the_same_with_and_without(self, host_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """head_dim 128, group 4: a turn of several chunks over several blocks, against one block and no page lock."""
        model = build_model(
            "llama",
            hidden_size=1024,
            head_dim=128,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=40_000,
        ).to("cuda")
        ids = random_ids(1, 22_000, seed=3)[0].tolist()

        def logits(lock: bool, block_bytes: int) -> torch.Tensor:
            monkeypatch.setattr(upload, "BLOCK_BYTES", block_bytes)
            monkeypatch.setattr(kv_copy, "lock_pages", lock_pages if lock else lambda segment: None)
            config = ra.Config(index="flat", host_dtype=host_dtype, prefill_chunk=512, graph=False)
            cache: Any = ra.RetrievalCache(ra.enable(model, config), config)
            with torch.no_grad():
                model(torch.tensor([ids[:20_000]], device="cuda"), past_key_values=cache, logits_to_keep=1)
                cache.batch_repeat_interleave(2)
                turn = torch.tensor([ids[20_000:21_000], ids[21_000:]], device="cuda")
                out = model(turn, past_key_values=cache, logits_to_keep=4).logits.float().cpu()
            locked = [segment.locked_tokens for layer in cache.layers for segment in layer.hosts[0].segments]
            assert any(locked) == lock
            return out

        plain = logits(False, 1 << 30)
        for lock in (True, False):
            assert torch.allclose(logits(lock, 2 << 20), plain, atol=1e-4, rtol=1e-4)


class TestSavedSegments:
    """Keys and values that lie in a file: the driver locks its pages, once, when they are asked for."""

    pytestmark = pytest.mark.cuda

    def mapped_path(self, fmt: Format, folder: Path, tokens: int = TOKENS) -> SequenceKV:
        rows = path_of(fmt, 4, tokens).segments[0]
        arrays = dict(zip(("keys", "values"), rows.read(0, tokens), strict=True))
        file = folder / "layer.ra"
        disk = Disk()
        seal = write_bundle(disk, file, Bundle({}, arrays))
        found = BundleFile(file, disk.map(file), seal, lambda: None).bundle(verify=True).arrays
        segment = restored_segment(found["keys"], found["values"], fmt, 0, ())
        host = SequenceKV(HEADS, DIM, VALUE_DIM, fmt)
        host.set_spans([Span(segment, tokens)])
        return host

    @pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16, Format.INT8])
    def test_pages_of_a_file_are_locked_by_the_first_walk(self, fmt: Format, tmp_path: Path, block_bytes: None) -> None:
        host = self.mapped_path(fmt, tmp_path)
        [segment] = host.segments
        uploads, wanted = Uploads(torch.device("cuda", 0)), expected(host, TOKENS, torch.bfloat16)
        for turn in range(2):
            found = walked(uploads, UploadSpan.of(host), torch.bfloat16)
            for mine, theirs in zip(found, wanted, strict=True):
                assert torch.equal(mine, theirs), turn
            assert segment.locked_ends == (TOKENS,) and segment.locked_rows is not None
            for own, private in zip(segment.locked_rows, (segment.keys, segment.values), strict=True):
                assert own.ctypes.data != private.ctypes.data and np.array_equal(own, private)
                assert torch.from_numpy(own.reshape(-1).view(np.uint8)).is_pinned()

    def test_where_files_are_refused_they_are_gathered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(page_lock, "register", lambda *given: "operation not supported")
        monkeypatch.setattr(page_lock, "_file_refused", threading.Event())
        monkeypatch.setattr(page_lock, "_said", set())
        host = self.mapped_path(Format.BFLOAT16, tmp_path)
        wanted = expected(host, TOKENS, torch.float32)
        for _ in range(2):
            found = walked(Uploads(torch.device("cuda", 0)), UploadSpan.of(host), torch.float32)
            assert all(map(torch.equal, found, wanted)) and not host.segments[0].locked_ends
        assert caplog.text.count("saved contexts") == 1  # other tests' memory may be refused, too

    def test_files_are_unlocked_before_they_are_unmapped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        unlocked: list[int] = []
        unregister = page_lock.unregister

        def noted(addresses: list[int]) -> None:
            unlocked.extend(addresses)
            unregister(addresses)

        monkeypatch.setattr(page_lock, "unregister", noted)
        host = self.mapped_path(Format.BFLOAT16, tmp_path)
        walked(Uploads(torch.device("cuda", 0)), UploadSpan.of(host), torch.float32)
        rows = host.segments[0].locked_rows
        assert rows is not None and not unlocked
        addresses = [one.ctypes.data for one in rows]
        del host, rows
        gc.collect()
        assert sorted(unlocked) == sorted(addresses)
        (tmp_path / "small").mkdir()
        other = self.mapped_path(Format.BFLOAT16, tmp_path / "small", 3000)
        walked(Uploads(torch.device("cuda", 0)), UploadSpan.of(other), torch.float32)
        assert not other.segments[0].locked_ends


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [3, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_rows_are_unpacked_alike_everywhere(dim: int, dtype: torch.dtype) -> None:
    """Bit by bit, rows without a number and rows that are nothing included."""
    rows = torch.randn(2, 333, dim, generator=torch.Generator().manual_seed(4)) * 10
    rows[0, 5], rows[1, 7, 0] = 0.0, torch.inf
    packed = pack(rows, Format.INT8)
    expected = unpack(packed, Format.INT8, dtype)
    found = unpack(packed.cuda(), Format.INT8, dtype).cpu()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert found.isnan().any()
