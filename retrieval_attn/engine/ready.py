"""What the first answer would wait for, done while a context is read: kernels compiled, the decode step captured.

Whoever adds something that is made once for a model, device or machine adds it here: kernels of the host to
`cpu/ahead.kernel_jobs`, which other processes compile while the model reads, and what needs the model or its device to
REHEARSALS, which run at the end of a read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.host_part import HostPart, Scoring
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.compiled.jobs import Compilation
from retrieval_attn.cpu.ahead import kernel_jobs, load_kernels
from retrieval_attn.engine.graph.registry import bind, runtime_for, unbind
from retrieval_attn.errors import BackendError, CaptureError, ContextLengthError
from retrieval_attn.model.placement import input_device
from retrieval_attn.offload.stats import LayerStats
from retrieval_attn.offload.transfer import host_format

logger = logging.getLogger(__name__)

Rehearsal = Callable[[PreTrainedModel, RetrievalCache], None]
"""Does once what answers do later. The cache holds a context and is as it was afterwards; no token is appended."""


def compilation(model: PreTrainedModel, cache: RetrievalCache, tokens: int, *, progress: bool = True) -> Compilation:
    """Begin to compile, in other processes, what reading up to `tokens` tokens into `cache` and decoding need.

    Used as a context around the read. Decides the index.
    """
    config, spec = cache.config, cache.index.decide(tokens)
    return Compilation(
        kernel_jobs(
            host_format(config.host_dtype, model.dtype),
            spec,
            tokens,
            retrieve_all=config.retrieve == "all",
            serves_graphs=config.graph is not False and input_device(model).type == "cuda",
        ),
        progress=progress,
    )


def make_ready(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Load what was compiled, and rehearse, so that the first answer after `cache` costs what the second does."""
    load_kernels(host_format(cache.config.host_dtype, model.dtype), cache.index.spec, cache.index_kinds())
    for rehearsal in REHEARSALS:
        rehearsal(model, cache)


def capture_step(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Make the trial of the exchange, capture the step of one token, launch it once. Nothing on a CPU.

    Where that cannot be, the first answer says why.
    """
    if cache.config.graph is False:
        return
    try:
        runtime = runtime_for(model)
        if runtime is None:
            return
        launcher = bind(model, cache, runtime)
        try:
            launcher.rehearse()
        finally:
            unbind(model, launcher)
    except (CaptureError, BackendError, ContextLengthError, torch.OutOfMemoryError) as error:
        logger.info("no step was captured while reading: %s", error)


def search_codes(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Search codes on a CUDA device as a question does, in one layer of each shape: all questions run those kernels."""
    if input_device(model).type != "cuda":
        return
    rehearsed = set()
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
            query = key.new_ones(key.shape[0], layer.q_heads, 2, key.shape[3])
            part = HostPart(held, query, Scoring(1.0, None), layer.index.spec)
            part.begin(layer.config)
            part.attend(layer.config, value.shape[3], LayerStats())


REHEARSALS: tuple[Rehearsal, ...] = (capture_step, search_codes)
"""In this order."""
