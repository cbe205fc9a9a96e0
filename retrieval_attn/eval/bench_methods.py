"""The decode methods that are compared: each holds a context and generates tokens greedily after it.

Retrieval and sinks-and-window run the loop that `Context` and `generate` run. The others are transformers' own caches
under transformers' own attention, and full attention over keys on the device by this package's flash backend.
"""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.generation import LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from retrieval_attn.cache import RetrievalCache
from retrieval_attn.cache_layer import LayerStats
from retrieval_attn.config import Config
from retrieval_attn.cpu import prepare
from retrieval_attn.decode import run
from retrieval_attn.errors import ConfigError
from retrieval_attn.eval.bench_keys import Source
from retrieval_attn.eval.bench_place import Span, fill, fill_static
from retrieval_attn.eval.bench_resident import ResidentCache, resident_attention
from retrieval_attn.index.base import check_kind
from retrieval_attn.switch import using_retrieval

OnToken = Callable[[list[int]], None]
GRAPH_WARM_UP = 3


@dataclass
class Decoded:
    """tokens (batch, n) chosen one after the other; logits (batch, vocabulary) after each but the last, if kept.

    how: "graph", "eager" or why there is no graph.
    """

    tokens: Tensor
    logits: list[Tensor]
    how: str


@dataclass(frozen=True)
class MethodSpec:
    """A method as it is named on the command line: `name` or `name:option=value:option=value`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


class Method(ABC):
    """One way to hold a context and decode after it."""

    tolerance: float | None = None
    """Largest relative logit error against the definition; None: that of the dtype."""

    def __init__(self, spec: MethodSpec, model: Any, config: Config) -> None:
        self.spec, self.model, self.config = spec, model, config
        self.position = 0

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why the method cannot run here, None if it can."""
        return None

    def spans(self, tokens: int) -> list[Span]:
        """What of the context the method attends to, by its definition."""
        return [(0, tokens)]

    def device_need(self, source: Source, tokens: int) -> int:
        """Bytes on the device while decoding `tokens` more, weights and CUDA context not counted."""
        return source.batch * (source.tokens + tokens) * source.token_bytes

    @abstractmethod
    def prepare(self, source: Source, room: int) -> None:
        """Hold the context, with room for `room` more tokens."""

    @abstractmethod
    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        """Choose `steps` tokens, the first of which is given; fewer when `seconds` are over. The context may grow."""

    def device_bytes_touched(self, source: Source) -> int:
        """Bytes of keys and values read on the device per step."""
        return source.batch * source.tokens * source.token_bytes

    def host_bytes_touched(self, source: Source) -> int:
        """Bytes of keys and values read on the host, or moved from it, per step."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the context takes."""
        return 0

    @property
    def work(self) -> LayerStats | None:
        """What the host did in the last `decode`, where this package's layers count it."""
        return None

    def _first(self) -> Tensor:
        """Logits whose best token is 1."""
        logits = torch.zeros(self._batch, self.model.config.get_text_config(decoder=True).vocab_size)
        logits[:, 1] = 1
        return logits.to(self.model.device)

    _batch = 1


class Retrieval(Method):
    """This package: sinks and window on the device, top_k keys of the rest through an index."""

    _cache: RetrievalCache

    def prepare(self, source: Source, room: int) -> None:
        self.config = self.config.replace(spill=max(room + 1, 128))  # no token pays for a block of others
        compile_for(self.config, self.model.dtype)
        self.hold(source.retrieval(self.config), source.tokens)

    def hold(self, cache: RetrievalCache, tokens: int) -> None:
        """Decode after this cache, which holds `tokens` tokens."""
        layer: Any = cache.layers[0]
        self._cache, self._batch, self.position = cache, layer.batch_size, tokens

    @property
    def cache(self) -> RetrievalCache:
        """The cache that every `decode` continues a fork of."""
        return self._cache

    def device_need(self, source: Source, tokens: int) -> int:
        # while a layer is placed or read: all its keys, and the windows of all layers
        window = self.config.sink + self.config.window + max(tokens, 128)
        return source.batch * (
            2 * source.tokens * source.token_bytes // source.num_layers + window * source.token_bytes
        )

    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        cache = self._cache.fork()
        criteria: Any = StoppingCriteriaList([MaxLengthCriteria(1 + steps), _Until(time.perf_counter() + seconds)])
        start = torch.zeros(self._batch, 1, dtype=torch.long, device=self.model.device)
        with using_retrieval(self.model, self.config.prefill_chunk):
            done = run(
                self.model,
                cache,
                start,
                self._first(),
                mask=None,
                position=torch.full((self._batch,), self.position - 1, device=self.model.device),
                processors=LogitsProcessorList(),
                criteria=criteria,
                do_sample=False,
                pad_id=0,
                on_token=on_token,
                keep_logits=keep,
            )
        self._work = cache.stats()
        return Decoded(done.sequences[:, 1:], done.logits[1:], str(getattr(done, "how", "eager")))

    def device_bytes_touched(self, source: Source) -> int:
        return source.batch * min(source.tokens, self.config.sink + self.config.window) * source.token_bytes

    @property
    def host_bytes(self) -> int:
        return self._cache.host_nbytes

    @property
    def work(self) -> LayerStats | None:
        return self._work


class Static(Retrieval):
    """StreamingLLM: sinks and window only, under the same loop."""

    def spans(self, tokens: int) -> list[Span]:
        sink, window = self.config.sink, self.config.window
        return [(0, tokens)] if tokens <= sink + window else [(0, sink), (tokens - window, tokens)]

    def prepare(self, source: Source, room: int) -> None:
        self.config = self.config.replace(spill=max(room + 1, 128), index="flat", index_options={})
        compile_for(self.config, self.model.dtype)
        self.hold(source.part(self.config, self.spans(source.tokens)), source.tokens)


class _OwnLoop(Method):
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
                logits.append(out.float())
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


class FullEager(_OwnLoop):
    """transformers' DynamicCache on the device, its own loop in Python."""

    def device_need(self, source: Source, tokens: int) -> int:
        # every step copies a layer's keys and values, the old ones still being there
        kept = super().device_need(source, tokens)
        return kept + kept // source.num_layers

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        self._cache = fill(DynamicCache(config=self.model.config), source, self.spans(source.tokens))


class Offloaded(FullEager):
    """transformers' offloaded cache: keys on the host, a layer at a time visits the device."""

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return None if device.type == "cuda" else "transformers' offloaded cache needs a GPU"

    def device_need(self, source: Source, tokens: int) -> int:
        return 4 * source.batch * (source.tokens + tokens) * source.token_bytes // source.num_layers

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        cache = DynamicCache(config=self.model.config, offloading=True)
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


class FullGraph(_OwnLoop):
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


METHODS: dict[str, type[Method]] = {
    "static": Static,
    "full-resident": FullResident,
    "full-graph": FullGraph,
    "full-eager": FullEager,
    "offloaded": Offloaded,
    "quantized": Quantized,
}
DEFAULT = "roargraph,flat,ivf,static,full-resident,full-graph,full-eager,offloaded,quantized"
SHORT = {"flat-int8": ("flat", {"codes": "int8"})}


def parse(text: str) -> list[MethodSpec]:
    """Methods of a comma list such as "roargraph:beam=250,static". Raises ConfigError for names not known."""
    specs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, *pairs = item.split(":")
        options: dict[str, Any] = {}
        for pair in pairs:
            key, sign, value = pair.partition("=")
            if not sign:
                raise ConfigError(f"--methods {item}: options are written name=value, got {pair!r}")
            options[key] = _value(value)
        if name not in METHODS:
            kind, given = SHORT.get(name, (name, {}))
            try:
                check_kind(kind, {**given, **options})
            except ConfigError as error:
                raise ConfigError(f"--methods {item}: {error}, or a method: {', '.join(METHODS)}") from error
        elif options and name != "quantized":
            raise ConfigError(f"--methods {item}: {name} takes no options")
        specs.append(MethodSpec(name, options))
    if not specs:
        raise ConfigError(f"--methods names none; the default is {DEFAULT}")
    return specs


def make(spec: MethodSpec, model: Any, config: Config) -> Method:
    """The method of a spec; an index kind is retrieval with that index."""
    if spec.name in METHODS:
        return METHODS[spec.name](spec, model, config)
    kind, given = SHORT.get(spec.name, (spec.name, {}))
    return Retrieval(spec, model, config.replace(index=kind, index_options={**given, **spec.options}))


@torch.no_grad()
def forward_logits(model: Any, cache: Any, ids: Tensor, places: Tensor) -> Tensor:
    """Logits (batch, vocabulary) after ids (batch, 1) at positions (batch, 1)."""
    out = model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1]
    return logits


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _quantizer() -> str | None:
    for backend, package in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        try:
            if importlib.util.find_spec(package) is not None:
                return backend
        except ModuleNotFoundError:
            continue
    return None


def compile_for(config: Config, dtype: torch.dtype) -> None:
    """Compile what the first token would wait for."""
    from retrieval_attn.transfer import host_format

    prepare(host_format(config.host_dtype, dtype), config.index, dict(config.index_options))


class _Until(StoppingCriteria):
    """Stops every row when the time is over."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        over = time.perf_counter() >= self._deadline
        return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)
