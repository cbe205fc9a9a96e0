"""What a decode method is, and this package's own: retrieval, and sinks and window only, in the loop that users run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.testing import IndexSpec, LayerStats, PromptState, TokenChoice, load_kernels, run, using_retrieval
from retrieval_attn_eval.bench.place import place
from retrieval_attn_eval.bench.source import Source, Span

OnToken = Callable[[list[int]], None]


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
    """This package: sinks and window on the device, retrieve keys of the rest through an index."""

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
        criteria: Any = StoppingCriteriaList([MaxLengthCriteria(1 + steps), MaxTimeCriteria(seconds)])
        start = torch.zeros(self._batch, 1, dtype=torch.long, device=self.model.device)
        with using_retrieval(self.model, self.config.prefill_chunk):
            position = torch.full((self._batch,), self.position - 1, device=self.model.device)
            choice = TokenChoice(criteria, keep_logits=keep)
            prompt = PromptState(start, self._first(), position)
            done = run(self.model, cache, prompt, choice, on_token=on_token)
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
        self.hold(
            place(self.model, RetrievalCache(self.model, self.config), source, self.spans(source.tokens)), source.tokens
        )


@torch.no_grad()
def forward_logits(model: Any, cache: Any, ids: Tensor, places: Tensor) -> Tensor:
    """Logits (batch, vocabulary) after ids (batch, 1) at positions (batch, 1)."""
    out = model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1]
    return logits


def compile_for(config: Config, dtype: torch.dtype) -> None:
    """Compile what the first token would wait for."""
    from retrieval_attn.testing import host_format

    load_kernels(host_format(config.host_dtype, dtype), IndexSpec.of(config.index, config.index_options))
