"""Methods to compare with: full attention by transformers' own caches or by this package's flash backend over keys on
the device, and the published policies. All run one plain greedy loop.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache

from retrieval_attn.testing import using_retrieval
from retrieval_attn_eval.baselines.cache import ContextCache
from retrieval_attn_eval.baselines.method import policies_of
from retrieval_attn_eval.baselines.registry import POLICIES
from retrieval_attn_eval.bench.method import Decoded, Method, OnToken, forward_logits
from retrieval_attn_eval.bench.place import fill, fill_static
from retrieval_attn_eval.bench.resident import ResidentCache, resident_attention
from retrieval_attn_eval.bench.source import Source

GRAPH_WARM_UP = 3


class OwnLoop(Method):
    """A plain greedy loop over the model's forward with another cache."""

    _cache: Any

    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        step, how = self._stepper()
        chosen = self._first().argmax(dim=-1)
        tokens, logits = [chosen], []
        deadline = time.perf_counter() + seconds
        if on_token is not None:
            on_token(chosen.tolist())
        while len(tokens) < steps and time.perf_counter() < deadline:
            out = step(chosen[:, None], self.position)
            self.position += 1
            if keep:
                logits.append(out.to(torch.float32, copy=True))  # a graph's next step writes into the same memory
            chosen = out.argmax(dim=-1)
            tokens.append(chosen)
            values = chosen.tolist()  # waits for the device, as a caller who shows text does
            if on_token is not None:
                on_token(values)
        return Decoded(torch.stack(tokens, dim=1), logits, how)

    def _stepper(self) -> tuple[Callable[[Tensor, int], Tensor], str]:
        return self._eager, "eager"

    def _eager(self, ids: Tensor, position: int) -> Tensor:
        places = torch.full((self._batch, 1), position, device=ids.device)
        return forward_logits(self.model, self._cache, ids, places)

    def _hold(self, source: Source) -> None:
        self._batch, self.position = source.batch, source.tokens


class FullEager(OwnLoop):
    """transformers' DynamicCache on the device, its own loop in Python."""

    def device_need(self, source: Source, tokens: int) -> int:
        # every step copies a layer's keys and values, the old ones still being there
        kept = super().device_need(source, tokens)
        return kept + kept // source.num_layers

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        self._cache = fill(DynamicCache(config=self.model.config), source, self.spans(source.tokens))


class OrderedOffload(DynamicCache):
    """transformers' offloaded cache, whose copies to the device wait for what the device was given before them.

    In transformers 5.17 the stream that computes waits for the one that brings layers back, never the other way round:
    a layer is read from page-locked memory that its own copy to the host may not have reached yet, and written over
    memory that the layer before it may still be read from. It goes wrong where the device is behind, with few layers
    above all, whose copies there and back follow each other at once.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config, offloading=True)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        # before a layer's own work: while it computes, the next one still arrives
        self.prefetch_stream.wait_stream(torch.accelerator.current_stream())
        super().prefetch(layer_idx, only_non_sliding)


class Offloaded(FullEager):
    """transformers' offloaded cache: keys on the host, a layer at a time visits the device."""

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return None if device.type == "cuda" else "transformers' offloaded cache needs a GPU"

    def device_need(self, source: Source, tokens: int) -> int:
        return 4 * source.batch * (source.tokens + tokens) * source.token_bytes // source.num_layers

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        cache = OrderedOffload(self.model.config)
        self._cache = fill(cache, source, self.spans(source.tokens))
        self._kept = source.batch * source.tokens * source.token_bytes

    def host_bytes_touched(self, source: Source) -> int:
        return source.batch * source.tokens * source.token_bytes

    @property
    def host_bytes(self) -> int:
        return self._kept


class Quantized(FullEager):
    """transformers' quantized cache on the device: 4 bits, by quanto or hqq."""

    # 4 bits change the logits of a random model a good deal; far-off answers are still caught
    tolerance = 0.35

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return None if _quantizer() else "not installed: needs optimum-quanto or hqq"

    def device_need(self, source: Source, tokens: int) -> int:
        kept = source.batch * (source.tokens + tokens) * source.token_bytes
        return kept * self._bits // (8 * source.model.dtype.itemsize) * 9 // 8 + 4 * kept // source.num_layers

    @property
    def _bits(self) -> int:
        return int(self.spec.options.get("nbits", 4))

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        backend = str(self.spec.options.get("backend") or _quantizer())
        axis = 0 if backend == "quanto" else 1
        cache = QuantizedCache(
            backend,
            self.model.config,
            nbits=self._bits,
            axis_key=axis,
            axis_value=axis,
            residual_length=max(room + 1, 128),
        )
        self._cache = fill(cache, source, self.spans(source.tokens))

    def device_bytes_touched(self, source: Source) -> int:
        return super().device_bytes_touched(source) * self._bits // (8 * source.model.dtype.itemsize)


class FullGraph(OwnLoop):
    """transformers' StaticCache on the device, the whole step in one plain CUDA graph."""

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        # one decode to check or time, one to profile, and what warms up the capture
        cache = StaticCache(config=self.model.config, max_cache_len=source.tokens + 3 * room + 2 * GRAPH_WARM_UP)
        self._cache = fill_static(cache, source, self.spans(source.tokens))
        self._graph: Graphed | None = None

    def _stepper(self) -> tuple[Callable[[Tensor, int], Tensor], str]:
        if self.model.device.type != "cuda":
            return self._eager, "eager: no CUDA graphs here"
        if self._graph is None:
            self._graph = Graphed(self.model, self._cache, self._batch, self.position, self._rewind)
        return self._graph, "graph"

    def _rewind(self) -> None:
        """Forget the steps that warmed up the capture."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self.position)


class FullResident(FullGraph):
    """Full attention over keys on the device by this package's flash backend, in one CUDA graph: nothing is repeated
    or copied, so this is the baseline to beat where keys fit.
    """

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        self._cache = ResidentCache(source, self.spans(source.tokens), 3 * room + 2 * GRAPH_WARM_UP)
        self._graph = None

    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        with resident_attention(self.model):
            return super().decode(steps, on_token, keep=keep, seconds=seconds)

    def _rewind(self) -> None:
        self._cache.rewind(self.position)


class Graphed:
    """A decode step of a model with a cache of fixed addresses, captured once and replayed."""

    def __init__(self, model: Any, cache: Any, batch: int, position: int, rewind: Callable[[], None]) -> None:
        device = model.device
        self._ids = torch.ones(batch, 1, dtype=torch.long, device=device)
        self._places = torch.full((batch, 1), position, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARM_UP):
                forward_logits(model, cache, self._ids, self._places)
        torch.cuda.current_stream(device).wait_stream(side)
        rewind()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = forward_logits(model, cache, self._ids, self._places)
        rewind()

    def __call__(self, ids: Tensor, position: int) -> Tensor:
        self._ids.copy_(ids)
        self._places.fill_(position)
        self._graph.replay()
        return self._out


class ByPolicy(OwnLoop):
    """A published method that chooses tokens by a rule of its own, as in the evaluation, for one sequence.

    Keys lie on the device, the forward runs in Python, the parameters are the paper's. The short context that answers
    are checked on is smaller than its budget: there it is full attention.
    """

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        name = self.spec.name
        cache = ContextCache(self.model, {name: policies_of(POLICIES[name](), self.model)}, self.config)
        source.read_into(cache)
        cache.context_tokens = source.tokens
        cache.act(name)
        cache.start()
        self._cache = cache

    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        with torch.no_grad(), using_retrieval(self.model, self.config.prefill_chunk):
            return super().decode(steps, on_token, keep=keep, seconds=seconds)

    def device_bytes_touched(self, source: Source) -> int:
        """As the policies counted them."""
        meters = self._cache.meters()
        read = sum(meter.read / max(1, meter.queries) for meter in meters) / len(meters)
        return int(read * source.token_bytes)


def _quantizer() -> str | None:
    for backend, package in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        try:
            if importlib.util.find_spec(package) is not None:
                return backend
        except ModuleNotFoundError:
            continue
    return None
