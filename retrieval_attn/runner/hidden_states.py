"""Where the hidden states of a prompt lie while a model reads it, and what the modules outside of its layers do with
them.

On the device, or, where a long prompt's do not fit there, in host memory (`offload/hidden.py`): the embedding then
writes them there in chunks, every decoder layer and the final norm bring chunks up and down (`runner/prefill.py`), and
the output's matrix gets the rows that it is asked for. Cosines and sines are made on the device as ever.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrieval_attn.attention.layer import LayeredCache
from retrieval_attn.index.auto import SKETCH_FROM
from retrieval_attn.memory.device import DeviceLayout
from retrieval_attn.memory.device_room import reading_layout, whole_device_bytes
from retrieval_attn.model.placement import input_device, why_not_on_host
from retrieval_attn.offload.hidden import DeviceHiddenRows, Ferry, HiddenRows, HostHiddenRows

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")


class _Forward(threading.local):
    """Hidden states of one forward. A thread runs one at a time, and other threads may run theirs at the same time."""

    def __init__(self) -> None:
        self.latest: weakref.ref[Tensor] | None = None
        self.layout = DeviceLayout()
        self.ferry: Ferry | None = None
        self.chunk: int | None = None


class HiddenStates:
    """The hidden states on their way through the layers of one model.

    A wrapped layer may write its output over its input, but only when the input is the output of the layer before it,
    or of the model's own embedding (models keep that until they return, and look at it no more), and no other object
    holds it: not the caller's embeddings, and not what a forward hook recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._forward = _Forward()

    def __getstate__(self) -> dict[str, Any]:
        """A model that is enabled can be copied and saved whole; weak references cannot."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    @property
    def model(self) -> Any:
        """The model whose layers are wrapped."""
        return self._model()

    @property
    def layout(self) -> DeviceLayout:
        """Layout of the calling thread's current forward."""
        return self._forward.layout

    @property
    def ferry(self) -> Ferry | None:
        """Ferry of chunks to and from the host in this thread's current forward; None: they are on the device."""
        return self._forward.ferry

    def computed_on(self, hidden_states: Tensor) -> torch.device:
        """The device of the layers that `hidden_states` go through, wherever these lie."""
        return hidden_states.device if self.ferry is None else self.ferry.device

    @property
    def chunk(self) -> int | None:
        """Tokens that go through a layer at once in the calling thread's forward; None: as many as is asked for."""
        return self._forward.chunk

    def shrink(self, chunk: int) -> None:
        """Set the tokens per chunk for the rest of the calling thread's forward."""
        self._forward.chunk = chunk

    def begin(self, cache: Any, tokens: int, batch: int, chunk: int) -> None:
        """A forward of `tokens` tokens of `batch` rows begins, in chunks of `chunk`, or of fewer tokens where room for
        codes of their keys takes that. Raises UnsupportedModelError.
        """
        cache.index.make_room(tokens, batch)
        cache.index.decide(tokens, batch)
        if not cache.get_seq_length() and cache.index.chunk is not None:
            self._forward.chunk = chunk = min(chunk, cache.index.chunk)
        if tokens <= chunk:
            return
        config = cache.index.config.replace(prefill_chunk=chunk)
        held, free = cache.get_seq_length() + tokens, whole_device_bytes(self.model)
        movable = not torch.is_grad_enabled() and why_not_on_host(self.model) is None
        self._forward.layout = reading_layout(self.model.config, config, held, free, batch, hidden_movable=movable)
        if self.layout.hidden_on_host:
            log.info("hidden states of %d tokens lie in host memory while they are read", tokens)
            self._forward.ferry = Ferry(input_device(self.model), tokens)

    def end(self) -> None:
        """The forward is over, or failed."""
        ferry = self.ferry
        self._forward.ferry, self._forward.layout, self._forward.chunk = None, DeviceLayout(), None
        if ferry is not None:
            ferry.close()

    def rows(self, hidden_states: Tensor, seen: bool = False) -> HiddenRows:
        """`hidden_states` as a module reads and writes them. seen: see `passed`."""
        overwrite = not seen and self.may_overwrite(hidden_states)
        if self.ferry is None or hidden_states.device.type != "cpu":
            return DeviceHiddenRows(hidden_states, overwrite)
        return HostHiddenRows(self.ferry, hidden_states, overwrite)

    def may_overwrite(self, hidden_states: Tensor) -> bool:
        """Whether `hidden_states` is dead once it has been read."""
        latest = self._forward.latest
        return not torch.is_grad_enabled() and latest is not None and latest() is hidden_states

    def passed(self, out: Tensor, module: nn.Module, seen: bool) -> None:
        """`out` leaves `module`. seen: other code may keep it (forward hooks, output_hidden_states)."""
        seen = seen or bool(module._forward_hooks)
        self._forward.latest = None if seen else weakref.ref(out)
        if seen and self.ferry is not None:
            self.ferry.finish()


def argument_of(kind: type[Kind], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """Return the argument of a forward that has a type, None without one."""
    return next((item for item in (*args, *kwargs.values()) if isinstance(item, kind)), None)


class NotedHolder:
    """The forward of what holds the decoder layers: a long prompt begins and ends here."""

    def __init__(self, holder: nn.Module, states: HiddenStates, chunk: Any) -> None:
        """chunk: gives the tokens that go through a layer at once."""
        self._original, self._states, self._chunk = holder.forward, states, chunk

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a compiled forward (torch.compile) a pass with a retrieval cache runs eagerly, after a graph break."""
        if argument_of(LayeredCache, args, kwargs) is None:
            return self._original(*args, **kwargs)
        return torch._dynamo.disable(self._pass)(*args, **kwargs)  # 20 us; of the cache nothing can be traced

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        cache = argument_of(LayeredCache, args, kwargs)
        given = (*args[:1], *(kwargs.get(name) for name in ("input_ids", "inputs_embeds")))
        ids = next((item for item in given if isinstance(item, Tensor)), None)
        if cache is None or ids is None or ids.ndim < 2 or ids.shape[1] <= min(self._chunk(), SKETCH_FROM - 1):
            return self._original(*args, **kwargs)
        try:
            self._states.begin(cache, ids.shape[1], len(ids), self._chunk())
            return self._original(*args, **kwargs)
        finally:
            self._states.end()


class NotedEmbedding:
    """A token embedding's forward whose output the first layer may overwrite."""

    def __init__(self, embedding: nn.Module, states: HiddenStates, chunk: Any) -> None:
        self._embedding, self._original, self._states, self._chunk = embedding, embedding.forward, states, chunk

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ferry = self._states.ferry
        if ferry is None:
            out = self._original(ids, *args, **kwargs)
        else:
            rows = HostHiddenRows(ferry, None, overwrite=False)
            for start in range(0, ids.shape[1], self._chunk()):
                stop = min(start + self._chunk(), ids.shape[1])
                part = self._original(ids[:, start:stop], *args, **kwargs)
                rows.make_room(part)
                rows.write(start, stop, part)
            out = rows.result()
        self._states.passed(out, self._embedding, seen=False)
        return out


class NotedRotary:
    """A rotary embedding's forward that computes where it is told, also when hidden states lie on the host."""

    def __init__(self, rotary: nn.Module, states: HiddenStates) -> None:
        self._original, self._states = rotary.forward, states

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        ferry = self._states.ferry
        if ferry is None or hidden_states.device == ferry.device:
            return self._original(hidden_states, *args, **kwargs)
        args = tuple(on_device(item, ferry.device) for item in args)
        kwargs = {name: on_device(item, ferry.device) for name, item in kwargs.items()}
        return self._original(hidden_states[:, :1].to(ferry.device), *args, **kwargs)


class NotedHead:
    """The forward of the output's matrix, for hidden states that lie on the host."""

    def __init__(self, head: nn.Module) -> None:
        self._head, self._original = head, head.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight: Any = self._head.weight
        if hidden_states.device.type == "cpu" and weight.device.type == "cuda":
            hidden_states = hidden_states.to(weight.device)
        return self._original(hidden_states, *args, **kwargs)


def on_device(item: Any, device: torch.device) -> Any:
    """A tensor on `device`, tuples of such with it; anything else as it is."""
    if isinstance(item, tuple):
        return tuple(on_device(member, device) for member in item)
    return item.to(device) if isinstance(item, Tensor) else item
