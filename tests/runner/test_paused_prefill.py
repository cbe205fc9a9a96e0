"""Reads that pause between chunks: the same bits as without pauses, beside steps of others, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill
from retrieval_attn.engine.gate import ReadCancelled, prefill_threads
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn.memory.device import DeviceLayout
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import PromptState
from retrieval_attn.runner.prefill import wrapped_chunk
from retrieval_attn.runner.rows import step

pytestmark = pytest.mark.usefixtures("compiled")

OPTIONS: dict[str, Any] = {"sink": 8, "window": 64, "retrieve": 50, "prefill_chunk": 300}
WAIT = 60.0


@pytest.fixture
def loop(loaded: tuple[Any, Any]) -> AnswerLoop:
    return AnswerLoop(*loaded)


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    drawn = torch.randint(3, 4000, (tokens,), generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()


def new_cache(loop: AnswerLoop, **options: Any) -> RetrievalCache:
    return RetrievalCache(loop.model, ra.Config(**{**OPTIONS, **options}))


def read_at_once(loop: AnswerLoop, cache: RetrievalCache, ids: list[int]) -> PromptState:
    """What `Context.read` does."""
    before = list(cache.batch.sequences[0].token_ids) if cache.batch.sequences else []
    batch = loop.batch([ids], before=before)
    state = loop.read_whole(cache, batch)
    cache.batch.note_ids(batch.ids)
    return state


def paths(cache: RetrievalCache) -> list[SequenceKV]:
    return [layer.hosts[0] for layer in cache.layers if isinstance(layer, RetrievalLayer)]


def assert_same(one: RetrievalCache, other: RetrievalCache) -> None:
    """Keys, values, indexes, clusters and windows, bit for bit."""
    assert one.get_seq_length() == other.get_seq_length()
    assert one.index_kinds() == other.index_kinds() and one.index_notes() == other.index_notes()
    assert one.host_nbytes == other.host_nbytes
    for mine, wanted in zip(paths(one), paths(other), strict=True):
        for left, right in zip(mine.read(0, len(mine)), wanted.read(0, len(wanted)), strict=True):
            assert left.tobytes() == right.tobytes()
        assert (mine.clusters is None) == (wanted.clusters is None)
        for first, second in zip(mine.segments, wanted.segments, strict=True):
            for index, same in zip(first.indexes, second.indexes, strict=True):
                assert flat(index.state()) == flat(same.state())
    layers: Any = zip(one.layers, other.layers, strict=True)
    for layer, same_layer in layers:
        for part, same_part in zip(layer.window.tail(), same_layer.window.tail(), strict=True):
            assert torch.equal(part, same_part)


def flat(state: Any) -> Any:
    """Plain values and bytes of a state."""
    if isinstance(state, np.ndarray):
        return state.shape, state.tobytes()
    if isinstance(state, dict):
        return {name: flat(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state


@pytest.mark.parametrize("index", ["flat", "roargraph", "auto"])
def test_a_paused_read_has_the_same_bits(loop: AnswerLoop, index: str) -> None:
    ids = ids_of(1000)
    plain, paused = new_cache(loop, index=index), new_cache(loop, index=index)
    wanted = read_at_once(loop, plain, ids)
    read = ChunkedPrefill(loop, paused, ids)
    layers = len(paused.layers)
    assert read.gate.chunks_left == 5 * layers
    done = 0
    while not read.done:
        read.go(3)
        assert read.wait(WAIT)
        done = min(done + 3, 5 * layers)
        assert read.gate.chunks_done == done
        if done == 5 * layers:
            read.go(1)
            break
    state = read.result(WAIT)
    assert torch.equal(state.logits, wanted.logits) and torch.equal(state.sequences, wanted.sequences)
    assert read.gate.chunks_left == 0 and read.error is None
    assert_same(paused, plain)


def test_who_drives_a_read_knows_which_cells_are_alike(loop: AnswerLoop) -> None:
    """Four chunks, then what ends the layer's pass; of one chunk, nothing else."""
    read, alike = ChunkedPrefill(loop, new_cache(loop), ids_of(1000)), []
    layers = len(read.cache.layers)
    while not read.done:
        assert read.wait(WAIT)
        if read.gate.chunks_left:
            alike.append((read.gate.chunks_alike, read.gate.next_kind))
        read.go(read.gate.chunks_alike)
        if len(alike) == 2 * layers:
            break
    read.result(WAIT)
    assert alike == [(4, "chunk"), (1, "end")] * layers
    short = ChunkedPrefill(loop, new_cache(loop), ids_of(100))
    assert short.gate.chunks_alike == layers and short.gate.next_kind == "chunk"
    short.go(layers)
    short.result(WAIT)


@pytest.mark.parametrize("index", ["flat", "auto"])
def test_steps_run_within_the_end_of_a_layer(loop: AnswerLoop, index: str) -> None:
    """While sequences decode, the clusters of a layer come in parts of their own, and have the same bits."""
    plain, paused = new_cache(loop, index=index), new_cache(loop, index=index)
    wanted = read_at_once(loop, plain, ids_of(1000))
    read, kinds = ChunkedPrefill(loop, paused, ids_of(1000)), list[str]()
    while not read.done:
        assert read.wait(WAIT)
        kinds.append(read.gate.next_kind)
        read.go(1, alone=False)
        if read.finishing:
            break
    assert torch.equal(read.result(WAIT).logits, wanted.logits)
    assert_same(paused, plain)
    assert kinds[:8] == ["chunk"] * 4 + ["end"] * 4 and kinds.count("end") == 4 * len(paused.layers)


def test_a_read_continues_what_is_there(loop: AnswerLoop) -> None:
    plain = new_cache(loop)
    read_at_once(loop, plain, ids_of(500))
    paused = plain.fork()
    wanted = read_at_once(loop, plain, ids_of(200, 1))
    read = ChunkedPrefill(loop, paused, ids_of(200, 1))
    read.go(100)
    assert torch.equal(read.result(WAIT).logits, wanted.logits)
    assert_same(paused, plain)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


@pytest.mark.parametrize(("prefix", "alone"), [(0, True), (0, False), (400, True), (400, False)])
def test_a_cancelled_read_leaves_nothing(loop: AnswerLoop, prefix: int, alone: bool) -> None:
    """At every chunk: no thread, no memory, and the cache as before. alone: no sequence decodes."""
    first = new_cache(loop, index="roargraph")
    if prefix:
        read_at_once(loop, first, ids_of(prefix))
    layers, ids = len(first.layers), ids_of(700, 1)
    wanted = read_at_once(loop, first.fork(), ids).logits
    chunks = (4 if alone else 7) * layers  # of 300 tokens, and what ends a layer, in one part or four
    before = threads()
    for chunk in range(0, chunks + 1):
        cache = first.fork()
        held = cache.host_nbytes
        read = ChunkedPrefill(loop, cache, ids)
        if chunk:
            read.go(chunk, alone=alone)
        assert read.wait(WAIT)
        assert read.gate.chunks_done == chunk
        read.cancel()
        if chunk >= chunks - (0 if alone else 3):  # within the last layer's end it cannot stop any more
            assert read.error is None and cache.get_seq_length() == prefix + len(ids)
            continue
        assert isinstance(read.error, ReadCancelled)
        with pytest.raises(ReadCancelled):
            read.result()
        assert cache.host_nbytes == held and cache.get_seq_length() == prefix
        assert cache.on_chunk is None and cache.on_layer is None
        if chunk == layers:
            again = ChunkedPrefill(loop, cache, ids)
            again.go(chunks, alone=alone)
            assert torch.equal(again.result(WAIT).logits, wanted)
        assert prefill_threads.running == 0
    assert threads() <= before | {"retrieval_attn-read"}  # it stays
    assert wrapped_chunk(loop.model) is None


def test_nobody_refers_to_a_read_that_waits(loop: AnswerLoop) -> None:
    cache = new_cache(loop)
    gone = weakref.ref(cache)
    read: ChunkedPrefill | None = ChunkedPrefill(loop, cache, ids_of(700))
    assert read is not None
    read.go(2)
    assert read.wait(WAIT)
    del read, cache
    gc.collect()
    began = time.monotonic()
    while prefill_threads.running and time.monotonic() - began < WAIT:
        time.sleep(0.01)
    gc.collect()
    assert prefill_threads.running == 0 and gone() is None


def test_an_error_reaches_who_waits(loop: AnswerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(loop)
    read = ChunkedPrefill(loop, cache, ids_of(700))
    read.go(4)
    assert read.wait(WAIT)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a broken layer")

    with monkeypatch.context() as patch:
        patch.setitem(loop.model.model.layers[1].mlp.__dict__, "forward", broken)
        read.go(100)
        with pytest.raises(ValueError, match="a broken layer"):
            read.result(WAIT)
    assert read.done and read.gate.chunks_left == 0 and cache.get_seq_length() == 0
    assert read_at_once(loop, cache, ids_of(100)).logits.isfinite().all()


def test_bad_input_is_refused_before_there_is_a_thread(loop: AnswerLoop) -> None:
    cache = new_cache(loop)
    with pytest.raises(InputDataError, match="at least one token"):
        ChunkedPrefill(loop, cache, [])
    with pytest.raises(ContextLengthError):
        ChunkedPrefill(loop, cache, [5] * (int(cache.max_positions or 0) + 1))
    assert prefill_threads.running == 0
    read = ChunkedPrefill(loop, cache, [5])
    with pytest.raises(ConfigError, match="chunks"):
        read.go(0)
    with pytest.raises(TimeoutError, match="chunks left"):
        read.result(0.01)
    read.cancel()


def decode(loop: AnswerLoop, cache: RetrievalCache, tokens: int) -> list[int]:
    """So many ids, the first one given, each by a step of one row."""
    chosen = [5]
    while len(chosen) < tokens:
        chosen.append(int(step(loop.model, [cache], chosen[-1:], [cache.get_seq_length()]).argmax()))
    return chosen


def test_steps_run_beside_a_read(loop: AnswerLoop) -> None:
    """Rows decode in this thread while another reads, with chunks of another size: both as alone."""
    ids, other = ids_of(1500), ids_of(400, 1)
    plain, paused = new_cache(loop, index="roargraph"), new_cache(loop, index="roargraph")
    wanted = read_at_once(loop, plain, ids)
    row = new_cache(loop, prefill_chunk=64)
    read_at_once(loop, row, other)
    alone = row.fork()

    wanted_tokens = decode(loop, alone, 60)
    with using_retrieval(loop.model, 64):
        read = ChunkedPrefill(loop, paused, ids)
        read.go(1000)
        tokens = decode(loop, row, 60)
        state = read.result(WAIT)
    assert tokens == wanted_tokens
    assert torch.equal(state.logits, wanted.logits)
    assert_same(paused, plain)
    assert wrapped_chunk(loop.model) is None


@pytest.mark.cuda
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("index", ["flat", "device"])
def test_steps_run_beside_a_read_on_a_gpu(
    loaded: tuple[Any, Any], index: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states on the host, too, beside a row's steps: both as alone, and a cancelled read leaves no memory."""
    model, tokenizer = loaded
    loop = AnswerLoop(copy.deepcopy(model).cuda(), tokenizer)
    ids = ids_of(2000)
    monkeypatch.setattr(
        "retrieval_attn.runner.hidden_states.reading_layout", lambda *sizes, **named: DeviceLayout(place == "host")
    )
    plain, paused, row = (new_cache(loop, index=index) for _ in range(3))
    wanted = read_at_once(loop, plain, ids)
    read_at_once(loop, row, ids_of(400, 1))
    alone = row.fork()

    wanted_tokens = decode(loop, alone, 40)
    read = ChunkedPrefill(loop, paused, ids)
    tokens = [5]
    while not read.done:
        read.go(5)
        tokens += decode(loop, row, 2)[1:] if len(tokens) == 1 else []
        read.wait(WAIT)
    assert torch.equal(read.result(WAIT).logits, wanted.logits)
    assert tokens == wanted_tokens[: len(tokens)]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for chunks in (1, 12):
        cancelled = ChunkedPrefill(loop, new_cache(loop, index=index), ids)
        cancelled.go(chunks)
        assert cancelled.wait(WAIT)
        cancelled.cancel()
        del cancelled
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= held + (1 << 20)


@pytest.mark.parametrize(("granted", "together"), [(1, 1), (3, 3), (100, 4)])
def test_chunks_granted_together_are_one_forward(loop: AnswerLoop, granted: int, together: int) -> None:
    """Up to the cache's own chunk of 64 tokens; logits and chunks left are those of a prefill in chunks of 64."""
    ids, cache = ids_of(480), new_cache(loop, prefill_chunk=64)
    expected = read_at_once(loop, new_cache(loop, prefill_chunk=64), ids)
    read = ChunkedPrefill(loop, cache, ids, chunk_tokens=16)
    sizes: list[int] = []
    mlp = loop.model.model.layers[0].mlp
    hook = mlp.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    try:
        while not (read.done or read.finishing):
            read.go(min(granted, read.gate.chunks_alike))
            assert read.wait(WAIT)
        assert read.wait_done(WAIT)
    finally:
        hook.remove()
    assert sum(sizes) == 480 and set(sizes[:-1]) == {16 * together}
    assert torch.allclose(read.result(WAIT).logits, expected.logits, atol=1e-4)
    assert read.gate.chunks_left == 0 and cache.get_seq_length() == 480
