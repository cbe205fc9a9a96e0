"""Recording one forward of a bound cache as a graph, after the checks that only a trial can make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.errors import CaptureError, RetrievalAttentionError
from retrieval_attn.model.fused.layers import fused_layers
from retrieval_attn.model.fused.norms import fused_norms
from retrieval_attn.model.layers import experts_of_one_token
from retrieval_attn.runner.graph.decoder import CapturedStep, GraphDecoder
from retrieval_attn.runner.graph.states import GraphState


class RecordedLayer(Protocol):
    """A layer that attends, while its decoder is bound."""

    def drop_pending(self) -> None:
        """A forward that recorded, or tried to, is over."""

    def add_tail(self) -> None:
        """Add to the caches' layers what replays have estimated since the last call."""

    def drop_tail(self) -> None:
        """Forget what was estimated since `add_tail`."""


class Recordable(Protocol):
    """Object that is bound to a decoder: one cache, or a row for each of several.

    cache: the model's `past_key_values`, of which attention finds its way to the layers while `recording`. chooses: the
    next step's token is the likeliest one; False: the caller sets it, after each step.
    """

    recording: bool
    chooses: bool

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def cache(self) -> Any: ...

    @property
    def decoder(self) -> GraphDecoder: ...

    @property
    def layers(self) -> Sequence[RecordedLayer]: ...

    @property
    def states(self) -> Sequence[GraphState]: ...

    def upload_spans(self) -> None:
        """Tell the device where the windows' tokens lie."""


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
        memory.finish_step(outputs[0] if binding.chooses else None)

    for bound in binding.layers:
        bound.add_tail()
    with _recording(binding):
        try:
            seen = []
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
            return CapturedStep(runtime.capture(record), outputs[0])
        except RetrievalAttentionError:
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            runtime.synchronize()
            restart()
            for bound in binding.layers:  # trials have not happened
                bound.drop_tail()


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
        for bound in binding.layers:
            bound.drop_pending()


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
    """Attention goes to the bound layers' `attend`, and nothing else watches."""
    cache = binding.cache
    on_layer, cache.on_layer = cache.on_layer, None
    binding.recording = True
    try:
        model, rows = binding.model, binding.decoder.memory.token.shape[0]
        with torch.no_grad(), experts_of_one_token(model, rows), fused_layers(model, rows), fused_norms(model):
            yield
    finally:
        binding.recording = False
        cache.on_layer = on_layer
