"""A context is saved while it is read: each layer goes to the disk as soon as its keys are on the host and indexed.

Layer-major reading ends layer l after l/L of the time, so that most of the bytes are written beside the computing of
later layers (CachedAttention, section 3.2.2, writes beside decoding).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.layer import CacheLayer
from retrieval_attn.cache.saved import Marks, ids_array, marks_of, marks_of_layer
from retrieval_attn.cache.sequence import Forgotten
from retrieval_attn.cpu.saved import PathMark
from retrieval_attn.engine.saving import SavedPoint, node_plain, saved_options, saving_bar, write_layer
from retrieval_attn.model.identity import identity_of
from retrieval_attn.store import ContextStore, check_name

LOOK_SECONDS = 0.02
"""Between two looks at whether a layer is ready."""


class ReadingSave:
    """Saves `cache`, which is empty and about to read `ids`: read within `beside`, then call `finish`."""

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
        self._store, self._name, self._cache = store, name, cache
        self._ids = ids_array(ids)
        self._digest, self._existed = "", False
        self._identity, self._options = identity_of(model, tokenizer), saved_options(cache.config, Forgotten())
        self._read = self._written = 0
        self._marks: dict[int, PathMark] = {}
        self._complete, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Meanwhile the cache reads. Left by an exception, nothing is saved."""
        before = self._cache.on_layer

        def on_layer() -> None:
            if before is not None:
                before()
            self._read += 1

        self._cache.on_layer = on_layer
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-save", daemon=True)
        self._thread.start()
        try:
            yield
        except BaseException:
            self._stop.set()
            self._thread.join()
            raise
        finally:
            self._cache.on_layer = before
        self._complete.set()

    def finish(self, plain: Mapping[str, Any], progress: bool) -> SavedPoint:
        """Wait for the disk, and give the context its name. plain: kept beside it. Raises StoreError."""
        assert self._thread is not None
        with saving_bar(self._name, len(self._cache.layers), show=progress) as bar:
            while self._thread.is_alive():
                bar.update(self._written - bar.n)
                self._thread.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        self._store.name(self._name, self._digest, dict(plain))
        marks = marks_of(self._cache).of_another() if self._existed else Marks(self._marks)
        return SavedPoint(str(self._store.folder), self._digest, len(self._ids), Forgotten(), marks)

    def _run(self) -> None:
        try:
            with self._store.writer(self._identity, None, self._ids, self._options) as writer:
                self._digest, self._existed = writer.digest, writer.exists
                if not writer.exists:
                    for number in range(len(self._cache.layers)):
                        if not self._wait_for(number):
                            return
                        self._marks |= marks_of_layer(self._cache, number)
                        write_layer(writer, self._cache, number, None)
                        self._written += 1
                    while not self._complete.is_set():  # the last layer is there; what follows may fail still
                        if self._stop.wait(LOOK_SECONDS):
                            return
                    writer.publish(node_plain(self._cache))
        except BaseException as error:  # raised by `finish`
            self._error = error

    def _wait_for(self, number: int) -> bool:
        """Until layer `number` is on the host and indexed. False: reading has failed."""
        while not self._stop.is_set():
            layer = self._cache.layers[number]
            if self._complete.is_set():
                return True
            if self._read > number and (not isinstance(layer, CacheLayer) or layer.check_index()):
                return True
            self._stop.wait(LOOK_SECONDS)
        return False
