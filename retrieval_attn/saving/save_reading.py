"""ReadingSave: save a context during its prefill, each layer as soon as its keys are on the host and indexed.

Layer-major prefill finishes layer l of L after l/L of the time, so that most bytes are written while later layers are
computed (CachedAttention, section 3.2.2, writes during decoding).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.sequence import Forgotten
from retrieval_attn.model.identity import identity_of
from retrieval_attn.saving.layers import Marks, ids_array, marks_of, marks_of_layer, saving_fork
from retrieval_attn.saving.save import (
    Saved,
    SavedLineage,
    SavedPoint,
    layer_bundle,
    node_plain,
    saved_options,
    saving_bar,
    write_layer,
)
from retrieval_attn.saving.sequence import PathMark
from retrieval_attn.store import ContextStore, NodeWriter, check_name

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
"""Seconds between two checks of a layer."""


class ReadingSave:
    """Save the empty `cache` while it reads `ids`: read in the block of `while_reading`, then call `finish`."""

    def __init__(
        self,
        store: ContextStore,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: RetrievalCache,
        ids: Sequence[int],
    ) -> None:
        check_name(name)
        self._store, self._cache = store, cache
        self._ids = ids_array(ids)
        self.saved = Saved(name, len(self._ids))
        self._identity, self._options = identity_of(model, tokenizer), saved_options(cache.config, Forgotten())
        self._read = self._written = 0
        self._marks: dict[int, PathMark] = {}
        self._turn = threading.Lock()
        """Held while a layer's state is copied: its arrays do not change then, and its window does not move."""
        self._complete, self._stop = threading.Event(), threading.Event()
        self._plain: dict[str, Any] = {}
        self._kept: SavedLineage | None = None
        self._waits = True

    @contextlib.contextmanager
    def while_reading(self) -> Iterator[None]:
        """Save layers in a thread while the block reads with the cache. An exception in the block cancels the save."""
        before = self._cache.on_layer

        def on_layer() -> None:
            if before is not None:
                before()
            self._read += 1

        self._cache.on_layer, self._cache.window_lock = on_layer, self._turn
        self.saved.start(self._run)
        try:
            yield
        except BaseException:
            self._stop.set()
            self.saved.join()
            raise
        finally:
            self._cache.on_layer, self._cache.window_lock = before, contextlib.nullcontext()

    def finish(self, kept: SavedLineage, plain: Mapping[str, Any], *, wait: bool, progress: bool) -> None:
        """Complete the save: publish the name once the text is on the disk. plain: kept with the name.

        kept: the context's lineage, which gets the save as `kept.saving` and the node when it is written. wait: block
        until then, or raise StoreError; otherwise a thread continues, and Python exits after it.
        """
        self._plain, self._kept, kept.saving, self._waits = dict(plain), kept, self.saved, wait
        if not wait:
            with self._turn:
                self._cache = saving_fork(self._cache)
            atexit.register(self.saved.join)
        self._complete.set()
        if wait:
            with saving_bar(self.saved.name, len(self._cache.layers), show=progress) as bar:
                while not self.saved.join(LOOK_SECONDS):
                    bar.update(self._written - bar.n)
            self.saved.wait()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            with self._store.writer(self._identity, None, self._ids, self._options) as writer:
                self.saved.digest = writer.digest
                if not writer.exists and not self._write_layers(writer):
                    return
                while not self._complete.is_set():  # all layers are written; the rest of the read may still fail
                    if self._stop.wait(LOOK_SECONDS):
                        return
                if not writer.exists:
                    self.saved.new_tokens = len(self._ids)
                    writer.publish(node_plain(self._cache))
            self._name(writer.exists)
        except BaseException as error:
            if not self._waits:
                log.warning("saving the context %r failed: %s", self.saved.name, error)
            raise
        finally:
            self.saved.seconds = time.perf_counter() - began
            atexit.unregister(self.saved.join)

    def _write_layers(self, writer: NodeWriter) -> bool:
        """Write all layers; return False if the read has failed."""
        for number in range(len(self._cache.layers)):
            if not self._wait_for(number):
                return False
            with self._turn:
                self._marks |= marks_of_layer(self._cache, number)
                layer = layer_bundle(self._cache, number, None)
            self.saved.nbytes += write_layer(writer, layer)
            self._written += 1
        return True

    def _name(self, existed: bool) -> None:
        """existed: the node was in the store already."""
        self._store.name(self.saved.name, self.saved.digest, self._plain)
        marks = marks_of(self._cache).of_another() if existed else Marks(self._marks)
        assert self._kept is not None
        self._kept.note(SavedPoint(str(self._store.folder), self.saved.digest, len(self._ids), Forgotten(), marks))

    def _wait_for(self, number: int) -> bool:
        """Block until layer `number` is on the host and indexed. Return False if the read has failed."""
        while not self._stop.is_set():
            layer = self._cache.layers[number]
            if self._complete.is_set():
                return True
            if self._read > number and (not isinstance(layer, CacheLayer) or layer.check_index()):
                return True
            self._stop.wait(LOOK_SECONDS)
        return False
