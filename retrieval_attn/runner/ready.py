"""What the first answer would wait for, done while a context is read: kernels compiled, the decode step captured.

Code that is made once for a model, device or machine is listed here: kernels of the host to
`cpu/ahead.kernel_jobs`, which other processes compile while the model reads; what a device launches to `prepared`,
whose threads compile and load it meanwhile; and what needs the context's end to REHEARSALS, which run then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.coded_clusters import new_mass
from retrieval_attn.attention.device_codes import CodedRange
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.retrieval import SOURCES, RetrievalLayer
from retrieval_attn.attention.source import SourcePlan, TokenRange
from retrieval_attn.compile.jobs import Compilation, CompileJob, missing, wait_until_compiled
from retrieval_attn.config import Config
from retrieval_attn.cpu.ahead import early_jobs, is_coded, kernel_jobs, load_kernels
from retrieval_attn.cpu.serve import compile_server
from retrieval_attn.errors import BackendError, CaptureError, ContextLengthError
from retrieval_attn.gpu.attention.merge import Scoring, empty_partial, merge
from retrieval_attn.gpu.capture.polling import load_flags
from retrieval_attn.gpu.codes.candidates import MAX_SLOTS, Candidates, StoredRows, attend_candidates, slots_for
from retrieval_attn.gpu.codes.host_row_gather import HostRowGather, RowShape
from retrieval_attn.gpu.codes.search import (
    CodeSearch,
    CodeShape,
    EstimatedLogits,
    QuestionSearch,
    SearchScratch,
    size_class,
)
from retrieval_attn.gpu.codes.streamer import StreamedCodes
from retrieval_attn.gpu.decode.kernels import (
    HostResult,
    Parts,
    WindowBuffers,
    merge_parts,
    split_count,
    stage_queries,
    window_partials,
)
from retrieval_attn.gpu.products import ROW_CLASSES, rms_norm
from retrieval_attn.gpu.shared.partials import empty_pages, plan_shape, shared_partials
from retrieval_attn.gpu.shared.plan import SharedPlan
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.checkpoint import heads_config
from retrieval_attn.model.fused.layers import load_layer_kernels, load_question_kernels
from retrieval_attn.model.placed_experts import expert_buffer
from retrieval_attn.model.placement import input_device
from retrieval_attn.offload.codes import load_coder, side_stream
from retrieval_attn.offload.staging import TORCH_DTYPE, host_format, pack, unpack
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.work import overlaps
from retrieval_attn.runner import drafts
from retrieval_attn.runner.drafts import BLOCKS
from retrieval_attn.runner.full_attention import forms_for_all
from retrieval_attn.runner.graph.host import code_shape, split_microbatches
from retrieval_attn.runner.graph.host_row_gather import device_reads
from retrieval_attn.runner.graph.pool import GraphPool, acquire, release, waits_for
from retrieval_attn.runner.graph.slot import ordinary_tensors, window_of
from retrieval_attn.runner.graph.support import runtime_for
from retrieval_attn.runner.rows import can_draft

THREADS = 3
"""Pieces of work at the same time. Compiling, and loading, run outside Python's lock for the most part."""
logger = logging.getLogger(__name__)
MOST_MOVES = 64
"""Experts that move at once, at most: 64 of GPT-OSS-120B's are 0.9 GB over the bus in each direction."""


class Preparation:
    """See the module. Used as a context around the reading, which it ends with."""

    def __init__(self) -> None:
        self._pool = ThreadPool(THREADS, "retrieval_attn-prepare")
        self._futures: list[Future[None]] = []
        self._stop = threading.Event()

    def begin(self, what: str, work: Callable[[], object]) -> None:
        """Have a thread do this. what: in the log."""
        self._futures.append(self._pool.submit(self._do, what, work))

    def begin_first(self, what: str, work: Callable[[], object], device: torch.device, *key: object) -> None:
        """Have a thread do this on a device, unless it was begun in this process for `key`."""
        if _is_first((what, device, *key)):
            self.begin(what, functools.partial(_on, device, work))

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for future in self._futures:
                    future.result()
        finally:
            self._stop.set()

    def _do(self, what: str, work: Callable[[], object]) -> None:
        if self._stop.is_set():
            return
        try:
            work()
        except Exception as error:  # whatever a compiler raises
            logger.info("%s could not be prepared while reading: %s: %s", what, type(error).__name__, error)


Rehearsal = Callable[[PreTrainedModel, RetrievalCache], None]
"""Does once what answers do later. The cache holds a context and is as it was afterwards; no token is appended."""


def compilation(model: PreTrainedModel, cache: RetrievalCache, tokens: int, *, progress: bool = True) -> Compilation:
    """Begin to compile, in other processes, what reading up to `tokens` tokens into `cache` and decoding need.

    Used as a context around the read. Decides the index.
    """
    config, spec = cache.config, cache.index.decide(tokens)
    serves_graphs = config.graph is not False and input_device(model).type == "cuda"
    jobs = kernel_jobs(
        host_format(config.host_dtype, model.dtype),
        spec,
        tokens,
        retrieve_all=config.retrieve == "all" or (config.shares_keys and not is_coded(spec)),
        serves_graphs=serves_graphs,
    )
    if config.drafts is True or (config.drafts and serves_graphs):
        jobs.append(CompileJob(f"{drafts.__name__}:{drafts.compile_lookup.__name__}"))
    return Compilation(jobs, progress=progress)


@contextlib.contextmanager
def compiling_early(config: Config, dtype: torch.dtype | None, device: torch.device, text: Any) -> Iterator[None]:
    """While weights load, compile host kernels in other processes, and load device kernels in threads.

    What other processes have not compiled at the end goes on, and a read waits for it (`compilation`); an error ends
    the processes. Kernels of the device that depend on weights or on the chosen index are loaded by `prepared`.

    Args:
        config: options of the reads.
        dtype: dtype of the model that is loaded; None: unknown, and nothing begins.
        device: device of the model.
        text: text config of the model, for its sizes.
    """
    if dtype is None:
        yield
        return
    fmt, spec = host_format(config.host_dtype, dtype), IndexSpec.of(config.index, config.index_options)
    serves_graphs = config.graph is not False and device.type == "cuda"
    retrieve_all = config.retrieve == "all" or (config.shares_keys and device.type == "cpu")
    jobs = early_jobs(fmt, spec, retrieve_all=retrieve_all, serves_graphs=serves_graphs)
    compiling = Compilation(jobs, progress=False)
    try:
        with Preparation() as preparation:
            if overlaps(device):
                for what, work in _early_preparations(config, device, dtype, fmt, text):
                    preparation.begin_first(what, work, device, dtype, fmt)
                if not compiling.jobs:  # else it would wait for other processes
                    preparation.begin("the host's kernels", functools.partial(load_kernels, fmt, spec, {spec.kind}))
            yield
    except BaseException:
        compiling.close()
        raise


@contextlib.contextmanager
def prepared(model: PreTrainedModel, cache: RetrievalCache, compiling: Compilation) -> Iterator[None]:
    """Meanwhile threads load what `compiling` compiles, and compile and load what the device will launch.

    With a GPU only: elsewhere they would take the cores from the model.
    """
    device = input_device(model)
    if not overlaps(device):
        yield
        return
    with Preparation() as preparation:
        fmt = host_format(cache.config.host_dtype, model.dtype)
        text = model.config.get_text_config(decoder=True)
        for what, work in _early_preparations(cache.config, device, model.dtype, fmt, text):
            preparation.begin_first(what, work, device, model.dtype, fmt)
        for what, work in _preparations(model, cache, compiling, device):
            preparation.begin_first(what, work, device, model.dtype, fmt, cache.index.spec)
        watch, before = _LayerWatch(preparation, model, cache, _processors(device)), cache.on_layer
        cache.on_layer = functools.partial(watch, before)
        try:
            yield
        finally:
            cache.on_layer = before


def _preparations(
    model: PreTrainedModel, cache: RetrievalCache, compiling: Compilation, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield preparations that depend on weights or on the index, but not on a layer's shape, with their names."""
    spec, fmt = cache.index.spec, host_format(cache.config.host_dtype, model.dtype)
    head_dim, _ = _sizes(model.config.get_text_config(decoder=True))
    yield "the kernels that code keys", functools.partial(load_coder, device, model.dtype, spec, head_dim)
    yield "the host's kernels", functools.partial(_load_compiled, compiling, fmt, spec)
    if cache.config.graph is not False:
        yield "kernels of a step", functools.partial(load_layer_kernels, model)
    for rows in ROW_CLASSES:
        yield f"kernels of questions of {rows} tokens", functools.partial(load_question_kernels, model, rows)
    if spec.host_reads.rows:
        yield "the kernel of int8 rows", functools.partial(_pack_zeros, device, model.dtype, Format.INT8, head_dim)


def _early_preparations(
    config: Config, device: torch.device, dtype: torch.dtype, fmt: Format, text: Any
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield preparations that depend on sizes in the model's text config only, with their names."""
    sizes = _sizes(text)
    yield f"kernels of each layer of {sizes}", functools.partial(_load_layers, device, dtype, fmt, *sizes)
    if config.graph is not False:
        yield "the exchange with the host", functools.partial(_load_exchange, device)


def _load_layers(device: torch.device, dtype: torch.dtype, fmt: Format, head_dim: int, width: int) -> None:
    """Merge partials, normalise hidden states, pack rows for the host and unpack them: all over zeros."""
    part = empty_partial(torch.zeros(1, 1, 1, head_dim, device=device), head_dim)
    merge([part, part])
    weight = torch.zeros(width, dtype=dtype, device=device)
    rms_norm(weight[None], weight, 1e-5)
    _pack_zeros(device, dtype, fmt, head_dim)
    unpack(torch.zeros(1, fmt.width(head_dim), dtype=TORCH_DTYPE[fmt], device=device), fmt, dtype)


def _pack_zeros(device: torch.device, dtype: torch.dtype, fmt: Format, head_dim: int) -> None:
    pack(torch.zeros(1, head_dim, dtype=dtype, device=device), fmt)


def _load_compiled(compiling: Compilation, fmt: Format, spec: IndexSpec) -> None:
    """Load the host's kernels, if other processes compile all of them."""
    wait_until_compiled()
    if not missing(compiling.jobs):
        load_kernels(fmt, spec, {spec.kind})


def _load_exchange(device: torch.device) -> None:
    """Load what the exchange of a captured step with the host launches."""
    load_flags(device)
    compile_server()


def _sizes(text: Any) -> tuple[int, int]:
    """Return the sizes of a head and of a hidden state, of a text config."""
    size = getattr(heads_config(text), "head_dim", None)
    return int(size or text.hidden_size // text.num_attention_heads), int(text.hidden_size)


class _LayerWatch:
    """Has kernels launched for each shape of layers, once the first of that shape is read."""

    def __init__(
        self, preparation: Preparation, model: PreTrainedModel, cache: RetrievalCache, processors: int
    ) -> None:
        self._preparation, self._model, self._cache = preparation, model, cache
        self._graphs = cache.config.graph is not False
        self._processors, self._read = processors, 0

    def __call__(self, before: Callable[[], object] | None) -> None:
        """A layer was read. before: who else watches."""
        for layer in self._cache.layers[self._read : self._read + 1]:
            if isinstance(layer, RetrievalLayer) and layer.held is not None and layer.held.retrieves:
                forms = forms_for_all(self._model, self._cache, layer.held.columns)
                launches = LayerLaunches(layer, self._processors, forms)
                if _is_first(launches.shape):
                    for work in launches.works(self._graphs):
                        self._preparation.begin(work.__name__, functools.partial(_on, layer.held.device, work))
        self._read += 1
        if before is not None:
            before()


_begun: set[tuple[object, ...]] = set()


def _is_first(key: tuple[object, ...]) -> bool:
    """Whether this is prepared for the first time in this process."""
    first = key not in _begun
    _begun.add(key)
    return first


def _on(device: torch.device, work: Callable[[], object]) -> None:
    with side_stream(device):
        work()


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def make_ready(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Load what was compiled, and rehearse, so that the first answer after `cache` costs what the second does."""
    load_kernels(host_format(cache.config.host_dtype, model.dtype), cache.index.spec, cache.index_kinds())
    for rehearsal in REHEARSALS:
        rehearsal(model, cache)


def capture_step(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Capture the step of one token, and with drafts those of several; launch each once. Nothing on a CPU.

    Nothing, too, where an earlier context's graph will do: to bind a context takes a third of a second of 32 layers,
    and its first answer binds it after its first token; and in a batch, which has graphs of its own and steps others
    meanwhile. Where no step can be captured, the first answer says why.
    """
    if cache.config.graph is False or cache.in_batch:
        return
    try:
        runtime = runtime_for(model)
        blocks = BLOCKS if cache.config.drafts is True and can_draft(cache) else ()
        if runtime is None or waits_for(model, cache, runtime, bool(blocks)):
            return
        with cache.window_lock:
            pool = acquire(model, cache, runtime)
            try:
                _rehearse(pool, cache, blocks)
            finally:
                release(model, pool)
    except (CaptureError, BackendError, ContextLengthError, torch.OutOfMemoryError) as error:
        logger.info("no step was captured while reading: %s", error)


@ordinary_tensors
def _rehearse(pool: GraphPool, cache: RetrievalCache, blocks: Sequence[int]) -> None:
    """Capture the step that comes next in a cache and launch it once, for token 0, and undo it.

    blocks: numbers of tokens; the same for these, if the window has room.
    """
    zeros = torch.zeros(len(cache.batch.sequences), dtype=torch.int64, device=input_device(pool.model))
    pool.launch(cache, zeros, torch.full_like(zeros, cache.batch.columns))
    pool.undo()
    for count in blocks:
        if count <= pool.block_room(cache):
            pool.launch_block(cache, [0] * count, cache.batch.columns)
            pool.undo()


def search_codes(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Search codes on a CUDA device as questions do, in one layer of each shape: all questions run those kernels.

    Once in a process for a model and a shape.
    """
    if input_device(model).type != "cuda":
        return
    rehearsed = _searched.setdefault(model, set())
    for layer in cache.layers:
        if not isinstance(layer, RetrievalLayer) or not layer.index.spec.keeps_device_keys:
            continue
        held = layer.held
        if held is None or not held.retrieves:
            continue
        key, value = held.window.buffers
        shape = layer.q_heads, key.shape, value.shape, key.device, tuple(held.ranges)
        if shape not in rehearsed:
            rehearsed.add(shape)
            for tokens in question_lengths(layer, held):
                query = key.new_ones(key.shape[0], layer.q_heads, tokens, key.shape[3])
                for source in SourcePlan(layer.request(held, tokens, exact=False), SOURCES).sources:
                    if source.retrieves:
                        source.begin(query, Scoring(1.0))
                        source.finish()
            held.uploads.clear()


_searched: weakref.WeakKeyDictionary[PreTrainedModel, set[Any]] = weakref.WeakKeyDictionary()


def question_lengths(layer: RetrievalLayer, held: LayerKV) -> list[int]:
    """Tokens of questions, one for each way that they take through the codes of a layer."""
    host, (start, stop) = held.hosts[0], held.ranges[0]
    k = layer.config.retrieve_count(stop - start)
    if k is None or stop <= start:
        return [2]
    over = CodedRange.of(TokenRange(host, [0], start, stop), k, layer.index.spec, layer.config.estimates)
    return [2] if over is None else [2, over.least_positions(layer.q_heads)]


REHEARSALS: tuple[Rehearsal, ...] = (capture_step, search_codes)
"""In this order."""


SLOTS = 16
"""Of the window: few, for memory that is taken during a read stays taken."""


class LayerLaunches:
    """See the module: for a layer that holds tokens, as far as it retrieves."""

    def __init__(self, layer: RetrievalLayer, processors: int, forms: Sequence[bool] = ()) -> None:
        """processors: multiprocessors of the layer's device. forms: in which an answer may have all keys in pages,
        whether int8, see `runner/full_attention.py`; none: it retrieves.
        """
        self._key, self._value = window_of(layer).buffers
        self._processors, self._q_heads, self._forms = processors, layer.q_heads, tuple(forms)
        batch, self._kv_heads, _, self._dim = self._key.shape
        self._rows = sorted({part.stop - part.start for part in split_microbatches(layer, batch, self._dim)})
        self._step_codes, self._reads = code_shape(layer, self._dim), device_reads(layer)
        self._host_reads = layer.index.spec.host_reads
        ranges = [] if layer.held is None else layer.held.ranges
        self._keys = max((stop - start for start, stop in ranges), default=0)
        k = layer.config.retrieve_count(self._keys)
        estimated = layer.config.estimates
        codes = None if k is None else layer.index.spec.code_shape(self._dim, k, estimated)
        self._question_codes = None if codes is None else CodeShape(*codes)
        self._estimates = estimated
        self._k, self._fmt = k or 0, host_format(layer.config.host_dtype, self._key.dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        """Key of layers with the same shape, of which one needs to launch."""
        sizes = self._key.shape, self._value.shape, self._key.dtype, self._key.device
        codes = self._step_codes, self._reads, self._host_reads, self._question_codes, self._k, self._fmt
        return *sizes, self._q_heads, self._processors, self._forms, size_class(self._keys), *codes

    def works(self, graphs: bool) -> list[Callable[[], None]]:
        """Return the functions to call, in any order. graphs: steps are captured."""
        question = [self.search_question, self.attend_candidates]
        step = [self.attend, self.attend_to_all, self.search_step, self.reach_named]
        return [*step, *question] if graphs else question

    def attend(self) -> None:
        """Stage queries, attend to a window, merge with the host's part."""
        query, value_dim = self._query(), self._value.shape[3]
        parts = self._window_parts(query, self._key.shape[2])
        for rows in self._rows:
            count, places = rows * self._q_heads, self._places(rows)
            stage_queries(query[:rows], self._zeros(count, self._dim), places)
            estimated = self._zeros(count), self._zeros(count, 2)
            host = HostResult(self._zeros(count, value_dim), self._zeros(count), places, estimated)
            rest = (host.out, host.lse) if self._estimates and self._step_codes is not None else None
            merge_parts(Parts(parts.out[:rows], parts.lse[:rows]), host, None, query.dtype, rest)

    def attend_to_all(self) -> None:
        """Attend to a window and to pages with all keys before it, without a part of the host."""
        query, value_dim = self._query(), self._value.shape[3]
        for int8 in self._forms if len(query) == 1 else ():
            rows = (query.new_zeros(1, self._kv_heads, 1, dim) for dim in (self._dim, value_dim))
            pool = empty_pages(2, *(pack(one, Format.INT8) if int8 else one for one in rows))
            plan = SharedPlan(plan_shape(pool, 1, self._q_heads, exact=query.element_size() > 2), query.device)
            part = shared_partials(query, pool, plan, scale=1.0)
            merge_parts(self._window_parts(query, self._key.shape[2]), None, None, query.dtype, None, part)

    def search_step(self) -> None:
        """Search codes as a step does."""
        codes, device = self._step_codes, self._key.device
        if codes is None:
            return
        for rows in self._rows:
            count = rows * self._q_heads
            search = CodeSearch(rows, self._q_heads, self._kv_heads, codes, device)
            if self._host_reads.codes:
                StreamedCodes(len(search.entries), device).bring()
            self._run(search, self._query()[:rows], count, self._places(rows))
            if self._reads:
                search.told = self._told(count, codes)
                self._run(search, self._query()[:rows], count, None)

    def reach_named(self) -> None:
        """Attend to named keys as a step does whose device reads them."""
        codes, shape = self._step_codes, RowShape(self._dim, self._value.shape[3])
        if codes is None or not self._reads:
            return
        for rows in self._rows:
            ids = torch.full((rows * self._q_heads, codes.room), -1, dtype=torch.int32, device=self._key.device)
            told = self._told(len(ids), codes)
            HostRowGather(rows * self._kv_heads, shape, ids.device).run(
                self._query()[:rows], ids, Scoring(1.0), _at_once, None if told is None else told.products
            )

    def _told(self, queries: int, codes: CodeShape) -> EstimatedLogits | None:
        return EstimatedLogits.of(queries, codes, self._host_reads.key_share, self._key.device)

    def search_question(self) -> None:
        """Search codes as a question does."""
        codes, device = self._question_codes, self._key.device
        if codes is None:
            return
        search = QuestionSearch(self._kv_heads, self._q_heads // self._kv_heads, codes, device)
        self._run(search, self._zeros(1, self._q_heads, 1, self._dim), self._q_heads, None)

    def attend_candidates(self) -> None:
        """Attend to named keys as a long question does."""
        codes, fmt = self._question_codes, self._fmt
        k = codes.room if codes is not None and self._estimates else self._k
        if codes is None or slots_for(codes.room, k) > MAX_SLOTS:
            return
        keys, values = (
            torch.zeros(self._kv_heads, 1, fmt.width(dim), dtype=TORCH_DTYPE[fmt], device=self._key.device)
            for dim in (self._dim, self._value.shape[3])
        )
        ids = torch.zeros(self._q_heads, codes.room, dtype=torch.int32, device=self._key.device)
        queries = self._zeros(self._kv_heads, self._q_heads // self._kv_heads, self._dim)
        attend_candidates(queries, StoredRows(keys, values), Candidates(ids, 0, 1, k), 1.0, None)

    def _window_parts(self, query: Tensor, slots: int) -> Parts:
        """Attention to a window, split as one of `slots` slots is."""
        batch, heads = self._key.shape[:2]
        key, value = (like.new_zeros(batch, heads, SLOTS, like.shape[3]) for like in (self._key, self._value))
        window = WindowBuffers(key, value, key.new_zeros(batch, 4, dtype=torch.int32)[:, :2])
        new_key, new_value = (like.new_zeros(batch, heads, 1, like.shape[3]) for like in (key, value))
        splits = split_count(batch, heads, slots, self._processors)
        return window_partials(query, new_key, new_value, window, scale=1.0, splits=splits)

    def _run(self, search: CodeSearch, query: Tensor, count: int, places: Tensor | None) -> None:
        """Run a search to which nothing is bound."""
        ids = torch.empty(count, search.shape.room, dtype=torch.int32, device=query.device)
        scratch = SearchScratch(count, size_class(self._keys), search.shape.picked_room, query.device, has_memory=False)

        search.run(query, ids, places, scratch, _at_once)
        if self._estimates:
            mass = new_mass(len(search.entries), self._value.shape[3], query.device)
            mass.run(search, query, ids, places, scratch, Scoring(1.0), _at_once)

    def _query(self) -> Tensor:
        return self._key.new_zeros(len(self._key), self._q_heads, 1, self._dim)

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=self._key.device)

    def _places(self, rows: int) -> Tensor | None:
        """Return the places as `HostStep` has them."""
        return None if rows == 1 else torch.arange(rows * self._q_heads, device=self._key.device)


def _at_once(function: Callable[..., None], *arguments: object) -> None:
    function(*arguments)


def move_experts(model: Any, most: int = MOST_MOVES) -> int:
    """Move the experts that tokens visited most to GPU memory, at most `most`; return how many moved.

    Captured steps stay valid. Blocks until the GPU has executed all launches. 0 for a model without experts in host
    memory.
    """
    inner = unwrapped(model)
    buffer = expert_buffer(inner)
    if buffer is None:
        return 0
    try:
        runtime = runtime_for(inner)
        settle = None if runtime is None else runtime.synchronize
    except BackendError:  # no graphs: no thread captures or answers one
        settle = torch.cuda.synchronize
    moved = buffer.move_hottest(most, settle or (lambda: None))
    if moved:
        logger.info("experts: %d moved to GPU memory, in exchange for as many", moved)
    return moved
