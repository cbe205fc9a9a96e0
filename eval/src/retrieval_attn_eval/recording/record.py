"""Record what attention works with: queries, keys and values of chosen layers and heads, from a real model.

`record` is the function; `command` is the command `retrieval-attn record`. The context is read
layer by layer, as retrieval attention reads it, and exactly; then the tokens after it (a question and its answer)
attend to it exactly, and their queries are the decode queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, InputDataError, UnsupportedModelError
from retrieval_attn.testing import (
    SPAN,
    Format,
    IndexChoice,
    MaskSpec,
    ProgressBar,
    RetrievalLayer,
    Rotation,
    forward,
    from_float32,
    train_positions,
    using_retrieval,
)
from retrieval_attn_eval.recording.files import HeadRecording, Recording
from retrieval_attn_eval.recording.options import RecordOptions


def record(
    model: Any,
    context: Sequence[int],
    after: Sequence[int],
    options: RecordOptions | None = None,
    *,
    progress: bool = False,
) -> Recording:
    """Run `model` over the ids `context`, then over the ids `after`, and keep what its attention saw.

    Memory: keys and values of the whole model in its own dtype on the host, and the recording.
    Raises InputDataError for empty ids, ConfigError for layers or heads that the model does not have,
    UnsupportedModelError for models that retrieval attention does not serve.
    """
    options = options or RecordOptions()
    if not len(context) or not len(after):
        raise InputDataError(f"needs ids before and after the question mark, got {len(context)} and {len(after)}")
    chunk, seed, span = options.chunk, options.seed, SPAN if options.span is None else options.span
    config = Config(retrieve="all", index="flat", prefill_chunk=chunk)
    cache = RetrievalCache(model, config)
    positions = train_positions(len(context), options.train, seed)
    targets = len(context) + np.random.default_rng(seed).integers(0, span, len(positions))
    wanted = _Wanted(len(context), options.kv_heads, positions, targets, Format.from_name(options.storage))
    taps = _tap_layers(cache, options.layers, wanted)
    with torch.no_grad(), using_retrieval(model, chunk), _layer_bar(cache, len(context), progress):
        for start, ids in ((0, context), (len(context), after)):
            place = torch.arange(start, start + len(ids), device=model.device)[None]
            ids_tensor = torch.tensor([list(ids)], device=model.device)
            forward(model, cache, ids_tensor, mask=None, position_ids=place)
    heads = [head for tap in taps for head in tap.finish(model)]
    return Recording(tuple(heads), {"tokens": len(context), "after": len(after), "train": len(positions), "span": span})


@dataclass(frozen=True)
class _Wanted:
    """What every tapped layer keeps: kv_heads of `tokens` tokens, queries at positions, to be moved to targets."""

    tokens: int
    kv_heads: Sequence[int] | None
    positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    fmt: Format


class _TappedLayer(RetrievalLayer):
    """A retrieval layer that keeps what passes through it."""

    def __init__(self, config: Config, index: int, wanted: _Wanted) -> None:
        super().__init__(config, IndexChoice(None, config), number=index)
        self._layer_index, self._wanted = index, wanted
        self._heads: list[int] = []
        self._asked: list[Tensor] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        if self._pending is not None:
            if not self._heads:
                self._prepare(module, query, *self._pending, scale=scale)
            self._keep(query, *self._pending, start=spec.q_offset)
        return super().attend(module, query, spec, scale=scale, softcap=softcap, sink_logits=sink_logits)

    def _prepare(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> None:
        wanted = self._wanted
        if query.shape[0] != 1:
            raise ConfigError(f"record takes one sequence at a time, got a batch of {query.shape[0]}")
        self._heads = list(range(key.shape[1]) if wanted.kv_heads is None else wanted.kv_heads)
        beyond = [head for head in self._heads if not 0 <= head < key.shape[1]]
        if beyond:
            raise ConfigError(f"kv head {beyond[0]} is not one of 0 .. {key.shape[1] - 1} of layer {self._layer_index}")
        self._module, self._scale = module, scale
        self._group = query.shape[1] // key.shape[1]
        shape = (len(self._heads), wanted.tokens)
        self._keys = np.empty((*shape, key.shape[3]), wanted.fmt.dtype)
        self._values = np.empty((*shape, value.shape[3]), wanted.fmt.dtype)
        self._train = np.empty((len(self._heads), self._group, len(wanted.positions), query.shape[3]), np.float32)

    def _keep(self, query: Tensor, key: Tensor, value: Tensor, *, start: int) -> None:
        wanted, heads = self._wanted, self._heads
        queries = query[0].unflatten(0, (key.shape[1], self._group))[heads]  # (kept heads, group, tokens, head_dim)
        if start >= wanted.tokens:
            self._asked.append(queries.float().cpu())
            return
        span = slice(start, start + key.shape[2])
        self._keys[:, span] = from_float32(key[0, heads].float().cpu().numpy(), wanted.fmt)
        self._values[:, span] = from_float32(value[0, heads].float().cpu().numpy(), wanted.fmt)
        low, high = np.searchsorted(wanted.positions, (span.start, span.stop))
        rows = torch.from_numpy(wanted.positions[low:high] - start).to(query.device)
        self._train[:, :, low:high] = queries[:, :, rows].float().cpu().numpy()

    def finish(self, model: Any) -> list[HeadRecording]:
        """The recordings of the kept heads; the model's rotary embedding must still be there."""
        wanted = self._wanted
        rotated = self._rotated(model)
        decode = torch.cat(self._asked, dim=2).numpy()
        after = np.arange(wanted.tokens, wanted.tokens + decode.shape[2], dtype=np.int64)
        return [
            HeadRecording(
                layer=self._layer_index,
                kv_head=head,
                fmt=wanted.fmt,
                scale=self._scale,
                keys=self._keys[i],
                values=self._values[i],
                train=self._train[i],
                train_rotated=None if rotated is None else rotated[i],
                train_positions=wanted.positions,
                train_targets=wanted.targets,
                decode=decode[i],
                decode_positions=after,
            )
            for i, head in enumerate(self._heads)
        ]

    def _rotated(self, model: Any) -> npt.NDArray[np.float32] | None:
        try:
            rotation = Rotation.of(model, self._module)
        except UnsupportedModelError:
            return None  # no rotary embedding: a query is the same at every position, or nobody knows how it moves
        flat = torch.from_numpy(self._train).flatten(0, 1).to(model.device)
        places = torch.from_numpy(self._wanted.positions).to(model.device)
        targets = torch.from_numpy(self._wanted.targets).to(model.device)
        moved: npt.NDArray[np.float32] = rotation.move(flat, places, targets).cpu().numpy()
        return moved.reshape(self._train.shape)


def _tap_layers(cache: RetrievalCache, layers: Sequence[int] | None, wanted: _Wanted) -> list[_TappedLayer]:
    """Put tapped layers into the cache in the place of the chosen ones; they are returned in order."""
    full = [i for i, layer in enumerate(cache.layers) if isinstance(layer, RetrievalLayer)]
    chosen = full if layers is None else list(layers)
    wrong = [i for i in chosen if i not in full]
    if wrong or not chosen:
        raise ConfigError(
            f"layers {wrong or chosen} cannot be recorded; full-attention layers of this model are {full}"
        )
    taps = {i: _TappedLayer(cache.config, i, wanted) for i in sorted(set(chosen))}
    own_layers: list[Any] = cache.layers
    for i, tap in taps.items():
        tap.batch, tap.commits = cache.batch, own_layers[i].commits
        own_layers[i] = tap
    return list(taps.values())


class _layer_bar:
    """A bar over the layers of both forwards."""

    def __init__(self, cache: RetrievalCache, tokens: int, show: bool) -> None:
        self._cache = cache
        self._bar = ProgressBar(
            total=2 * len(cache.layers),
            desc=f"recording {tokens:,} tokens",
            unit="layer",
            disable=not show,
            leave=False,
        )

    def __enter__(self) -> None:
        self._cache.on_layer = self._bar.update

    def __exit__(self, *error: object) -> None:
        self._cache.on_layer = None
        self._bar.close()
