"""SavedText: a saved context as requests name it, a node of the tree that a store has."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.ids import Ids
from retrieval_attn.batch.opening import Opening
from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.engine.saving import Kept, Saved, described, find_saved, open_chain, saved_chain
from retrieval_attn.errors import StoreDamagedError
from retrieval_attn.model.identity import identity_of
from retrieval_attn.store import ContextStore

__all__ = ["OpenedText", "SavedText", "SavedTexts"]


class SavedText:
    """What a store has under a name. It is opened when a request needs it, and again when the tree gave it up.

    ids: int32 (1 + tokens,), first a mark that no text has: only requests that name the context find its node, however
    their texts begin, for it was read with options of its own. forgotten_tokens: of these, what nothing attends to.
    """

    def __init__(self, texts: SavedTexts, name: str, digest: str, ids: Ids, forgotten_tokens: int) -> None:
        """Made by `SavedTexts.find`."""
        self.name, self.digest, self.ids, self.forgotten_tokens = name, digest, ids, forgotten_tokens
        self._texts = texts

    @property
    def tokens(self) -> int:
        """Of the context, those that are forgotten too."""
        return len(self.ids) - 1

    def open(self) -> Opening[tuple[RetrievalCache, OpenedText]]:
        """Begin to open it, in a thread. Its result: a cache that ends where the context ends, and what knows if its
        files are whole. Raises there StoreError and what is below it.
        """
        return Opening(self._opened, f"retrieval_attn-open-{self.name}")

    def _opened(self, on_layer: Callable[[], None]) -> tuple[RetrievalCache, OpenedText]:
        cache, kept = self._texts.opened(self, on_layer)
        return cache, OpenedText(self, kept)

    def discard(self) -> None:
        """Its files are damaged: who names it from now on opens what the store has then."""
        self._texts.discard(self)


class OpenedText:
    """One opening of a saved text; caches that continue it keep it."""

    def __init__(self, text: SavedText, kept: Kept) -> None:
        """kept: compares the files with their checksums, in a thread."""
        self.text, self._kept = text, kept

    @property
    def kept(self) -> Kept:
        """For a context that continues it: what it has more is all that a save of it writes."""
        return self._kept.fork()

    def require_whole(self) -> None:
        """Raise StoreDamagedError if the files were found to be damaged so far."""
        try:
            self._kept.require_whole()
        except StoreDamagedError:
            self.text.discard()
            raise


class SavedTexts:
    """Saved contexts of one store for one model, each with one mark while anybody has it. Any thread may ask."""

    def __init__(
        self, loop: AnswerLoop, config: Config, template: str, store: ContextStore | str | Path | None
    ) -> None:
        """template: `template_digest` of the one that questions have. store: looked at when the first is asked for."""
        self._loop, self._config, self._template = loop, config, template
        self._store = store
        self._identity = ""
        self._marks = itertools.count(1)
        self._known: weakref.WeakValueDictionary[str, SavedText] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def store(self) -> ContextStore:
        """The store."""
        with self._lock:
            if not isinstance(self._store, ContextStore):
                self._store = ContextStore(self._store)
            return self._store

    def find(self, name: str) -> SavedText:
        """What the name means now. Raises UnknownContextError, StoreMismatchError, StoreDamagedError."""
        store = self.store
        named = store.resolve(name)
        with self._lock:
            known = self._known.get(named.digest)
            if known is not None and named.plain.get("template") == self._template:
                return known
            found = find_saved(store, name, self._of_model(), self._template)
            known = self._known.get(found.digest)
            if known is None:
                ids = np.concatenate((np.array([-next(self._marks)], np.int32), found.ids()))
                known = SavedText(self, name, found.digest, ids, found.forgotten.tokens)
                self._known[found.digest] = known
            return known

    def save(
        self, name: str, cache: RetrievalCache, opened: OpenedText | None, read_seconds: float, *, wait: bool
    ) -> Saved:
        """Keep what a cache holds, which nobody else changes, under a name. opened: the saved context that it
        continues. Raises as `Context.save`.
        """
        batch, loop, kept = cache.batch, self._loop, Kept() if opened is None else opened.kept
        plain = described(self._template, batch.columns - batch.forgotten.tokens, read_seconds, loop.model)
        return kept.save(self.store, name, loop.model, loop.tokenizer, cache, plain, wait)

    def opened(self, text: SavedText, on_layer: Callable[[], None]) -> tuple[RetrievalCache, Kept]:
        """A cache of what the text's node holds, the files mapped anew. Raises StoreError and what is below it."""
        with self._lock:
            identity = self._of_model()
        chain = saved_chain(self.store, text.name, text.digest, identity)
        return open_chain(chain, self._loop.model, self._config, {}, on_layer=on_layer)

    def discard(self, text: SavedText) -> None:
        """Not to be found any more, though who has it keeps it."""
        with self._lock:
            if self._known.get(text.digest) is text:
                del self._known[text.digest]

    def _of_model(self) -> str:
        """Once: weights are read for it."""
        self._identity = self._identity or identity_of(self._loop.model, self._loop.tokenizer)
        return self._identity
