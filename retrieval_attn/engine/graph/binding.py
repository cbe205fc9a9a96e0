"""A cache bound to a decoder: its windows lie in the decoder's buffers while graphs append tokens to them.

The windows learn of appended tokens late: `commit` counts a token, `sync` tells the layers of all that were counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.engine.graph.decoder import GraphDecoder, StepKind, signature
from retrieval_attn.engine.graph.layer import GraphLayer
from retrieval_attn.engine.graph.memory import ordinary_tensors
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.index.task import descriptor as words


class Binding:
    """See the module.

    layers: the bound ones. room: tokens that every window still takes. stale: something else changed the cache, so
    `refresh` comes before the next step. recording: a step is being recorded. kind: what a graph is captured for now.
    """

    @ordinary_tensors
    def __init__(self, decoder: GraphDecoder, model: PreTrainedModel, cache: RetrievalCache) -> None:
        """Bind `cache`. Raises CaptureError; the cache then is as it was."""
        self.decoder, self.model, self.cache = decoder, model, cache
        self.layers: list[GraphLayer] = []
        self.recording, self.stale = False, True
        self.room = self._unsynced = 0
        self._work = np.zeros((len(decoder.slots), words.METER_WORDS), np.int64)
        self._nanoseconds = np.zeros(len(decoder.slots), np.int64)
        self.kind = StepKind(False, False, 0)
        try:
            self.refresh()
        except BaseException:
            self.unbind()
            raise

    @property
    def runtime(self) -> Runtime:
        """Where steps are recorded and replayed."""
        return self.decoder.runtime

    @property
    def max_coded_keys(self) -> int:
        """The largest of all layers, see `StepKind`."""
        return max(slot.max_coded_keys for slot in self.decoder.slots)

    def refresh(self) -> None:
        """Bind the cache's layers as they are now. Raises CaptureError."""
        cached: list[Any] = list(self.cache.layers)
        for layer in cached:
            if isinstance(layer, RetrievalLayer):
                layer.finish_index()
        if signature(self.model, self.cache, self.runtime) != self.decoder.signature:
            raise CaptureError("the cache's shapes or the model's weights changed")
        for number, (slot, layer) in enumerate(zip(self.decoder.slots, cached, strict=True)):
            bound = GraphLayer(self, slot, layer)
            self.layers[number : number + 1] = [bound]  # before it changes anything: `unbind` undoes what is listed
            bound.move_in()
        self._replan(self.layers)
        self.stale = False

    def make_room(self) -> None:
        """Some window is full: move its oldest tokens to the host, as eager decoding does."""
        self.sync()
        full = [layer for layer in self.layers if layer.window.room == 0]
        for layer in full:
            layer.layer.spill()
        self._replan(full)

    def upload_spans(self) -> None:
        """Tell the device where the windows' tokens lie."""
        self.decoder.memory.upload_spans([layer.window.span for layer in self.layers])

    def update_kind(self) -> None:
        """Note the keys that are searched now: it is known once the host's parts are planned."""
        self.kind = self.kind._replace(max_coded_keys=self.max_coded_keys if self.kind.retrieves else 0)

    def commit(self, work: np.ndarray[Any, Any], nanoseconds: np.ndarray[Any, Any]) -> None:
        """Count the token of a step that is over. work, nanoseconds: as `StepMemory.host_meters` gives them."""
        self._work += work
        self._nanoseconds += nanoseconds
        self.cache.batch.commit(1)
        self.room -= 1
        self._unsynced += 1

    def sync(self) -> None:
        """Tell the layers of the tokens that were committed since the last time, and of the host's work for them."""
        count, self._unsynced = self._unsynced, 0
        if not count:
            return
        for bound, work, nanoseconds in zip(self.layers, self._work.tolist(), self._nanoseconds.tolist(), strict=True):
            stats = bound.layer.stats
            bound.window.note_appended(count)
            search, attend = work[words.SEARCH_TIME], work[words.ATTEND_TIME]
            seconds, share = nanoseconds / 1e9, search / max(1, search + attend)
            stats.host_seconds += seconds
            stats.search_seconds += seconds * share
            stats.attend_seconds += seconds * (1 - share)
            stats.keys_scanned += work[words.SCANNED]
            stats.bytes_read += work[words.BYTES]
        self._work[:] = 0
        self._nanoseconds[:] = 0

    def invalidate(self) -> None:
        """Something else changes the cache, or the device counts otherwise: `sync`, and `refresh` before a step."""
        self.sync()
        self.stale = True

    def unbind(self) -> None:
        """Let the cache go, with all committed tokens in it and windows of its own."""
        self.sync()
        for slot in self.decoder.slots:
            slot.forget()
        for layer in self.layers:
            layer.unbind()
        self.layers = []  # they know this object: a circle would keep the cache's windows until Python collects it

    def _replan(self, changed: list[GraphLayer]) -> None:
        """Windows have moved: upload where they are, and plan what the host searches now."""
        layers = [bound.layer for bound in self.layers]
        self.room = min(bound.window.room for bound in self.layers)
        padded = any(bound.window.valid is not None for bound in self.layers)
        retrieving = [layer for layer in layers if isinstance(layer, RetrievalLayer)]
        retrieves = any(layer.held is not None and layer.held.retrieves for layer in retrieving)
        self.kind = StepKind(retrieves, padded, 0)
        for bound in changed:
            if padded:
                bound.refresh()
            if retrieves:
                bound.plan()
        self.update_kind()
        self.upload_spans()
