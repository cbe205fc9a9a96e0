"""Short prompts of several rows in one forward: every row is as it would be alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention import prefill_batch as read_together
from retrieval_attn.attention.cache import RetrievalCache, seal
from retrieval_attn.attention.exact import UploadSource
from retrieval_attn.attention.prefill_batch import LEAST_SHARED, runs_of
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.config import QuestionAttention
from retrieval_attn.cpu.segment import PathPart
from retrieval_attn.engine import batched_prefill as packed
from retrieval_attn.engine.batched_prefill import SHORT_TOKENS, BatchedPrefill, PrefillRequest, packable
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill
from retrieval_attn.engine.gate import ReadCancelled
from retrieval_attn.errors import InputDataError
from retrieval_attn.offload import staging
from retrieval_attn.offload import work as host_work
from retrieval_attn.offload import work as kv_copy
from retrieval_attn.offload.staging import Staging
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.traffic import Traffic
from retrieval_attn.offload.upload import UploadSpan
from retrieval_attn.runner.forget import forget_tokens
from retrieval_attn.runner.rows import step
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.model.test_hybrid import new_model
from tests.runner.test_rows import BASE, Pair, steps
from tests.tiny_models import CONFIGS, build_model, random_ids
from tests.waiting import WAIT_SECONDS

pytestmark = pytest.mark.usefixtures("compiled", "one_thread")


AS_LLAMA = "llama31", "yi", "mistral"
"""Models that differ from another one in numbers of how keys are turned, or only in their name."""


@pytest.fixture(params=[name for name in CONFIGS if name not in AS_LLAMA])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build_model(request.param)


WAIT = 60.0
ATTENDING = "llama", "mistral_sliding", "qwen3", "phi3", "gemma2", "gemma3", "gemma4", "gpt_oss"
"""One model for each way to attend. Other models differ from one of these in rotary factors or outside attention."""


def loop_of(model: Any) -> AnswerLoop:
    return AnswerLoop(model, number_tokenizer(model.get_input_embeddings().weight.shape[0]))


def ids(count: int, seed: int) -> list[int]:
    found: list[int] = random_ids(1, count, seed)[0].tolist()
    return found


def alone(loop: AnswerLoop, cache: RetrievalCache, new: list[int]) -> torch.Tensor:
    read = ChunkedPrefill(loop, cache, new)
    read.go(1000)
    return read.result().logits[0]


def begun(loop: AnswerLoop, tokens: int, seed: int, **options: Any) -> RetrievalCache:
    """A cache of so many tokens; 0: empty."""
    cache = RetrievalCache(loop.model, ra.Config(**{**BASE, **options}))
    if tokens:
        alone(loop, cache, ids(tokens, seed))
    return cache


def begin(
    loop: AnswerLoop, caches: list[RetrievalCache], new: list[list[int]]
) -> tuple[BatchedPrefill, list[PrefillRequest]]:
    """One that reads all of them, and the reads."""
    reads = [PrefillRequest(loop, cache, one) for cache, one in zip(caches, new, strict=True)]
    assert all(read.waits and not read.done for read in reads)
    pack = BatchedPrefill(reads, 2048)
    assert pack.reads == reads and not any(read.waits for read in reads)
    return pack, reads


def finish(pack: BatchedPrefill) -> None:
    pack.go(100)
    assert pack.wait(WAIT) and pack.done


def together(loop: AnswerLoop, caches: list[RetrievalCache], new: list[list[int]]) -> list[torch.Tensor]:
    """One forward of all, unless the model turns keys by the longest position of a forward."""
    reads = [PrefillRequest(loop, cache, one) for cache, one in zip(caches, new, strict=True)]
    layers = len(caches[0].layers)
    while waiting := [read for read in reads if read.waits]:
        pack = BatchedPrefill(waiting, 2048)
        for done in range(layers):
            assert pack.gate.chunks_done == done and pack.gate.chunks_left == layers - done
            assert not any(read.done for read in pack.reads)
            pack.go(1)
            assert pack.wait(WAIT)
        assert pack.done and pack.gate.chunks_done == layers and all(read.done for read in pack.reads)
    return [read.result().logits[0] for read in reads]


def test_rows_are_read_as_alone(model: Any) -> None:
    """First tokens and questions, of one token and of more than a window, after contexts of any length. What attends
    exactly stands beside what attends to retrieved keys; questions of few tokens are read alike in both ways.
    """
    loop = loop_of(model)
    cases: list[tuple[int, int, QuestionAttention]] = [
        (0, 1, "exact"),
        (0, 40, "retrieval"),
        (60, 3, "exact"),
        (700, 20, "exact"),
        (700, 20, "retrieval"),
        (150, 60, "exact"),
        (150, 60, "retrieval"),
        (300, 1, "retrieval"),
    ]
    caches = [begun(loop, before, seed, question_attention=way) for seed, (before, _, way) in enumerate(cases)]
    others = [cache.fork() for cache in caches]
    news = [ids(count, 50 + number) for number, (_, count, _) in enumerate(cases)]
    answers = [alone(loop, other, new) for other, new in zip(others, news, strict=True)]
    found = together(loop, caches, news)
    pairs = []
    for logits, wanted, cache, other in zip(found, answers, caches, others, strict=True):
        assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5
        assert list(cache.batch.sequences[0].token_ids) == list(other.batch.sequences[0].token_ids)
        pair = Pair(model, cache)
        pair.alone = other
        pairs.append(pair)
    steps(model, pairs, 2)
    for pair in pairs:
        pair.same_books()


@pytest.mark.parametrize(
    ("name", "host_dtype"),
    [*((name, "auto") for name in ATTENDING), *((name, "int8") for name in ("llama", "gemma2", "gemma4", "gpt_oss"))],
)
def test_questions_over_one_text_attend_to_it_together(
    name: str, host_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of one sealed text, between them one of another: two walks over keys for four rows, answers as alone."""
    model = build_model(name)
    loop = loop_of(model)
    texts = [begun(loop, tokens, seed, host_dtype=host_dtype) for seed, tokens in enumerate((400, 300))]
    for text in texts:
        seal(text)
    caches, others = ([texts[number].fork() for number in (0, 1, 0, 0)] for _ in range(2))
    news = [ids(count, 50 + count) for count in (40, 20, 9, 60)]
    wanted = [alone(loop, other, new) for other, new in zip(others, news, strict=True)]
    walks: list[int] = []
    watch_walks(monkeypatch, lambda stretch, queries: walks.append(queries))
    found = together(loop, caches, news)
    layers = sum(isinstance(layer, RetrievalLayer) for layer in caches[0].layers)
    assert sorted(walks) == sorted([109, 20] * layers)
    pairs = []
    for logits, cache, other, want in zip(found, caches, others, wanted, strict=True):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        pairs.append(Pair(model, cache))
        pairs[-1].alone, pairs[-1].tolerance = other, 1e-3 if host_dtype == "int8" else pairs[-1].tolerance
    steps(model, pairs, 2)


def watch_walks(monkeypatch: pytest.MonkeyPatch, on_walk: Callable[[UploadSpan, int], object]) -> None:
    """Tell of each walk over keys on the host: which, and the number of queries."""
    real = UploadSource._walk

    def watched(past: UploadSource, asked: Any, *given: Any, **options: Any) -> Any:
        for stretch, query in asked:
            on_walk(stretch, query.shape[2])
        return real(past, asked, *given, **options)

    monkeypatch.setattr(UploadSource, "_walk", watched)


@pytest.mark.parametrize("forget", [False, True], ids=["whole", "forgotten"])
def test_questions_share_what_their_texts_have_in_common(forget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text, the same with two turns behind it, and a part of it: its keys are walked over once, as are a turn's.

    Rows 0 and 1 have the text, 3 and 4 a turn behind it, 2 another turn, 5 the first part of the text; 6 nothing.
    """
    model = build_model("llama")
    loop = loop_of(model)
    text = begun(loop, 1400, 1)
    if forget:
        forget_tokens(text, model, 4, 200)
    seal(text)
    turns = [text.fork() for _ in range(2)]
    for number, turn in enumerate(turns):
        alone(loop, turn, ids(300, 9 + number))
        seal(turn)
    part = text.fork()
    part.crop(-500)
    seal(part)
    known = [text, text, turns[1], turns[0], turns[0], part]
    caches, others = ([*(one.fork() for one in known), begun(loop, 0, 0)] for _ in range(2))
    news = [ids(count, 50 + count) for count in (40, 20, 11, 9, 60, 30, 12)]
    wanted = [alone(loop, other, new) for other, new in zip(others, news, strict=True)]
    walks: list[tuple[int, int, int]] = []
    watch_walks(monkeypatch, lambda one, queries: walks.append((one.start, one.stop, queries)))
    found = together(loop, caches, news)
    start = 200 if forget else 0
    each = [(start, 900, 170), (900, 1400, 140), (1400, 1700, 11), (1400, 1700, 69)]
    assert sorted(walks) == sorted(each * len(caches[0].layers))
    for logits, want in zip(found, wanted, strict=True):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("seed", range(20))
def test_runs_cover_each_path_once(seed: int) -> None:
    """Of random paths through segments that they share: each token in one run, shared ones where memory is."""
    draw = random.Random(seed)
    segments: list[Any] = [object() for _ in range(4)]
    paths: list[list[PathPart]] = []
    for _ in range(6):
        first, path = 0, []
        for _ in range(draw.randrange(4)):
            high = draw.choice([300, 700, 1000])
            path.append(PathPart(draw.choice(segments), 0, high, first))
            first += high
        paths.append(path)
    runs = runs_of(paths)
    for row, path in enumerate(paths):
        own = [run for run in runs if row in run.rows]
        assert [run.level for run in own] == list(range(len(own)))
        edges = [0, *(run.stop for run in own)]
        assert [run.start for run in own] == edges[:-1] and edges[-1] == sum(part.high for part in path)
    for run in runs:
        memory = {tuple(places(paths[row], run.start, run.stop)) for row in run.rows}
        assert len(memory) == 1 and (len(run.rows) == 1 or run.stop - run.start >= LEAST_SHARED)
    # all pieces are of 300 tokens and more, so every beginning that rows have in common is walked over once
    beginnings = {
        tuple(places(path, 0, stop)) for path in paths for stop in range(100, sum(p.high for p in path) + 1, 100)
    }
    assert sum(run.stop - run.start for run in runs) == 100 * len(beginnings)


def places(path: list[PathPart], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Where tokens [start, stop) lie: segment, from, to."""
    cut = [(part, max(start - part.first, 0), min(stop - part.first, part.high)) for part in path]
    return [(id(part.segment), low, high) for part, low, high in cut if low < high]


@pytest.fixture(params=["at once", "in threads"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How new keys go to the host: "in threads" is what happens beside a GPU, on any device."""
    if request.param == "in threads":
        monkeypatch.setattr(host_work, "overlaps", lambda device: True)
    return str(request.param)


@pytest.mark.parametrize("at", ["hold", "host_work", "_append", "take_pass", "extend_index"])
def test_a_row_fails_by_itself(at: str, copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it attends, when its keys are to go to the host, while they are copied, behind that, while indexed.

    In threads an index that fails is told at the end of the read: then each is read alone.
    """
    model = build_model("llama")
    loop = loop_of(model)
    caches = [begun(loop, 60, seed) for seed in range(3)]
    others = {number: begun(loop, 60, number) for number in (0, 2)}
    layer: Any = caches[1].layers[1]
    owner = {"host_work": layer.held, "take_pass": layer.held, "extend_index": layer.hosts[0]}.get(at, layer)
    broken_host, append = layer.hosts[0], kv_copy._append

    def broken(*given: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    def append_to(host: Any, *given: Any) -> None:
        (broken if host is broken_host else append)(host, *given)

    if at == "_append":
        monkeypatch.setattr(kv_copy, "_append", append_to)
    else:
        monkeypatch.setattr(owner, at, broken)
    pack, reads = begin(loop, caches, [ids(20, seed) for seed in range(3)])
    finish(pack)
    for read in reads:
        if read.alone is not None:
            assert copies == "in threads" and at in ("_append", "extend_index")
            read.alone.go(1000)
    with pytest.raises((MemoryError, ra.MemoryPlanError), match="no room"):
        reads[1].result(WAIT)
    for number, other in others.items():
        wanted = alone(loop, other, ids(20, number))
        assert torch.allclose(reads[number].result(WAIT).logits[0], wanted, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_rows_go_to_the_host_together(device: str, copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's new tokens of five rows over two texts: one copy, two pieces of host work, three calls of attention.

    Each row's own would be five of each, and each row would wait for the copy of the one before.
    """
    model = build_model("llama").to(device)
    loop = loop_of(model)
    texts = [begun(loop, tokens, seed) for seed, tokens in enumerate((700, 300))]
    for text in texts:
        seal(text)
    caches, others = ([texts[number].fork() for number in (0, 1, 0, 0, 1)] for _ in range(2))
    news = [ids(count, 50 + count) for count in (20, 17, 30, 32, 24)]
    wanted = [alone(loop, other, new) for other, new in zip(others, news, strict=True)]
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def counted(*given: Any, **options: Any) -> Any:
            many = len(given[2]) if name == "_submit_all" else 1
            counts[what] += many
            if name == "_submit_all" and given[0]._name in ("retrieval_attn-upload", "retrieval_attn-gather"):
                counts["uploads"] += many  # keys that come back to a GPU
            return real(*given, **options)

        monkeypatch.setattr(owner, name, counted)

    count(Staging, "_send", "copies")
    count(staging, "brought_together", "copies")
    count(ThreadPool, "_submit_all", "host works")
    count(Traffic, "make_room", "waits")
    count(UploadSource, "_walk", "attention")
    count(read_together, "attend", "attention")
    found = together(loop, caches, news)
    each = {"copies": 1, "waits": 1, "attention": 3} | ({"host works": 2} if copies == "in threads" else {})
    if device == "cuda":
        each["host works"] = 2
        counts["host works"] -= counts.pop("uploads", 0)
    assert counts == {what: number * len(caches[0].layers) for what, number in each.items()}
    for logits, want, cache, other in zip(found, wanted, caches, others, strict=True):
        assert float((logits - want).abs().max() / want.abs().max()) < (1e-5 if device == "cpu" else 1e-4)
        layers: Any = zip(cache.layers, other.layers, strict=True)
        for mine, alike in layers:
            host, same = mine.hosts[0], alike.hosts[0]
            for left, right in zip(host.read(0, len(host)), same.read(0, len(same)), strict=True):
                assert np.allclose(left, right, atol=1e-4)


def test_what_fails_as_a_whole_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a layer: the caches are as before, and the answers those of rows alone."""
    model = build_model("llama")
    loop = loop_of(model)
    caches, others = ([begun(loop, tokens, 1) for tokens in (0, 300)] for _ in range(2))
    layer = model.model.layers[1].mlp
    plain = layer.forward

    def full(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] == 40:
            raise torch.OutOfMemoryError("too many at once")
        return plain(hidden)

    monkeypatch.setitem(layer.__dict__, "forward", full)
    pack, reads = begin(loop, caches, [ids(20, seed) for seed in range(2)])
    finish(pack)
    for number, read in enumerate(reads):
        assert not read.done and not read.waits and read.alone is not None
        read.alone.go(100)
        assert torch.equal(read.result(WAIT_SECONDS).logits[0], alone(loop, others[number], ids(20, number)))


def test_what_is_refused() -> None:
    model = build_model("llama")
    loop = loop_of(model)
    cache = begun(loop, 60, 1)
    with pytest.raises(InputDataError, match="at least one"):
        PrefillRequest(loop, cache, [])
    read = PrefillRequest(loop, cache, ids(3, 1))
    with pytest.raises(TimeoutError):
        read.result()
    read.cancel()
    assert read.done and not read.waits
    with pytest.raises(ReadCancelled):
        read.result()
    assert packable(cache) and not packable(RetrievalCache(new_model("qwen3_next"), ra.Config()))


def test_one_forward_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    loop = loop_of(model)
    caches = [begun(loop, tokens, 1) for tokens in (0, 100, 300)]
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, given, options: forwards.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    together(loop, caches, [ids(count, 3) for count in (7, 11, 13)])
    hook.remove()
    assert forwards == [31]
    assert ra.Config().prefill_chunk > SHORT_TOKENS


def test_steps_run_between_the_layers_of_a_pack() -> None:
    """Of a fork of the text that is asked about, too: rows, questions and steps are as alone."""
    model = build_model("llama")
    loop = loop_of(model)
    text = begun(loop, 700, 1)
    seal(text)
    caches, others = ([text.fork() for _ in range(3)] for _ in range(2))
    news = [ids(count, count) for count in (40, 9, 60)]
    wanted = [alone(loop, other, new) for other, new in zip(others, news, strict=True)]
    row, lone = (text.fork() for _ in range(2))
    expected = decoded(loop, lone, 5, 3 * len(lone.layers))
    pack, reads = begin(loop, caches, news)
    found = [5]
    for layer in range(len(row.layers)):
        assert pack.gate.chunks_done == layer
        found += decoded(loop, row, found[-1], 3)
        pack.go(1)
        assert pack.wait(WAIT)
    assert found[1:] == expected and pack.done
    for read, want in zip(reads, wanted, strict=True):
        assert float((read.result().logits[0] - want).abs().max() / want.abs().max()) < 1e-5


def decoded(loop: AnswerLoop, cache: RetrievalCache, token: int, count: int) -> list[int]:
    """So many tokens, each by a step of one row."""
    found: list[int] = []
    for _ in range(count):
        token = int(step(loop.model, [cache], [token], [cache.get_seq_length()]).argmax())
        found.append(token)
    return found


@pytest.mark.parametrize("chunks", [0, 1])
def test_one_is_cancelled_between_layers(chunks: int) -> None:
    """Its cache is as before, be it empty or not; the others are read as alone."""
    model = build_model("llama")
    loop = loop_of(model)
    caches, others = ([begun(loop, tokens, 1) for tokens in (300, 0, 300, 100)] for _ in range(2))
    news = [ids(20, seed) for seed in range(4)]
    pack, reads = begin(loop, caches, news)
    if chunks:
        pack.go(chunks)
        assert pack.wait(WAIT)
    for number in (0, 1):
        before = others[number].get_seq_length()
        reads[number].cancel()
        assert reads[number].done and caches[number].get_seq_length() == before and not pack.done
        with pytest.raises(ReadCancelled):
            reads[number].result()
        assert torch.equal(alone(loop, caches[number], news[number]), alone(loop, others[number], news[number]))
    finish(pack)
    for number in (2, 3):
        want = alone(loop, others[number], news[number])
        assert torch.allclose(reads[number].result().logits[0], want, atol=1e-5)


def test_all_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes, too: that layer is done, and no thread is left."""
    model = build_model("llama")
    loop = loop_of(model)
    caches = [begun(loop, 100, seed) for seed in range(2)]
    pack, reads = begin(loop, caches, [ids(20, seed) for seed in range(2)])
    entered, released = threading.Event(), threading.Event()
    real = packed.read_together

    def held(*given: Any, **options: Any) -> Any:
        entered.set()
        assert released.wait(WAIT)
        return real(*given, **options)

    monkeypatch.setattr(packed, "read_together", held)
    pack.go(100)
    assert entered.wait(WAIT)
    ends = [threading.Thread(target=read.cancel) for read in reads]
    for end in ends:
        end.start()
    assert not reads[0].done
    released.set()
    for end in ends:
        end.join(WAIT)
    assert pack.done and pack.gate.chunks_done == 1 and all(read.done for read in reads)
    assert all(cache.get_seq_length() == 100 for cache in caches)


def test_a_cache_that_cannot_be_read_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index, which was still built, failed."""
    model = build_model("llama")
    loop = loop_of(model)
    caches, others = ([begun(loop, 100, seed) for seed in range(2)] for _ in range(2))

    def broken() -> None:
        raise MemoryError("no index")

    monkeypatch.setattr(caches[0], "quiet", broken)
    pack, reads = begin(loop, caches, [ids(20, seed) for seed in range(2)])
    finish(pack)
    with pytest.raises(MemoryError, match="no index"):
        reads[0].result()
    assert torch.allclose(reads[1].result().logits[0], alone(loop, others[1], ids(20, 1)), atol=1e-5)


def test_what_fits_is_chosen() -> None:
    model = build_model("llama")
    loop = loop_of(model)
    reads = [PrefillRequest(loop, begun(loop, 0, 1), ids(count, 1)) for count in (30, 80, 50, 20, 1)]
    pack = BatchedPrefill(reads, 100)
    assert pack.reads == [reads[0], reads[2], reads[3]] and reads[1].waits and reads[4].waits
    first = BatchedPrefill(reads[1:2], 10)
    assert first.reads == reads[1:2]
    for read in reads:
        read.cancel()
    assert pack.done and first.done
