"""Record one forward of a batch as a graph, after the checks that only a trial can make."""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import PendingLayer
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import CacheMismatchError, CaptureError, RetrievalAttentionError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.model.fused.layers import fused_layers
from retrieval_attn.model.fused.norms import fused_norms
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.layers import experts_of_one_token
from retrieval_attn.runner.graph.decoder import CapturedStep, GraphDecoder, attending
from retrieval_attn.runner.graph.slot import Buffers
from retrieval_attn.runner.graph.states import RecordedState

log = logging.getLogger(__name__)


class Recordable(Protocol):
    """A batch of slots whose step can be recorded.

    Attributes:
        cache: the model's `past_key_values`, whose layers record attention.
        greedy: the next step's token is the likeliest one; False: the caller sets it after each step.
    """

    greedy: bool

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def cache(self) -> Any: ...

    @property
    def decoder(self) -> GraphDecoder: ...

    @property
    def states(self) -> Sequence[RecordedState]: ...

    def attend(
        self, number: int, query: Tensor, new: Buffers, scoring: Scoring, sinks: Tensor | None, *, retrieving: bool
    ) -> Tensor:
        """Record the attention of a layer."""

    def upload_spans(self) -> None:
        """Copy the positions of the windows' tokens to the device."""

    def drop_pending(self) -> None:
        """Drop keys and values noted by a forward that was recorded or failed."""

    def add_tail(self) -> None:
        """Add to the caches' layers the tail mass estimated by replays since the last call."""

    def drop_tail(self) -> None:
        """Drop the tail mass estimated since `add_tail`."""


def capture(binding: Recordable, token: Tensor, position: Tensor) -> CapturedStep:
    """Record the step, for these inputs, token and position (batch,); afterwards everything is as before it.

    The passes before it compile kernels and take the libraries' workspaces, too. Raises CaptureError for a step that
    cannot be recorded, BackendError where a host search failed.
    """
    runtime, memory = binding.decoder.runtime, binding.decoder.memory
    outputs: list[Tensor] = []

    def restart() -> None:
        binding.decoder.states.undo()
        binding.upload_spans()
        memory.place(token, position)

    def record() -> None:
        binding.decoder.begin_step()
        logits = _forward(binding)
        for state in binding.states:
            state.require_in_place()
        if not outputs:  # in the first trial: a tensor made while a graph is captured would lie in the graphs' pool
            outputs.append(torch.empty(logits.shape, dtype=torch.float32, device=logits.device))
        outputs[0].copy_(logits)
        memory.finish_step(outputs[0] if binding.greedy else None)

    binding.add_tail()
    began = time.perf_counter()
    with _recording(binding):
        try:
            fused, seen = time.perf_counter(), []
            for shift in (0, binding.cache.batch.columns // 2):
                restart()
                _try_shifted(binding, shift, record)
                seen.append(outputs[0].clone())
            binding.decoder.raise_host_error()
            # no difference at all but where a model's own kernels add in any order
            known = 1e-4 if binding.model.dtype == torch.float32 else 1e-2
            tolerance = known * float(seen[0].nan_to_num(0.0, 0.0, 0.0).abs().max())  # a row may not be finite
            if not torch.allclose(seen[0], seen[1], rtol=0, atol=tolerance, equal_nan=True):
                raise CaptureError(
                    "the model reads the number of cached tokens on the CPU, which a graph would repeat unchanged"
                )
            restart()
            tried = time.perf_counter()
            captured = CapturedStep(runtime.capture(record), outputs[0])
            log.info(
                "captured a step of %d rows in %.1f s: fused layers %.1f, two trials %.1f, the graph %.1f",
                len(outputs[0]), time.perf_counter() - began, fused - began, tried - fused, time.perf_counter() - tried,
            )  # fmt: skip
            return captured
        except RetrievalAttentionError:
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            runtime.synchronize()
            restart()
            binding.drop_tail()  # trials do not count


def _try_shifted(binding: Recordable, shift: int, record: Callable[[], None]) -> None:
    """Run eagerly what is to be recorded, with a cache that claims to hold `shift` tokens fewer.

    What follows from that number on the CPU would be frozen in a graph; a model that uses none gives equal logits.
    """
    batch = binding.cache.batch
    batch.columns -= shift
    try:
        binding.decoder.runtime.warm_up(record)
    finally:
        batch.columns += shift
        binding.drop_pending()


def _forward(binding: Recordable) -> Tensor:
    """Logits of the last column, (batch, vocabulary) in the model's dtype."""
    model, memory = binding.model, binding.decoder.memory
    arguments: dict[str, Any] = {
        "input_ids": memory.token,
        "position_ids": memory.position,
        "past_key_values": binding.cache,
        "use_cache": True,
        "return_dict": True,
    }
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    logits: Tensor = model(**arguments).logits[:, -1]
    return logits


@contextmanager
def _recording(binding: Recordable) -> Iterator[None]:
    """Run the model's layers as a captured step does."""
    model, rows = binding.model, binding.decoder.memory.token.shape[0]
    with torch.no_grad(), experts_of_one_token(model, rows), fused_layers(model, rows), fused_norms(model):
        yield


class RecordedCache(Cache):
    """`past_key_values` of the recorded forward. batch.columns: padded length that it reports."""

    on_layer: Callable[[], object] | None = None

    def __init__(self, graph: Recordable, like: RetrievalCache, states: Iterable[StateLayer]) -> None:
        """like: a cache with the layers of all sequences. states: layers with a state of all sequences, in order."""
        numbers = {number: row for row, (number, _) in enumerate(attending(like))}
        held: list[Any] = list(like.layers)
        own = iter(states)
        layers: list[Any] = [
            RecordedLayer(graph, numbers[number], isinstance(layer, RetrievalLayer), layer.is_sliding)
            if number in numbers
            else next(own)
            for number, layer in enumerate(held)
        ]
        super().__init__(layers=layers)
        self.batch = SimpleNamespace(columns=0)
        for layer in layers:
            if isinstance(layer, RecordedLayer):
                layer.batch = self.batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Note new keys and values (rows, kv_heads, 1, dim) and return handles."""
        if layer_idx >= len(self.layers):
            raise CacheMismatchError(
                f"The model writes keys of layer {layer_idx}, but the caches of these rows have {len(self.layers)} "
                "layers; create the caches for this model."
            )
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the padded length of the batch."""
        return int(self.batch.columns)


class RecordedLayer(PendingLayer):
    """One layer of all sequences, as transformers sees it: new keys and values are (rows, kv_heads, 1, dim)."""

    def __init__(self, graph: Recordable, number: int, retrieving: bool, sliding: bool) -> None:
        super().__init__()
        self._graph = weakref.ref(graph)  # a cycle would keep the graph's buffers until Python collects it
        self._number, self._retrieving, self.is_sliding = number, retrieving, sliding
        self.batch: Any = None

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
        """Record the attention of each sequence's new token, (rows, q_heads, 1, value_dim)."""
        new = self.take_pending(module)
        graph, scoring = self._graph(), Scoring(scale, softcap)
        assert graph is not None, "a recorded forward of a graph that was dropped"
        return graph.attend(self._number, query, new, scoring, sink_logits, retrieving=self._retrieving)

    def get_seq_length(self) -> int:
        return int(self.batch.columns)
