"""SavedText: a saved context as requests name it, a node of the tree that a store has."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.sequence import attended_columns
from retrieval_attn.config import Config
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.ids import Ids
from retrieval_attn.engine.opening import Opening
from retrieval_attn.errors import StoreDamagedError
from retrieval_attn.model.identity import identity_of
from retrieval_attn.model.weights import WeightState, weight_state
from retrieval_attn.saving.save import (
    Saved,
    SavedChain,
    SavedLineage,
    described,
    emptied,
    find_saved,
    open_chain,
    saved_chain,
)
from retrieval_attn.store import ContextStore

__all__ = ["OpenedText", "SavedText", "SavedTexts"]

log = logging.getLogger(__name__)

WHOLE_BYTES = 256 << 20
"""Contexts with so many or fewer are compared with all their checksums before an answer; larger ones beside it."""


class SavedText:
    """What a store has under a name. It is opened when a request needs it, and again when the tree gave it up.

    ids: int32 (1 + tokens,), first a mark that no text has: only requests that name the context find its node, however
    their texts begin, for it was read with options of its own. lost: its files are damaged, but for its ids, which are
    read again where others are opened. damaged: so were those that it was opened from.
    """

    def __init__(self, texts: SavedTexts, chain: SavedChain, mark: int, *, lost: bool) -> None:
        """Made by `SavedTexts.find`. chain: its ids at least."""
        self.name, self.digest, self.lost, self.damaged = chain.name, chain.digest, lost, False
        self.ids: Ids = np.concatenate((np.array([-mark], np.int32), chain.ids()))
        self._texts, self._chain = texts, chain

    @property
    def forgotten_tokens(self) -> int:
        """Of its tokens, what nothing attends to."""
        return self._chain.forgotten.tokens

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
        try:
            cache, kept = self._texts.opened(self, on_layer)
        except StoreDamagedError as error:
            self.note_damage(error)
            raise
        return cache, OpenedText(self, kept)

    def emptied(self) -> tuple[RetrievalCache, OpenedText]:
        """For the ids to be read into: an empty cache with the options that they were read with, and what says that its
        keys come from no file. Raises StoreMismatchError.
        """
        return self._texts.emptied(self._chain), OpenedText(self, SavedLineage())

    def note_damage(self, error: StoreDamagedError) -> None:
        """Its files are damaged: who names it from now on does not have them. Any thread."""
        self._texts.note_damage(self, error)


class OpenedText:
    """One opening of a saved text; caches that continue it keep it."""

    def __init__(self, text: SavedText, kept: SavedLineage) -> None:
        """kept: compares the files with their checksums, in a thread."""
        self.text, self._kept = text, kept

    @property
    def kept(self) -> SavedLineage:
        """For a context that continues it: what it has more is all that a save of it writes."""
        return self._kept.fork()

    def require_whole(self) -> None:
        """Raise StoreDamagedError if the files were found to be damaged so far."""
        self._kept.require_whole()


class SavedTexts:
    """Saved contexts of one store for one model, each with one mark while anybody has it. Any thread may ask."""

    def __init__(
        self, loop: AnswerLoop, config: Config, template: str, store: ContextStore | str | Path | None, counts: Counts
    ) -> None:
        """template: `template_digest` of the one that questions have. store: looked at when the first is asked for.
        counts: is told of damage.
        """
        self._loop, self._config, self._template = loop, config, template
        self._store, self._counts = store, counts
        self._identity = ""
        self._weights: WeightState | None = None
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

    def find(self, name: str, *, lost: bool = False) -> SavedText:
        """What the name means now. lost: its files cannot be used, which the store may not know. Raises
        UnknownContextError, StoreMismatchError; StoreDamagedError where its ids are damaged, too, or its files are and
        parts of it were forgotten: who reads the ids again would not have what was saved.
        """
        store = self.store
        named = store.resolve(name)
        lost = lost or store.known_damaged(named)  # until it is saved again
        with self._lock:
            identity = self._of_model()
            known = self._known.get(named.digest)
            if known is None or known.lost != lost or named.plain.get("template") != self._template:
                chain = find_saved(store, name, identity, self._template, ids_only=True)
                if lost and chain.forgotten.tokens:
                    raise StoreDamagedError(
                        f"the context {name!r} is damaged, and was saved after parts of it were forgotten: it cannot "
                        "be read again from its token ids. Read its text again, and save it under the same name."
                    )
                known = self._known.get(chain.digest)
                if known is None or known.lost != lost:
                    known = SavedText(self, chain, next(self._marks), lost=lost)
                    self._known[chain.digest] = known
            return known

    def save(
        self, name: str, cache: RetrievalCache, opened: OpenedText | None, read_seconds: float, *, wait: bool
    ) -> Saved:
        """Keep what a cache holds, which nobody else changes, under a name. opened: the saved context that it
        continues. Raises as `Context.save`.
        """
        loop, kept = self._loop, SavedLineage() if opened is None else opened.kept
        plain = described(self._template, attended_columns(cache.batch), read_seconds, loop.model)
        return kept.save(self.store, name, loop.model, loop.tokenizer, cache, plain, wait)

    def opened(self, text: SavedText, on_layer: Callable[[], None]) -> tuple[RetrievalCache, SavedLineage]:
        """A cache of what the text's node holds, the files mapped anew. Raises StoreError and what is below it."""
        with self._lock:
            identity = self._of_model()
        chain = saved_chain(self.store, text.name, text.digest, identity)
        return open_chain(
            chain, self._loop.model, self._config, {}, on_layer=on_layer, on_damage=text.note_damage,
            whole_bytes=WHOLE_BYTES,
        )  # fmt: skip

    def emptied(self, chain: SavedChain) -> RetrievalCache:
        """An empty cache for the ids of a context. Raises StoreMismatchError."""
        return emptied(chain, self._loop.model, self._config)

    def note_damage(self, text: SavedText, error: StoreDamagedError) -> None:
        """Not to be found any more, though who has it keeps it. Counts, and tells the log, once."""
        with self._lock:
            told, text.damaged = text.damaged, True
            if self._known.get(text.digest) is text:
                del self._known[text.digest]
        if not told:
            self._counts.note_damage(error.blocks)
            log.warning("the saved context %r is damaged; its tokens are read again: %s", text.name, error)

    def _of_model(self) -> str:
        """Once for each state of the model's weights: they are read for it."""
        now = weight_state(self._loop.model)
        if now != self._weights:
            self._identity, self._weights = identity_of(self._loop.model, self._loop.tokenizer), now
            self._known.clear()
        return self._identity
