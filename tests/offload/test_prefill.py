"""Prefill beside a device: bytes on the host, threads, errors, memory that does not suffice."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.exact import ExactPass
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CacheMismatchError, MemoryPlanError, UnsupportedModelError
from retrieval_attn.gpu.knn import nearest_keys
from retrieval_attn.index.formats import Format
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.memory import host_room
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.layers import decoder_layers
from retrieval_attn.offload import build as index_build
from retrieval_attn.offload import traffic as device_traffic
from retrieval_attn.offload import work as host_work
from retrieval_attn.offload import work as kv_copy
from retrieval_attn.offload.staging import Staging
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.offload.work import HostWork
from retrieval_attn.runner import prefill
from retrieval_attn.runner.prefill import finish_prefill
from tests.index.building import built
from tests.offload.test_threads import workers
from tests.tiny_models import random_ids, tiny_model
from tests.waiting import WAIT_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("small_graphs")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
GRAPH = {"beam": 64}
CONFIG = ra.Config(sink=4, window=16, index="roargraph", index_options=GRAPH)


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What happens beside a GPU, on any device: copies and index builds in threads, lists by torch."""
    monkeypatch.setattr(host_work, "overlaps", lambda device: True)
    yield
    assert not workers(), "threads are left"


@contextmanager
def retrieving(config: ra.Config = CONFIG, chunk: int = 64, name: str = "llama", device: str = "cpu") -> Iterator[Any]:
    """A tiny model that reads layer by layer, without gradients."""
    model: Any = tiny_model(name) if device == "cpu" else copy.deepcopy(tiny_model(name)).to(device)
    with by_layer(model, config, chunk):
        yield model


@contextmanager
def by_layer(model: Any, config: ra.Config, chunk: int) -> Iterator[Any]:
    """A model that reads layer by layer within, without gradients."""
    ra.enable(model, config, prefill_chunk=chunk)
    try:
        with torch.no_grad():
            yield model
    finally:
        ra.disable(model)


def read(
    config: ra.Config, ids: torch.Tensor, chunk: int, mask: torch.Tensor | None = None, device: str = "cpu"
) -> Any:
    """A cache that has read ids, layer by layer."""
    with retrieving(config, chunk, device=device) as model:
        cache = ra.RetrievalCache(model, config)
        model(ids.to(device), past_key_values=cache, attention_mask=None if mask is None else mask.to(device))
        return cache


def paths(cache: Any) -> list[SequenceKV]:
    """Host paths of every layer that retrieves."""
    return [path for layer in cache.layers if isinstance(layer, RetrievalLayer) for path in layer.hosts]


def check_same_bytes(*caches: Any) -> None:
    """Keys and values on the host are equal, in every layer and row."""
    for mine, other in zip(*map(paths, caches), strict=True):
        for one, two in zip(mine.read(0, len(mine)), other.read(0, len(other)), strict=True):
            np.testing.assert_array_equal(one, two)


def graphs(cache: Any) -> list[np.ndarray]:
    """Edges of every head's graph."""
    indexes = [index for path in paths(cache) for index in path.segments[0].indexes]
    graphs = [index for index in indexes if isinstance(index, RoarGraphIndex)]
    assert graphs and len(graphs) == len(indexes)
    return [index._head.graph.adjacency for index in graphs if index._head is not None]


@contextmanager
def hooked(module: torch.nn.Module, before: Callable[..., Any]) -> Iterator[None]:
    """`before` is called before the module's forward."""
    handle = module.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def around_each_build(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], object], after: Callable[[], object] = lambda: None
) -> None:
    """What comes before each graph is built, and after it."""
    original: Any = vars(RoarGraphIndex)["build"].__func__

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        before()
        index = original(cls, *args, **options)
        after()
        return index

    monkeypatch.setattr(RoarGraphIndex, "build", classmethod(make))


# -- copies and builds in threads --------------------------------------------------------------------


@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
@pytest.mark.parametrize("chunk", [64, 4096], ids=["chunks", "one-shot"])
def test_threads_leave_the_same_bytes(
    chunk: int, host_dtype: str, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, values and graphs equal those of a prefill without threads; pieces far smaller than a chunk."""
    config = CONFIG.replace(host_dtype=host_dtype)
    ids = random_ids(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :90] = 0
    monkeypatch.setattr(kv_copy, "staging", lambda device: Staging(device, 20_000, 2))
    beside = read(config, ids, chunk, mask)
    finish_prefill(beside)
    monkeypatch.setattr(host_work, "overlaps", lambda device: False)
    plain = read(config, ids, chunk, mask)
    check_same_bytes(beside, plain)
    assert [len(path) for path in beside.layers[0].hosts] == [200, 110], "padding is not stored"
    assert beside.stats().copy_seconds > 0 and beside.stats().index_seconds > 0
    assert len(graphs(beside)) == len(graphs(plain))


def test_lists_from_the_device_are_used(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is built from exactly the lists that torch made, of the path's own keys; fails with other ids."""
    asked = []

    def spying(queries: torch.Tensor, keys: torch.Tensor, kk: int) -> torch.Tensor:
        lists = nearest_keys(queries, keys, kk)
        asked.append((keys, lists))
        return lists

    monkeypatch.setattr(index_build, "nearest_keys", spying)
    config = CONFIG
    cache = read(config, random_ids(1, 400), 128)
    finish_prefill(cache)
    assert len(asked) == len(cache.layers)
    for layer, (keys, lists) in zip(cache.layers, asked, strict=True):
        path = layer.hosts[0]
        stop = 400 - config.window
        stored = path.read(config.sink, stop)[0]
        np.testing.assert_array_equal(keys.numpy(), stored)
        for head, index in enumerate(path.segments[0].indexes):
            group = lists.shape[0] // len(stored)
            mine = lists[head * group : (head + 1) * group].numpy()
            made = built(RoarGraphIndex, stored[head], Format.FLOAT32, None, lists=mine, **GRAPH)
            assert index._head is not None and made._head is not None
            np.testing.assert_array_equal(index._head.graph.adjacency, made._head.graph.adjacency)


@pytest.mark.parametrize("kind", ["auto", "flat", "sketch"])
def test_kinds_without_lists_are_built_in_threads_too(kind: str, threaded: None) -> None:
    """And `finish_prefill` tells of each layer."""
    cache, seen = read(CONFIG.replace(index=kind, index_options={}), random_ids(1, 300), 128), []
    finish_prefill(cache, lambda: seen.append(1))
    assert len(seen) == len(cache.layers)
    assert sum(cache.index_kinds().values()) == len(cache.layers) * 2


def test_a_follow_up_turn_waits_for_what_is_under_way(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns through threads hold the same bytes as through none, sinks from the host included."""
    ids = random_ids(1, 420)

    def two_turns() -> Any:
        with retrieving(CONFIG.replace(sink=40)) as model:
            cache = ra.RetrievalCache(model, CONFIG.replace(sink=40))
            for part in (*ids.split([30, 390], dim=1), ids[:, :1]):
                logits = model(part, past_key_values=cache).logits[:, -1]
        return cache, logits

    beside, mine = two_turns()
    monkeypatch.setattr(host_work, "overlaps", lambda device: False)
    plain, other = two_turns()
    check_same_bytes(beside, plain)
    assert (mine - other).abs().max() < 1e-4


def test_an_error_names_its_layer_and_comes_at_the_next_layer(threaded: None) -> None:
    """Keys that are not finite in layer 0: prefill stops there, and every later question says why."""
    with torch.no_grad():
        model = ra.enable(copy.deepcopy(tiny_model("llama")), CONFIG, prefill_chunk=64)
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("inf")
        cache = ra.RetrievalCache(model, CONFIG)
        with pytest.raises(UnsupportedModelError, match=r"Layer \d: the model computed keys that are NaN"):
            model(random_ids(1, 300), past_key_values=cache)
            finish_prefill(cache)
        with pytest.raises(UnsupportedModelError, match=r"Layer \d: "):
            cache.stats()
        cache.reset()
        assert cache.get_seq_length() == 0


def test_an_interrupted_prefill_leaves_no_threads(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in layer 1 while heads of layer 0 are built: what waits is dropped, and the cache says so."""
    begun, release = threading.Event(), threading.Event()
    built = []

    def slow() -> None:
        begun.set()
        release.wait(WAIT_SECONDS)
        built.append(1)

    around_each_build(monkeypatch, slow)

    def interrupted(*args: Any) -> None:
        begun.wait(WAIT_SECONDS)
        raise KeyboardInterrupt

    with retrieving() as model, hooked(model.model.layers[1].mlp, interrupted):
        cache = ra.RetrievalCache(model, CONFIG)
        try:
            with pytest.raises(KeyboardInterrupt):
                model(random_ids(1, 300), past_key_values=cache)
        finally:
            release.set()
        assert not workers()
        assert len(built) <= 2, "heads that had not begun were built after the interruption"
        with pytest.raises(CacheMismatchError, match="interrupted"):
            finish_prefill(cache)


def test_prefill_waits_when_indexes_fall_behind(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for no waiting layer, layer 1 opens its pass only after layer 0 is indexed."""
    monkeypatch.setattr(device_traffic, "BACKLOG", 0)
    order: list[str] = []

    opened = ExactPass.__init__

    def opening(self: ExactPass, *arguments: Any) -> None:
        opened(self, *arguments)
        order.append("opened")

    around_each_build(monkeypatch, lambda: time.sleep(0.05), lambda: order.append("built"))
    monkeypatch.setattr(ExactPass, "__init__", opening)
    cache = read(CONFIG, random_ids(1, 300), 128)
    finish_prefill(cache)
    assert order[:4] == ["opened", "built", "built", "opened"]
    assert cache.stats().wait_seconds > 0


def test_a_cache_that_is_gone_leaves_no_keys(threaded: None) -> None:
    """Nobody keeps the work of its last layers, and with it their keys, until the next read."""
    cache = read(CONFIG, random_ids(1, 300), 128)
    finish_prefill(cache)
    hosts = [host for number in range(len(cache.layers)) for host in cache.batch.hosts(number)]
    segments = [weakref.ref(segment) for host in hosts for segment in host.segments]
    assert len(segments) >= len(cache.layers)
    del cache, hosts

    def are_gone() -> bool:
        gc.collect()
        return all(one() is None for one in segments)

    wait_until(are_gone)  # a thread drops its work just after it reports the result


def test_training_data_leaves_the_device_before_its_turn(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While layer 0 is being indexed, layer 1's queries and lists are already on the host: they would pile up."""
    pool = ThreadPool(1, "retrieval_attn-layer")
    monkeypatch.setattr(host_work, "layers", lambda: pool)
    release = threading.Event()
    around_each_build(monkeypatch, lambda: release.wait(WAIT_SECONDS))
    try:
        cache = read(CONFIG, random_ids(1, 300), 128)
        work = cache.layers[1]._work
        work._futures["fetch"].result(WAIT_SECONDS)
        assert [type(job.lists) for job in work._build._jobs] == [np.ndarray] and not work._futures["build"].done()
    finally:
        release.set()
    finish_prefill(cache)


@pytest.mark.parametrize("device", DEVICES)
def test_one_layer_more_than_the_one_that_computes_is_on_the_device(
    device: str, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host slower than the device: when a layer takes memory all but one of the earlier ones have let theirs go."""
    original = kv_copy._append
    paths = [SequenceKV(2, 64, 64, Format.BFLOAT16, layer=number) for number in range(6)]
    asked = {id(path): threading.Event() for path in paths}
    in_time: list[bool] = []

    def slow(host: SequenceKV, *args: Any) -> None:
        in_time.append(asked[id(host)].wait(WAIT_SECONDS))
        time.sleep(0.03)
        original(host, *args)

    monkeypatch.setattr(kv_copy, "_append", slow)
    where = torch.empty(0, device=device).device  # with its number
    tokens = 3000 if device == "cpu" else 60_000
    works: list[HostWork] = []
    if device == "cuda":
        kv_copy.staging(where)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    waited = 0.0
    for number, path in enumerate(paths):
        waited += device_traffic.traffic(where).make_room()
        assert sum(bool(work._copy._kv) for work in works) <= 1
        kv = torch.full((2, 1, 2, tokens, 64), float(number), device=device).bfloat16()
        works.append(HostWork(number, Format.BFLOAT16, None, LayerStats(), (kv[0], kv[1])))
        works[-1].append(0, path, None)
        works[-1].start_copy()
        works[-1].start_build()
        asked[id(path)].set()
        size = kv.nbytes
        del kv
    assert waited > 0
    for number, (work, path) in enumerate(zip(works, paths, strict=True)):
        work.finish()
        keys, values = path.read(0, tokens)
        number_bits = torch.tensor(float(number)).bfloat16().view(torch.int16).item()
        assert (keys == number_bits).all() and (values == number_bits).all()
    assert in_time and all(in_time), "asking for a copy waited for it"
    if device == "cuda":
        # float32 of the fill, and one more of the bf16, are this test's own
        assert torch.cuda.max_memory_allocated() - before <= 2 * size + 2 * size + (4 << 20)


@pytest.mark.cuda
def test_a_gpu_prefill_leaves_the_bytes_of_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and builds beside the device against copies in order, in chunks of 512."""
    ids = random_ids(1, 3900)
    config = CONFIG.replace(index_options={})
    ring = Staging(torch.device("cuda"), 60_000, 2)
    monkeypatch.setattr(kv_copy, "staging", lambda device: ring)
    beside = read(config, ids, 512, device="cuda")
    finish_prefill(beside)
    assert all(edges.shape[0] for edges in graphs(beside))
    monkeypatch.setattr(host_work, "overlaps", lambda device: False)
    plain = read(config, ids, 512, device="cuda")
    check_same_bytes(beside, plain)
    assert not workers()


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_reading_does_not_wait_for_the_device() -> None:
    """After a warm-up no layer waits: torch raises at every operation that would synchronise the compute stream."""
    config = CONFIG.replace(index_options={})
    model: Any = copy.deepcopy(tiny_model("llama")).cuda()
    ra.enable(model, config, prefill_chunk=512)
    for strict in (False, True):
        cache = ra.RetrievalCache(model, config)
        layers = decoder_layers(model)
        hidden = torch.randn(1, 3900, 48, device="cuda")
        with torch.no_grad():
            rotary = model.model.rotary_emb(hidden, torch.arange(3900, device="cuda")[None])
            spec = MaskSpec(q_offset=0, q_length=3900)
            torch.cuda.synchronize()
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                for layer, _ in layers:
                    hidden = layer(
                        hidden, attention_mask=spec, position_embeddings=rotary, past_key_values=cache, use_cache=True
                    )
            finally:
                torch.cuda.set_sync_debug_mode("default")
        finish_prefill(cache)
    ra.disable(model)


# -- memory that does not suffice ---------------------------------------------------------------------


class Short:
    """A module's forward that runs out of memory for more than `most` tokens, once it has gone well `after` times."""

    def __init__(self, module: torch.nn.Module, most: int, after: int = 0) -> None:
        self.forward, self.most, self.refused, self.after = module.forward, most, 0, after
        self.sizes: list[int] = []
        self._module = module

    def __enter__(self) -> Short:
        self._module.forward = self
        return self

    def __exit__(self, *error: object) -> None:
        del self._module.forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        hidden = args[0] if args else options["hidden_states"]
        if hidden.shape[1] > self.most and len(self.sizes) >= self.after:
            self.refused += 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        self.sizes.append(hidden.shape[1])
        return self.forward(*args, **options)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MIN_CHUNK", 16)


@pytest.mark.parametrize(
    ("name", "number", "where", "after"),
    [("llama", 1, "mlp", 0), ("llama", 1, "mlp", 1), ("gemma3", 0, "mlp", 1), ("gemma3", 1, "self_attn", 1)],
)
def test_a_chunk_that_does_not_fit_is_halved(
    name: str, number: int, where: str, after: int, small_chunks: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Same logits and host bytes as with room enough, in full and sliding layers; fails without restoring."""
    config = CONFIG.replace(retrieve="all")
    ids = random_ids(1, 300)

    def logits(model: Any) -> tuple[torch.Tensor, Any]:
        cache = ra.RetrievalCache(model, config)
        parts = [model(part, past_key_values=cache).logits for part in (ids, ids[:, :1])]
        return torch.cat(parts, dim=1), cache

    with retrieving(config, 128, name) as model:
        expected, plain = logits(model)
        layers = [layer for layer, _ in decoder_layers(model)]
        with Short(getattr(layers[number], where), 40, after) as short, caplog.at_level(logging.WARNING):
            got, cache = logits(model)
    assert (got - expected).abs().max() < 1e-5
    for mine, other in zip(graphs(cache), graphs(plain), strict=True):
        # hidden states of other chunks differ by rounding, and so may a list; another sample is another graph
        assert mine.shape == other.shape and (mine == other).mean() > 0.9
    assert short.refused == 2 and max(short.sizes[after:]) == 32
    halved = [record.message for record in caplog.records if "out of device memory" in record.message]
    assert len(halved) == 2 and f"layer {number}" in halved[0]
    assert "chunks of 64" in halved[0] and "chunks of 32" in halved[1]


def test_a_prompt_of_one_chunk_is_halved_too(small_chunks: None) -> None:
    with retrieving(chunk=4096) as model, Short(model.model.layers[0].mlp, 100) as short:
        cache = ra.RetrievalCache(model, CONFIG)
        model(random_ids(1, 300), past_key_values=cache)
    assert short.refused == 2 and short.sizes == [75, 75, 75, 75]
    assert cache.get_seq_length() == 300


def test_too_little_for_the_least_chunk_is_an_error_with_the_arithmetic(small_chunks: None) -> None:
    wanted = pytest.raises(MemoryPlanError, match=r"Layer 1: .*chunk of 16 of 300 tokens")
    with retrieving() as model, Short(model.model.layers[1].mlp, 1), wanted as caught:
        model(random_ids(1, 300), past_key_values=ra.RetrievalCache(model, CONFIG))
    assert "prefill: one chunk" in str(caught.value) and "larger GPU" in str(caught.value)


def test_tokens_that_go_through_retrieval_are_not_repeated(small_chunks: None) -> None:
    """Appended through the index, a layer's window has changed by the time memory runs out: an error, no wrong text."""
    config = CONFIG.replace(question_attention="retrieval")
    with retrieving(config) as model:
        cache = ra.RetrievalCache(model, config)
        model(random_ids(1, 200), past_key_values=cache)
        with Short(model.model.layers[0].mlp, 10), pytest.raises(MemoryPlanError, match="cannot compute a chunk again"):
            model(random_ids(1, 50), past_key_values=cache)


def test_other_errors_are_left_alone(small_chunks: None) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("shape mismatch")

    wanted = pytest.raises(RuntimeError, match="shape mismatch")
    with retrieving() as model, hooked(model.model.layers[0].mlp, broken), wanted:
        model(random_ids(1, 300), past_key_values=ra.RetrievalCache(model, CONFIG))


def test_too_little_host_memory_is_said_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    with retrieving() as model, hooked(model.model.layers[0].mlp, lambda *args: computed.append(1)):
        cache = ra.RetrievalCache(model, CONFIG)
        monkeypatch.setenv(host_room.VARIABLE, "100KiB")
        with pytest.raises(MemoryPlanError, match=r"1 x 300 tokens needs .* of host memory, 100.0 KiB is free"):
            model(random_ids(1, 300), past_key_values=cache)
        assert not computed and cache.get_seq_length() == 0
        monkeypatch.setenv(host_room.VARIABLE, "1GiB")
        model(random_ids(1, 300), past_key_values=cache)
        assert cache.get_seq_length() == 300


def test_free_host_memory_is_less_than_all_of_it() -> None:
    assert 0 < host_room.available_host_bytes() <= host_room.host_memory_bytes()
    assert host_room.host_memory_bytes() > 2**28
