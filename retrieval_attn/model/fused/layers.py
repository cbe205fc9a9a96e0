"""A model's decoder layers in few kernels each, while a step of one token is recorded.

A layer is taken by what it is made of: an RMS norm, linear query, key, value and output projections and a rotary
embedding; behind them, where it has it, a second norm and a SiLU-gated feed-forward part. Weights are plain, or 4 bits
of torchao's in the layout of torch's own kernel. Whether that is all that it does is not read from its class but tried:
the layer and its kernels are given the same numbers, and what they ask attention and what they return has to be the
same, but for rounding. What differs, is watched by a hook, was replaced or holds its weights in another way (adapters,
other quantised linears, parts of several ranks) keeps its own modules.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from retrieval_attn.gpu.products import ROW_CLASSES
from retrieval_attn.model.experts import load_expert_kernels
from retrieval_attn.model.fused.attention_parts import attending_parts
from retrieval_attn.model.fused.parts import Different, LayerParts
from retrieval_attn.model.fused.states import state_parts
from retrieval_attn.model.fused.unpacking import own_products
from retrieval_attn.model.layers import decoder_layers, modules_of
from retrieval_attn.model.quantization import packed_modules, plain_tensors
from retrieval_attn.runner.graph.support import watchers_of
from retrieval_attn.runner.prefill import forwards_itself

log = logging.getLogger(__name__)


class _Trial(NamedTuple):
    """Results of trials of a layer: whether its feed-forward part runs in kernels, too, and data for steps of it.

    No weights: they would stay in memory after the model was moved.
    """

    whole: bool
    known: Any


@contextmanager
def fused_layers(model: PreTrainedModel, rows: int) -> Iterator[int]:
    """Within, forwards of one token for each of `rows` rows run layers in few kernels; gives how many layers do.

    Outside they are as they were. Not for two threads at once. Nothing happens on a CPU, where nothing is gained.
    """
    with ExitStack() as stack:
        taken = 0
        if _runs_kernels(model):
            layers, began = decoder_layers(model), time.perf_counter()
            kept: dict[str, list[int]] = {}
            for layer, index in layers:
                try:
                    fused = _fused(layer, index, rows)
                except Different as reason:
                    kept.setdefault(str(reason), []).append(index)
                    continue
                stack.callback(_put_back, layer, layer.__dict__.get("forward"))
                layer.__dict__["forward"] = fused
                taken += 1
            seconds = time.perf_counter() - began
            log.info(
                "steps of %d rows: %d of %d layers run in fused kernels (tried in %.1f s)",
                rows, taken, len(layers), seconds,
            )  # fmt: skip
            for why, numbers in kept.items():
                log.info("layers %s keep their modules: %s", numbers, why)
        yield taken


def load_layer_kernels(model: PreTrainedModel) -> None:
    """Compile and load what a step of one row will launch, by multiplying zeros with a layer's weights of each kind."""
    for layer in _layers_by_kind(model) if _runs_kernels(model) else ():
        load_expert_kernels(layer, 1)
        try:
            parts = _parts(layer, 1)
        except Different:
            continue
        parts.load()
        if parts.feed is not None:
            parts.feed.load()


def load_question_kernels(model: PreTrainedModel, rows: int) -> None:
    """Compile and load what a short question will launch for packed weights, by multiplying zeros with them.

    rows: one of ROW_CLASSES; questions of more tokens than the last one launch the kernels of the last one.
    """
    for layer in _layers_by_kind(model) if _runs_kernels(model) else ():
        load_expert_kernels(layer, rows)
        for _, weights in packed_modules(layer):
            if weights.has_kernels:
                weights.product(torch.zeros(rows, weights.columns, dtype=weights.dtype, device=weights.device))


def _layers_by_kind(model: PreTrainedModel) -> list[nn.Module]:
    """Return the first decoder layer of each kind."""
    found: dict[frozenset[str], nn.Module] = {}
    for layer, _ in decoder_layers(model):
        found.setdefault(frozenset(layer._modules), layer)
    return list(found.values())


def _put_back(layer: nn.Module, forward: Any) -> None:
    """Give a layer the forward that it had; None: its class's."""
    if forward is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = forward


def _runs_kernels(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


_Known = dict[int, _Trial | str]
"""Results by the number of ROW_CLASSES below a step's rows, as far as kernels differ; a text: why the layer keeps its
modules.
"""
_tried: weakref.WeakKeyDictionary[nn.Module, tuple[Any, _Known]] = weakref.WeakKeyDictionary()
"""Results of trials of layers, with the addresses of the weights that they depend on."""


def _fused(layer: nn.Module, index: int, rows: int) -> Callable[..., Any]:
    """The layer's kernels. Raises Different where it keeps its modules."""
    _require_unwatched(layer)
    parts = _parts(layer, rows)
    weights = tuple((weight.data_ptr(), weight.shape, weight.dtype) for weight in plain_tensors(layer.parameters()))
    before, known = _tried.get(layer, (weights, _Known()))
    if before != weights:
        known = {}
    _tried[layer] = weights, known
    kind = (rows > ROW_CLASSES[0]) + (rows > ROW_CLASSES[1] and bool(packed_modules(layer)))
    if kind not in known:
        try:
            known[kind] = _trial(layer, index, parts, rows)
        except Different as reason:
            known[kind] = str(reason)
    found = known[kind]
    if isinstance(found, str):
        raise Different(found)
    return (parts if found.whole else parts.without_feed()).fused(layer, index, found.known)


def _parts(layer: nn.Module, rows: int) -> LayerParts:
    """Return the parts of a layer. Raises Different if they are of an unknown kind."""
    return state_parts(layer, rows) if hasattr(layer, "linear_attn") else attending_parts(layer, rows)


def _require_unwatched(layer: nn.Module) -> None:
    if not forwards_itself(layer):
        raise Different("its forward was replaced")
    for module in modules_of(layer):
        if watchers_of(module):
            raise Different(f"a hook watches its {type(module).__name__}")
        if module is not layer and not forwards_itself(module):
            raise Different(f"the forward of its {type(module).__name__} was replaced")


def _trial(layer: nn.Module, index: int, parts: LayerParts, rows: int) -> _Trial:
    """Raises Different where neither the whole layer nor what comes before its feed-forward part can be kernels."""
    with own_products():
        if parts.feed is not None:
            try:
                return _Trial(True, parts.compared(layer, index, rows))
            except Different as reason:
                log.debug("layer %d: %s", index, reason)
        return _Trial(False, parts.without_feed().compared(layer, index, rows))
