"""Texts of the prefix cache that move from GPU to host memory and back: answers and bytes stay the same."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention import coded_clusters
from retrieval_attn.attention.cache import CodedSegments, RetrievalCache, head_codes_of, offload_windows, windows_of
from retrieval_attn.cpu.clusters import KeyClusters
from retrieval_attn.engine import prefill_worker, prefix_handle, resident_set
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.prefix_handle import PrefixEntry
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Request
from retrieval_attn.gpu.attention.window import copy_to_host
from retrieval_attn.gpu.codes.host_row_gather import RowShape
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.offload import codes as codes_module
from retrieval_attn.offload import int8_rows
from retrieval_attn.offload.codes import HeadCodes, load_codes, offload_codes
from retrieval_attn.offload.int8_rows import Int8RowMirror
from tests.engine.audit import check_engine
from tests.engine.test_engine import ids, llm_of
from tests.tiny_models import build_model

CONFIG = ra.Config(sink=4, window=32, retrieve=8, index="device", prefill_chunk=256)
QUESTION = ids(5, 90)


class _Inline:
    def submit(self, work: Callable[[], None]) -> None:
        work()


@pytest.fixture(autouse=True)
def _clusters_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a thread: their bytes are counted, and tests compare counts."""
    monkeypatch.setattr(coded_clusters, "_joiner", _Inline)


def read_text(llm: Any, tokens: int, seed: int) -> ra.Context:
    context = ra.Context(llm.model, llm.tokenizer, llm.config)
    context.read(list(ids(tokens, seed)))
    return context


def answer(llm: Any, cache: RetrievalCache) -> list[int]:
    context = ra.Context(llm.model, llm.tokenizer, llm.config)
    context._cache = cache
    return list(context.continue_with(list(QUESTION), max_new_tokens=6).tokens)


def test_codes_go_and_come_back() -> None:
    """Codes, their spaces and the window leave the device; a fork of what is loaded again answers as before. The copy
    in host memory is made once, and no code differs.
    """
    llm = llm_of(CONFIG)
    context = read_text(llm, 900, 1)
    cache = context.cache
    expected = answer(llm, cache.fork())
    codes = head_codes_of(cache)
    assert codes and not any(one.offloaded for one in codes)
    rows = [one.rows().codes.copy() for one in codes]
    before = cache.device_nbytes
    offload_windows(cache)
    offload_codes(codes)
    assert all(one.offloaded for one in codes)
    assert sum(one.device_nbytes for one in codes) == 0 < sum(one.copied_nbytes for one in codes)
    copies = [one._copy for one in codes]
    assert cache.device_nbytes < before
    assert all((one.rows().codes == own).all() for one, own in zip(codes, rows, strict=True))
    assert all(one.offloaded for one in codes), "reading rows loads nothing"
    load_codes(codes)
    assert not any(one.offloaded for one in codes) and sum(one.device_nbytes for one in codes) > 0
    assert answer(llm, cache.fork()) == expected
    offload_codes(codes)
    assert [one._copy for one in codes] == copies
    assert answer(llm, cache.fork()) == expected, "codes that are needed are loaded one by one"
    assert not any(one.offloaded for one in codes)


def test_no_step_finds_clusters_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a text that leave a window have joined clusters before; those of the answer join theirs in steps."""
    joins: list[tuple[bool, bool]] = []
    join = KeyClusters._join

    def joined(self: KeyClusters, segment: Any, start: int, stop: int, *args: Any) -> None:
        if start < stop:
            names = {frame.name for frame in traceback.extract_stack()}
            joins.append(("take_apart" in names, self.mean_values is not None))
        join(self, segment, start, stop, *args)

    monkeypatch.setattr(KeyClusters, "_join", joined)
    with Engine(llm_of(CONFIG)) as engine:
        handle = engine.submit(Request((ids(700, 3), QUESTION), max_tokens=90, stop_ids=frozenset()))
        assert len(list(handle)) > 0
    assert (True, True) not in joins and (True, False) in joins


def test_a_fork_waits_for_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come while the question is read; who needs them waits. A copy that failed is tried again by the next one."""
    llm = llm_of(CONFIG)
    entry = PrefixEntry.beyond(read_text(llm, 800, 4).cache, Sizes())
    expected, codes = answer(llm, entry.fork()), head_codes_of(entry._cache)
    rows = [one.rows().codes.copy() for one in codes]
    entry.offload()
    load, released = codes_module._load_some, threading.Event()

    def slow(*given: Any) -> None:
        released.wait()
        load(*given)

    def failing(*given: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(codes_module, "_load_some", slow)
    fork = entry.fork()
    coming = [one._load_future for one in codes]
    assert not any(one.offloaded for one in codes) and not any(one is None or one.done() for one in coming)
    assert sum(one.device_nbytes for one in codes) > 0, "their memory is taken"
    threading.Timer(0.1, released.set).start()
    for one, own in zip(codes, rows, strict=True):
        assert (one.device.codes[: one.device.length].numpy() == own).all()
    assert answer(llm, fork) == expected
    entry.offload()
    assert all(one.offloaded for one in codes), "what had come goes again"
    monkeypatch.setattr(codes_module, "_load_some", failing)
    entry.fork()
    with pytest.raises(OSError, match="no"):
        codes[0].device  # noqa: B018
    assert codes[0].offloaded
    monkeypatch.setattr(codes_module, "_load_some", load)
    assert (codes[0].device.codes[: len(rows[0])].numpy() == rows[0]).all()


def test_a_step_that_reads_codes_keeps_them() -> None:
    """What holds the codes while they are offloaded goes on with its memory."""
    cache = read_text(llm_of(CONFIG), 600, 2).cache
    codes = head_codes_of(cache)
    held = [one.device for one in codes]
    before = [one.codes[: one.length].clone() for one in held]
    offload_codes(codes)
    assert all((one.codes[: one.length] == own).all() for one, own in zip(held, before, strict=True))


def test_new_codes_replace_the_copy() -> None:
    """Keys that are added after a load are in the next copy, and a shorter index drops the copy."""
    cache = read_text(llm_of(CONFIG), 600, 3).cache
    one = head_codes_of(cache)[0]
    one.offload()
    length = one._device.length
    one.add(cache.batch.hosts(0)[0].segments[0].keys[0][:7])
    assert not one.offloaded and one._device.length == length + 7 and one.copied_nbytes == 0
    one.offload()
    assert one._copy is not None and len(one._copy) == length + 7
    one.cut(5)
    assert not one.offloaded and one._device.length == 5 and one.copied_nbytes == 0


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Idle texts of an engine that is gone count as idle memory until they are collected."""
    yield
    gc.collect()


def apart(_: Tensor) -> bool:
    return True


def engine_of(llm: Any, device: int) -> Engine:
    limits = replace(default_limits(llm.model, llm.config), prefix_cache_device_bytes=device)
    return Engine(llm, limits=limits, prefix_cache_bytes=1 << 27)


def ask_in_turn(engine: Engine, texts: list[tuple[int, ...]], turns: int) -> tuple[list[Any], list[int]]:
    """Answers and cached tokens of questions on texts in turn."""
    found = []
    for _ in range(turns):
        for text in texts:
            found.append(engine.submit(Request((text, QUESTION), 4)).result())
            check_engine(engine)
    engine.submit(Request(((5,),), 1)).result()
    return [one.tokens for one in found], [one.cached_tokens for one in found]


def test_texts_in_turn_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has room for one of three texts: the others wait in host memory, none is evicted or read again. Without
    offloading, the same limits have every text read again in every turn.
    """
    llm = llm_of(CONFIG)
    texts = [ids(700, number) for number in range(3)]
    with Engine(llm, prefix_cache_bytes=0) as engine:
        expected, _ = ask_in_turn(engine, texts, 1)
    monkeypatch.setattr(prefix_handle, "on_device", apart)
    monkeypatch.setattr(resident_set, "LEAST_OFFLOADED", 1 << 10)
    with engine_of(llm, 1 << 40) as engine:
        ask_in_turn(engine, texts, 1)
        whole: Sizes = engine._tree.sizes  # type: ignore[union-attr]
    room = whole.device // 2
    with engine_of(llm, room) as engine:
        answers, cached = ask_in_turn(engine, texts, 3)
        assert answers == expected * 3 and cached == [0] * 3 + [700] * 6
        shared = engine.stats["shared"]
        assert shared.evicted == 0 and shared.offloaded >= 2 and 0 < shared.device_nbytes <= room
        assert shared.host_nbytes == whole.host, "the copies count, made ahead or not"
        check_engine(engine)
    monkeypatch.setattr(PrefixEntry, "offload", lambda _: None)
    with engine_of(llm, room) as engine:
        answers, cached = ask_in_turn(engine, texts, 2)
        assert answers == expected * 2 and cached == [0] * 6 and engine.stats["shared"].evicted > 0


def test_idle_texts_are_copied_before_they_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind their answers, in a thread of its own: an offload then copies no codes."""
    llm = llm_of(CONFIG)
    texts = [ids(700, number) for number in range(2)]
    monkeypatch.setattr(prefix_handle, "on_device", apart)
    monkeypatch.setattr(resident_set, "LEAST_OFFLOADED", 1 << 10)
    with engine_of(llm, 1 << 40) as engine:
        expected, _ = ask_in_turn(engine, texts, 1)
        tree = engine._tree
        assert tree is not None and tree.stats.host_nbytes == tree.sizes.host
        assert sum(node.held.copied for node in tree._residents) >= 2  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(HeadCodes, "rows", lambda _: pytest.fail("codes are copied again"))
            assert tree.offload(1 << 40) > 0
        answers, cached = ask_in_turn(engine, texts, 1)
        assert answers == expected and cached == [700] * 2


def test_entries_count_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offloaded entry holds nothing on the device, and its copies on the host; a fork counts codes there again.

    Codes of a parent are the parent's: a child offloads its windows alone.
    """
    monkeypatch.setattr(prefix_handle, "on_device", apart)
    context = read_text(llm_of(CONFIG), 700, 4)
    entry = PrefixEntry.beyond(context.cache, Sizes())
    child = PrefixEntry.beyond(entry.fork(), entry.shared)
    whole = entry.sizes
    child.offload()
    assert not any(one.offloaded for one in head_codes_of(context.cache)) and child.sizes.device == 0
    entry.offload()
    offloaded = entry.sizes
    codes = sum(one.copied_nbytes for one in head_codes_of(context.cache))
    assert offloaded.device < whole.device // 50, "what codes have room for beyond their keys"
    assert entry.offloaded_bytes == codes > 0 and offloaded.host == whole.host + codes + entry._windows
    entry.fork()
    assert entry.offloaded_bytes == 0 and entry.sizes.device > codes // 2
    entry.offload()
    assert entry.sizes == offloaded


def test_what_was_copied_ahead_is_offloaded_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy counts as host memory, and a later offload frees the device without reading it."""
    monkeypatch.setattr(prefix_handle, "on_device", apart)
    llm = llm_of(CONFIG)
    entry = PrefixEntry.beyond(read_text(llm, 700, 4).cache, Sizes())
    expected, whole = answer(llm, entry.fork()), entry.sizes
    entry.copy_to_host()
    codes = sum(one.copied_nbytes for one in entry._own)
    assert codes > 0 and entry.sizes == whole._replace(host=whole.host + codes + entry._windows)
    monkeypatch.setattr(HeadCodes, "rows", lambda _: pytest.fail("codes are copied again"))
    windows = windows_of(entry._cache)
    copies = [window._copies for window in windows]
    assert None not in copies
    entry.offload()
    assert all(one.offloaded for one in entry._own) and [window.buffers for window in windows] == copies
    assert answer(llm, entry.fork()) == expected


def test_the_engine_copies_nothing_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts beyond the GPU's limit move to host memory without a copy of codes that the engine's thread waits for."""
    llm = llm_of(CONFIG)
    texts = [ids(700, number) for number in range(3)]
    monkeypatch.setattr(prefix_handle, "on_device", apart)
    monkeypatch.setattr(resident_set, "LEAST_OFFLOADED", 1 << 10)
    moved: list[tuple[str, int]] = []
    offload = prefix_handle.offload_codes

    def noted(codes: list[HeadCodes]) -> None:
        uncopied = [one for one in codes if not one.offloaded and one.copied_nbytes == 0]
        moved.append((threading.current_thread().name, len(uncopied)))
        offload(codes)

    monkeypatch.setattr(prefix_handle, "offload_codes", noted)
    with engine_of(llm, 1 << 16) as engine:
        expected = [engine.submit(Request((text, QUESTION), 4)).result().tokens for text in texts]
        answers, cached = ask_in_turn(engine, texts, 2)
        assert answers == expected * 2 and cached == [700] * 6
    assert moved and not [one for one in moved if one[0] == "retrieval_attn-engine" and one[1]]


def test_a_leased_text_is_copied() -> None:
    """A text is copied while a request uses it, so that its first eviction copies nothing."""
    tree, copied = RadixCache(), list[str]()

    class Text:
        sizes, copied = Sizes(0, 1 << 24), False

        def copy_to_host(self) -> None:
            copied.append("copy")
            self.copied = True

        def offload(self) -> None:
            copied.append("offload")
            self.sizes = Sizes(1 << 24)

    node = tree.insert(tree.root, ids(100, 1), Text(), None)
    with tree.lease(node):
        assert tree.offload_copied(0) == 0
        tree.copy_ahead()
        assert tree.offload(1) == 0 and copied == ["copy"]
    assert tree.offload(1, copied=True) == 1 << 24 and copied == ["copy", "offload"]


@pytest.mark.parametrize("device", [0, 1 << 24])
def test_a_thread_frees_what_is_evicted_for_host_memory(device: int) -> None:
    """13 GB take .8 s to free, in the engine's thread a gap of .8 s between tokens. GPU memory is counted free now."""
    tree, released = RadixCache(), list[list[Any]]()

    class Text:
        sizes = Sizes(1 << 24, device)

    text = Text()
    gone = weakref.ref(text)
    tree.insert(tree.root, ids(100, 1), text, None)
    del text
    freed = tree.evict(Sizes(1), release=released.append)
    assert freed == Sizes(1 << 24, device) and tree.sizes == Sizes()
    if device:
        assert not released and gone() is None
    else:
        assert gone() is not None
        released.pop().clear()
        assert gone() is None


def test_a_load_that_failed_leaves_a_newer_one_alone() -> None:
    """Two threads wait for codes whose copy fails; one begins the next load before the other has seen the error."""
    cache = read_text(llm_of(CONFIG), 600, 2).cache
    codes = head_codes_of(cache)
    rows = codes[0].rows().codes.copy()
    offload_codes(codes)

    class Failing(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            codes[0]._load_future = codes[0]._loading = None  # the other thread has seen it
            load_codes(codes[:1])
            raise OSError("no")

    load_codes(codes[1:])
    codes[0].expect(torch.empty(0, dtype=torch.uint8), Failing())
    with pytest.raises(OSError, match="no"):
        codes[0]._finish_load()
    assert codes[0]._load_future is not None and not codes[0].offloaded
    assert (codes[0].device.codes[: len(rows)].numpy() == rows).all()


def test_threads_copy_the_spaces_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of an offloaded text copies neither codes nor spaces in the thread that steps."""
    llm = llm_of(CONFIG)
    entry = PrefixEntry.beyond(read_text(llm, 700, 4).cache, Sizes())
    expected = answer(llm, entry.fork())
    entry.offload()
    threads, send = list[str](), codes_module._Spaces.send

    def noted(spaces: Any) -> None:
        threads.append(threading.current_thread().name)
        send(spaces)

    with monkeypatch.context() as patch:
        patch.setattr(codes_module._Spaces, "send", noted)
        fork = entry.fork()
        head_codes_of(fork)[-1].settle()
    assert threads and all(name.startswith("retrieval_attn-send") for name in threads)
    assert answer(llm, fork) == expected


def test_windows_of_a_text_are_copied_with_one_wait() -> None:
    """Window after window, an offload of 32 layers took .19 s of the engine's thread on an H200."""
    windows = windows_of(read_text(llm_of(CONFIG), 300, 4).cache)
    expected, brought = [[one.clone() for one in window.buffers] for window in windows], list[int]()

    def bring(tensors: Sequence[Tensor]) -> list[Tensor]:
        brought.append(len(tensors))
        return list(tensors)

    copy_to_host(windows[:1], bring)
    copy_to_host(windows, bring)
    assert brought == [2, 2 * (len(windows) - 1)]
    for window, parts in zip(windows, expected, strict=True):
        assert window.offload() == window.nbytes
        for found, part in zip(window.buffers, parts, strict=True):  # bytes: the room for more may hold NaN
            assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize("change", ["none", "write", "write meanwhile"])
def test_a_copy_of_steps_is_made_again_after_a_write(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    rows = Int8RowMirror(2, RowShape(16, 16), 100, torch.device("cpu"))
    torch.manual_seed(3)
    rows.write(torch.randn(2, 50, 16), torch.randn(2, 50, 16))
    more = torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    if change == "write meanwhile":
        side_stream = int8_rows.side_stream

        @contextlib.contextmanager
        def written(device: torch.device) -> Iterator[None]:
            with side_stream(device):
                yield
            monkeypatch.setattr(int8_rows, "side_stream", side_stream)
            rows.write(*more)

        monkeypatch.setattr(int8_rows, "side_stream", written)
    rows.copy_to_host()
    if change == "write":
        rows.write(*more)
    steps = rows._steps[:, : rows.length].clone()
    monkeypatch.setattr(rows, "_steps", rows._steps if change != "none" else rows._steps.new_empty(0, 0, 2))
    rows.offload()
    assert torch.equal(rows._steps[:, : rows.length], steps)


@pytest.mark.parametrize("seed", range(2))
def test_forks_while_others_offload(seed: int) -> None:
    """Threads offload a text while another forks it and asks: each answer is the same."""
    llm = llm_of(CONFIG)
    entry = PrefixEntry.beyond(read_text(llm, 800, 10 + seed).cache, Sizes())
    expected, stop = answer(llm, entry.fork()), threading.Event()

    def offloading() -> None:
        while not stop.is_set():
            entry.offload()

    threads = [threading.Thread(target=offloading) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            assert answer(llm, entry.fork()) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert isinstance(entry._own[0], HeadCodes)


def test_a_text_without_room_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another request runs, a text that lacks GPU memory is not read; it is when that request has ended, with the
    same answer. The count tells that it waits.
    """
    llm = llm_of(CONFIG)
    first, second = Request((ids(500, 1), QUESTION), 240), Request((ids(600, 2), QUESTION), 4)
    with Engine(llm, prefix_cache_bytes=0) as engine:
        expected = [engine.submit(one).result().tokens for one in (first, second)]
    monkeypatch.setattr(IndexChoice, "has_room", lambda self, tokens, image_tokens: False)
    with Engine(llm, prefix_cache_bytes=1 << 27) as engine:
        running = engine.submit(first)
        next(iter(running))
        waiting = engine.submit(second)
        waited = 0
        for _ in running:
            waited = max(waited, engine.stats["waiting_gpu_memory"])
            assert not engine._rows.get(waiting.id) or not engine._rows[waiting.id].is_read
        assert waited == 1
        assert [running.result().tokens, waiting.result().tokens] == expected
        assert engine.stats["waiting_gpu_memory"] == 0
        check_engine(engine)


def test_the_wait_for_room_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read after a while although other requests never end, with the memory that is free."""
    llm = llm_of(CONFIG)
    first, second = Request((ids(500, 1), QUESTION), 400), Request((ids(600, 2), QUESTION), 4)
    monkeypatch.setattr(IndexChoice, "has_room", lambda self, tokens, image_tokens: False)
    monkeypatch.setattr(prefill_worker, "MAX_LACKING_SECONDS", 0.2)
    with Engine(llm, prefix_cache_bytes=0) as engine:
        expected = engine.submit(second).result().tokens
        running = engine.submit(first)
        next(iter(running))
        began = time.perf_counter()
        found = engine.submit(second).result()
        assert found.tokens == expected and time.perf_counter() - began >= 0.2
        assert engine.stats["rows"] == 1, "the other one still runs"
        running.cancel()


def test_an_offloaded_text_without_room_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codes are loaded when the other request has ended."""
    llm = llm_of(CONFIG)
    first, second = Request((ids(500, 1), QUESTION), 60), Request((ids(600, 2), QUESTION), 4)
    with Engine(llm, prefix_cache_bytes=1 << 27) as engine:
        expected = [engine.submit(one).result().tokens for one in (first, second)]
        engine.submit(Request(((5,),), 1)).result()
        assert engine._tree is not None
        monkeypatch.setattr(prefix_handle, "on_device", apart)
        entries: list[Any] = [one.held for one in engine._tree.latest(None, 9)]
        for entry in entries:
            entry.offload()
        assert entries and all(entry.offloaded_bytes > 0 for entry in entries)
        monkeypatch.setattr(IndexChoice, "can_ask", lambda self, nbytes, tokens: False)
        running = engine.submit(first)
        next(iter(running))
        waiting = engine.submit(second)
        alone = [engine._rows[waiting.id].cache is None for _ in running]
        assert len(alone) > 50 and all(alone[:50]), "the last tokens may be read when the other one has begun"
        found = [running.result(), waiting.result()]
        assert [one.tokens for one in found] == expected and [one.cached_tokens for one in found] == [500, 600]


@pytest.mark.cuda
def test_a_gpu_has_its_memory_back() -> None:
    """Codes, spaces, clusters, windows and steps of rows leave the GPU; what is loaded again are the same codes, and
    the answer is that of a text that stayed.
    """
    llm = llm_of(CONFIG.replace(index_options={"int8_rows": True}))
    llm.model = build_model("llama").to("cuda")
    stayed, moved = read_text(llm, 3000, 5), read_text(llm, 3000, 5).cache
    codes = head_codes_of(moved)
    rows = [one.rows().codes.copy() for one in codes]
    gc.collect()
    torch.cuda.synchronize()
    before, coded = torch.cuda.memory_allocated(), sum(one.device_nbytes for one in codes)
    offload_windows(moved)
    offload_codes(codes)
    segments = CodedSegments(moved, codes)
    segments.copy_to_host()
    segments.offload()
    gc.collect()
    assert before - torch.cuda.memory_allocated() > coded > 0
    load_codes(codes)
    for one, own in zip(codes, rows, strict=True):
        assert (one.device.codes[: one.device.length].cpu().numpy() == own).all()
    assert answer(llm, moved.fork()) == answer(llm, stayed.cache.fork())
