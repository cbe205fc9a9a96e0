"""SavedText: a saved context as requests name it, a node of the tree that a store has."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedModel

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.sequence import Forgotten, attended_columns
from retrieval_attn.config import Config
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.gate import ReadCancelled
from retrieval_attn.engine.ids import Ids, common, int32_row
from retrieval_attn.engine.node import Namespace
from retrieval_attn.errors import StoreDamagedError, StoreError, UnknownContextError
from retrieval_attn.model.identity import identity_of
from retrieval_attn.model.weights import WeightState, weight_state
from retrieval_attn.offload.threads import settle
from retrieval_attn.saving.layers import mapped_bytes
from retrieval_attn.saving.save import (
    SavedChain,
    SavedLineage,
    SavedPoint,
    Saver,
    described,
    emptied,
    find_saved,
    open_chain,
    saved_chain,
    saved_options,
)
from retrieval_attn.store import ContextStore, NamedContext, Shelf
from retrieval_attn.store.names import AUTOMATIC, GENERATED
from retrieval_attn.store.record import canonical

__all__ = [
    "BLOCK_TOKENS",
    "ContextPrefetcher",
    "OpenedText",
    "Opening",
    "SavedIndex",
    "SavedMatch",
    "SavedText",
    "SavedTexts",
    "UnsavedText",
]

log = logging.getLogger(__name__)


Result = TypeVar("Result")


class Opening(Generic[Result]):
    """Work in a thread of its own, from now on, that can be cancelled between layers."""

    def __init__(self, work: Callable[[Callable[[], None]], Result], name: str) -> None:
        """work: calls what it is given after each layer. name: of the thread."""
        self._cancelled, self._done = threading.Event(), Future[Result]()
        self._thread = threading.Thread(target=settle, args=(self._done, work, self._look), name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """There is a result or an error."""
        return self._done.done()

    def result(self) -> Result:
        """Wait for the end. Raises what went wrong."""
        return self._done.result()

    def cancel(self) -> None:
        """End before the next layer, and wait for that: no thread is left."""
        self._cancelled.set()
        self._thread.join()

    def _look(self) -> None:
        if self._cancelled.is_set():
            raise ReadCancelled


WHOLE_BYTES = 256 << 20
"""Contexts up to this size are checked against all their checksums before an answer, larger ones during it."""


class HeldCache(Protocol):
    """Cache of a text in memory, which requests fork."""

    def fork(self) -> RetrievalCache:
        """Return a fork of the whole cache."""

    def view(self) -> RetrievalCache:
        """Return a fork of the whole cache to read from, which shares its windows."""


class SavedText:
    """A saved context of a store, by name. It is opened when a request needs it, and again when the tree gave it up.

    ids: int32 (1 + tokens,), first a mark that no text has: only requests that name the context find its node, however
    their texts begin, for it was read with options of its own. lost: its files are damaged, but for its ids, which are
    read again where others are opened. damaged: so were those that it was opened from. forgotten_tokens: of its tokens,
    those that nothing attends to. automatic: whether the prefix cache saved it, so that no request names it. generated:
    whether it has generated answers.
    """

    def __init__(
        self, texts: SavedTexts, chain: SavedChain, mark: int, *, lost: bool, automatic: bool = False,
        generated: bool = False,
    ) -> None:  # fmt: skip
        """Made by `SavedTexts.find`. chain: its ids at least."""
        self.name, self.digest, self.lost, self.damaged = chain.name, chain.digest, lost, False
        self.automatic, self.generated = automatic, generated
        self.ids: Ids = _marked(mark, chain.ids())
        self.forgotten_tokens = chain.forgotten.tokens
        self._texts = texts
        self._chain: SavedChain | None = chain

    @property
    def tokens(self) -> int:
        """Tokens of the context, including forgotten ones."""
        return len(self.ids) - 1

    def open(self) -> Opening[tuple[RetrievalCache, OpenedText]]:
        """Begin to open it, in a thread. Its result: a cache that ends where the context ends, and what knows if its
        files are whole. Raises there StoreError and what is below it.
        """
        return Opening(self._opened, f"retrieval_attn-open-{self.name}")

    def _opened(self, on_layer: Callable[[], None]) -> tuple[RetrievalCache, OpenedText]:
        try:
            cache, kept = open_chain(
                self._texts.chain(self), self._texts.model, self._texts.config, {}, on_layer=on_layer,
                on_damage=self.note_damage, whole_bytes=WHOLE_BYTES,
            )  # fmt: skip
        except StoreDamagedError as error:
            self.note_damage(error)
            raise
        self._texts.note_opened(self, cache)
        return cache, OpenedText(self, kept)

    @property
    def key(self) -> tuple[str, str]:
        """Digest, and the name of an automatic context: texts of different namespaces share no mark."""
        return self.digest, self.name if self.automatic else ""

    def emptied(self) -> tuple[RetrievalCache, OpenedText]:
        """For the ids to be read into: an empty cache with the options that they were read with, and what says that its
        keys come from no file. Raises StoreMismatchError.
        """
        chain = self._texts.chain(self) if self._chain is None else self._chain
        return emptied(chain, self._texts.model, self._texts.config), OpenedText(self, SavedLineage())

    def note_damage(self, error: StoreDamagedError) -> None:
        """Its files are damaged: who names it from now on does not have them. Any thread."""
        self._texts.note_damage(self, error)


class UnsavedText(SavedText):
    """A context that is saved and not durable yet: requests continue its cache in memory.

    Once it is durable, or its write has failed, the cache is used as long as the prefix cache holds it.

    point: node of the store that it became; None before.
    """

    def __init__(
        self,
        texts: SavedTexts,
        name: str,
        ids: Ids,
        mark: int,
        held: HeldCache,
        lineage: SavedLineage,
        *,
        automatic: bool = False,
        generated: bool = False,
    ) -> None:
        """Store the cache of a text.

        Args:
            texts: saved contexts of the store.
            name: name under which it is saved.
            ids: its token ids, without a mark.
            mark: first id of no text.
            held: its cache.
            lineage: saved contexts that it continues.
            automatic: whether the prefix cache saves it.
            generated: whether it has generated answers.
        """
        self.name, self.digest, self.lost, self.damaged = name, "", False, False
        self.automatic, self.generated = automatic, generated
        self.point: SavedPoint | None = None
        self.ids = _marked(mark, ids)
        self._texts, self._chain = texts, None
        self._held: HeldCache | None = held
        self._released: weakref.ref[HeldCache] | None = None
        self._lineage = lineage
        cache = held.view()
        self._options, self._index = cache.config, cache.index.config
        self.forgotten_tokens = cache.batch.forgotten.tokens

    @property
    def held(self) -> HeldCache | None:
        """Cache in memory; None if it was evicted after the write ended."""
        return self._held if self._released is None else self._released()

    def release(self) -> None:
        """Let the prefix cache evict the cache in memory."""
        if self._held is not None:
            self._released, self._held = weakref.ref(self._held), None

    def set_durable(self, point: SavedPoint) -> None:
        """Note the node of the store that the context became."""
        self.digest, self.point = point.digest, point
        self._lineage.note(point)
        self._texts.note_durable(self)
        self.release()

    def _opened(self, on_layer: Callable[[], None]) -> tuple[RetrievalCache, OpenedText]:
        if (held := self.held) is not None:
            return held.fork(), OpenedText(self, self._lineage)
        if not self.digest:
            raise self._texts.unsaved_error(self.name)
        return super()._opened(on_layer)

    def emptied(self) -> tuple[RetrievalCache, OpenedText]:
        """See `SavedText.emptied`."""
        cache = RetrievalCache(self._texts.model, self._options)
        cache.index.take(self._index, self.tokens)
        return cache, OpenedText(self, SavedLineage())


def _marked(mark: int, ids: Ids) -> Ids:
    return np.concatenate((np.array([-mark], np.int32), ids))


class OpenedText(NamedTuple):
    """One opening of a saved text; caches that continue it keep it.

    lineage: of the cache: all that a save of a context that continues it writes is beyond that.
    """

    text: SavedText
    lineage: SavedLineage


BLOCK_TOKENS = 64
"""Shortest common prefix of a prompt and a saved context that is found."""
AUTOMATIC_PREFIX, AUTOMATIC_DIGITS = "auto-", 40
"""Names of contexts that the prefix cache saves: the prefix and as many digits of a digest."""
SETTLED_NS = 1_000_000_000
"""Age from which a folder's modification time tells all its changes apart."""


class SavedMatch(NamedTuple):
    """A saved context that shares its first tokens with a prompt.

    Attributes:
        name: name of the context.
        digest: its last node.
        tokens: length of the common prefix.
    """

    name: str
    digest: str
    tokens: int


class _Indexed(NamedTuple):
    """Token ids of a context, by nodes. owner: namespace that may use it; None: every one."""

    digest: str
    owner: Namespace
    pieces: tuple[Ids, ...]

    @property
    def block(self) -> bytes:
        """First tokens, by which the context is found; less than a block for a short context."""
        return _head(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return sum(map(len, self.pieces))

    def common(self, ids: Ids) -> int:
        """Return the length of the common prefix."""
        done = 0
        for piece in self.pieces:
            found = common(piece, ids[done:])
            done += found
            if found < len(piece):
                break
        return done


class SavedIndex:
    """Token ids of the contexts of a store that were read with the options of an engine. Thread-safe.

    Contexts that were read with other options are left out: their answers would not be those of a fresh prefill. So are
    contexts with forgotten tokens.
    """

    def __init__(self, store: Callable[[], ContextStore], config: Config, *, generated: bool) -> None:
        """store: returns the store. config: options of the engine. generated: contexts with answers count, too."""
        self._store, self._generated = store, generated
        self._options = json.loads(canonical(saved_options(config, Forgotten()), "options"))
        self._contexts: dict[str, _Indexed] = {}
        self._by_block: dict[bytes, list[str]] = {}
        self._left_out: dict[str, str] = {}
        self._version: int | None = None
        self._told = ""
        self._lock = threading.Lock()

    def match(self, parts: Sequence[Sequence[int]], namespace: Namespace) -> list[SavedMatch]:
        """Return the contexts that begin as a prompt does, for at least BLOCK_TOKENS tokens, the longest match first.

        Of equal matches the shortest context comes first: a context that ends there needs no crop.

        parts: token ids of the prompt; the last id does not count, because its logits start the answer. namespace: of
        the request: contexts of other namespaces are left out.
        """
        with self._lock:
            self._refresh()
            if not self._contexts:
                return []
            names = self._by_block.get(_head(parts), ())
            candidates = {name: self._contexts[name] for name in names}
        allowed = {name: one for name, one in candidates.items() if one.owner in (None, namespace)}
        if not allowed:
            return []
        ids = np.concatenate([int32_row(part) for part in parts])[:-1]
        found = [SavedMatch(name, one.digest, one.common(ids)) for name, one in allowed.items()]
        return sorted(found, key=lambda match: (-match.tokens, allowed[match.name].tokens, match.name))

    def _refresh(self) -> None:
        """Follow the store's names; an unreadable store has none."""
        try:
            version = self._store().names_version
            if version is not None and version == self._version:
                return
            named = {} if version is None else {one.name: one for one in self._store().list()}
        except StoreError as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("saved contexts cannot be found by content: %s", error)
            version, named = None, {}
        for name in [name for name, one in self._contexts.items() if _digest(named, name) != one.digest]:
            self._remove(name)
        self._left_out = {name: digest for name, digest in self._left_out.items() if _digest(named, name) == digest}
        for name, one in named.items():
            if name not in self._contexts and name not in self._left_out:
                self._add(one)
        settled = version is not None and time.time_ns() - version > SETTLED_NS
        self._version = version if settled else None

    def _add(self, named: NamedContext) -> None:
        try:
            nodes = self._store().chain(named.digest, ids_only=True)
            pieces = tuple(node.ids for node in nodes)
        except StoreError as error:  # removed meanwhile, or damaged: requests that name it get the error
            log.debug("the context %r is not found by content: %s", named.name, error)
            pieces, nodes = (), []
        owner = named.plain.get("owner")
        if not named.is_automatic:
            owner = owner or None
        found = _Indexed(named.digest, None if owner is None else str(owner), pieces)
        excluded = named.plain.get(GENERATED) is True and not self._generated
        if excluded or len(found.block) < 4 * BLOCK_TOKENS or any(node.options != self._options for node in nodes):
            self._left_out[named.name] = named.digest
            return
        self._contexts[named.name] = found
        self._by_block.setdefault(found.block, []).append(named.name)

    def _remove(self, name: str) -> None:
        block = self._contexts.pop(name).block
        self._by_block[block].remove(name)
        if not self._by_block[block]:
            del self._by_block[block]


def _digest(named: dict[str, NamedContext], name: str) -> str | None:
    return named[name].digest if name in named else None


def _head(parts: Sequence[Sequence[int]] | Sequence[Ids]) -> bytes:
    """Return the first BLOCK_TOKENS ids of a prompt as bytes, or all of a shorter one."""
    head: list[int] = []
    for part in parts:
        head += list(part[: BLOCK_TOKENS - len(head)])
        if len(head) == BLOCK_TOKENS:
            break
    return np.asarray(head, np.int32).tobytes()


class SavedTexts:
    """Saved contexts of one store for one model, each with one mark while anybody has it. Any thread may ask."""

    def __init__(
        self, loop: AnswerLoop, config: Config, template: str, store: ContextStore | str | Path | None, counts: Counts,
        *, generated: bool = False,
    ) -> None:  # fmt: skip
        """template: `template_digest` of the one that questions have. store: looked at when the first is asked for.
        counts: is told of damage. generated: prompts may continue texts with generated answers.
        """
        self._loop, self.config, self._template = loop, config, template
        self._store, self._counts = store, counts
        self._identity = ""
        self._weights: WeightState | None = None
        self._marks = itertools.count(1)
        self._known: weakref.WeakValueDictionary[tuple[str, str], SavedText] = weakref.WeakValueDictionary()
        self._unsaved: dict[str, UnsavedText] = {}
        self._index = SavedIndex(lambda: self.store, config, generated=generated)
        self._lock = threading.Lock()

    @property
    def model(self) -> PreTrainedModel:
        """Model of the contexts."""
        return self._loop.model

    @property
    def store(self) -> ContextStore:
        """The store."""
        with self._lock:
            if not isinstance(self._store, ContextStore):
                self._store = ContextStore(self._store)
            return self._store

    def find(self, name: str, *, lost: bool = False, automatic: bool = False) -> SavedText:
        """Return the text that the name means now. lost: its files cannot be used, which the store may not know.
        automatic: texts that the prefix cache saved are found, too: they belong to one namespace, so that no request
        may name them. Raises UnknownContextError, StoreMismatchError; StoreDamagedError where its ids are damaged, too,
        or its files are and parts of it were forgotten: who reads the ids again would not have what was saved.
        UnknownContextError also for a context whose write failed and that was evicted.
        """
        with self._lock:
            unsaved = self._unsaved.get(name)
        if unsaved is not None:
            unsaved.lost = unsaved.lost or lost
            if unsaved.held is None and not unsaved.digest:
                raise self.unsaved_error(name)
            return unsaved
        store = self.store
        named = store.resolve(name)
        if named.is_automatic and not automatic:
            raise UnknownContextError(f"no request may name the context {name!r}: it is automatic", context=name)
        lost = lost or store.known_damaged(named)  # until it is saved again
        with self._lock:
            identity = self._of_model()
            mine = name if named.is_automatic else ""
            known = self._known.get((named.digest, mine))
            if known is None or known.lost != lost or named.plain.get("template") != self._template:
                chain = find_saved(store, name, identity, self._template, ids_only=True)
                if lost and chain.forgotten.tokens:
                    raise StoreDamagedError(
                        f"the context {name!r} is damaged, and was saved after parts of it were forgotten: it cannot "
                        "be read again from its token ids. Read its text again, and save it under the same name."
                    )
                known = self._known.get((chain.digest, mine))
                if known is None or known.lost != lost:
                    known = SavedText(
                        self, chain, next(self._marks), lost=lost, automatic=named.is_automatic,
                        generated=named.plain.get(GENERATED) is True,
                    )  # fmt: skip
                    self._known[known.key] = known
            return known

    def matches(self, parts: Sequence[Sequence[int]], namespace: str | None) -> Iterator[tuple[SavedText, int]]:
        """Yield the saved contexts that begin as a prompt does, and the lengths of the common prefixes, longest first.

        Contexts that cannot be opened are left out, and those of other namespaces. parts: token ids of the prompt.
        """
        for match in self._index.match(parts, namespace):
            try:
                text = self.find(match.name, automatic=True)
            except StoreError:  # of another model or template, damaged, or removed meanwhile
                continue
            if not text.lost and text.digest == match.digest:
                yield text, match.tokens

    def unsaved(
        self, name: str, ids: Ids, held: HeldCache, opened: OpenedText | None, *, automatic: bool = False,
        generated: bool = False,
    ) -> UnsavedText:  # fmt: skip
        """Return a text in memory that is to be saved under a name.

        opened: saved context that it continues. automatic: whether the prefix cache saves it. generated: whether it has
        generated answers.
        """
        lineage = SavedLineage() if opened is None else opened.lineage.fork()
        with self._lock:
            mark = next(self._marks)
        return UnsavedText(self, name, ids, mark, held, lineage, automatic=automatic, generated=generated)

    def automatic(
        self, ids: Ids, held: HeldCache, opened: OpenedText | None, namespace: Namespace, *, generated: bool
    ) -> UnsavedText:
        """Return a text of the prefix cache that is to be saved, under a name that its tokens and namespace have."""
        with self._lock:
            identity = self._of_model()
        about = canonical([identity, self._template, saved_options(self.config, Forgotten()), namespace], "text")
        name = AUTOMATIC_PREFIX + hashlib.sha256(about.encode() + ids.tobytes()).hexdigest()[:AUTOMATIC_DIGITS]
        return self.unsaved(name, ids, held, opened, automatic=True, generated=generated)

    def has_options(self, cache: RetrievalCache) -> bool:
        """Return whether a cache has the options of new prompts, and nothing of it was forgotten."""
        wanted = saved_options(self.config, Forgotten())
        return saved_options(cache.config, cache.batch.forgotten) == wanted

    def note_opened(self, text: SavedText, cache: RetrievalCache) -> None:
        """Count an opened text that the prefix cache saved, and make it the most recently used one of the disk."""
        if not text.automatic:
            return
        self._counts.note_disk_load(mapped_bytes(cache).nbytes)
        with contextlib.suppress(StoreError):  # removed meanwhile: the open files stay
            self.store.note_use(text.name)

    def set_unsaved(self, name: str, text: UnsavedText | None) -> None:
        """Make a name refer to a text that is not durable; None: to the context of the store."""
        with self._lock:
            if text is None:
                self._unsaved.pop(name, None)
            else:
                self._unsaved[name] = text

    def note_durable(self, text: UnsavedText) -> None:
        """Note that the store has the files of a text."""
        with self._lock:
            self._known.setdefault(text.key, text)

    def unsaved_error(self, name: str) -> UnknownContextError:
        """Return the error of a context whose write failed, and that was evicted."""
        return UnknownContextError(
            f"the context {name!r} was not written to the disk, and its text was evicted; save its text again"
        )

    def saver(
        self,
        text: UnsavedText,
        opened: OpenedText | None,
        owner: Namespace,
        read_seconds: float,
        points: Sequence[SavedPoint] = (),
    ) -> Saver:
        """Return a saver of a text in memory.

        Args:
            text: the text.
            opened: saved context that it continues.
            owner: namespace whose requests use it without naming it; None: all requests; "": all, unless the prefix
                cache saves it.
            read_seconds: duration of its prefill.
            points: nodes of the store that it may continue.
        Raises as `Context.save`.
        """
        held = text.held
        if held is None:
            raise self.unsaved_error(text.name)
        with self._lock:
            identity = self._of_model()
        cache, kept = held.view(), SavedLineage() if opened is None else opened.lineage.fork()
        plain = described(self._template, attended_columns(cache.batch), read_seconds, self.model)
        if text.automatic:
            plain |= {AUTOMATIC: True} | ({} if owner is None else {"owner": owner})
            plain |= {GENERATED: True} if text.generated else {}
        elif owner:
            plain |= {"owner": owner}
        for point in points:
            kept.note(point)
        return kept.saver(self.store, text.name, identity, cache, plain)

    def chain(self, text: SavedText) -> SavedChain:
        """Return the nodes of a text. Raises StoreError and what is below it."""
        with self._lock:
            identity = self._of_model()
        return saved_chain(self.store, text.name, text.digest, identity)

    def note_damage(self, text: SavedText, error: StoreDamagedError) -> None:
        """Not to be found any more, though who has it keeps it. Counts, and tells the log, once."""
        with self._lock:
            told, text.damaged = text.damaged, True
            if self._known.get(text.key) is text:
                del self._known[text.key]
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


class ContextPrefetcher:
    """Any thread. Nothing is read, and no thread is there, until a request waits behind others."""

    def __init__(self, store: Callable[[], ContextStore], ram_bytes: int) -> None:
        """store: asked when it is first needed. ram_bytes: of saved contexts in the system's cache."""
        self._store, self._ram_bytes = store, ram_bytes
        self._shelf: Shelf | None = None
        self._names: dict[str, str] = {}
        self._closed = False
        self._lock = threading.Lock()

    def add(self, number: str, name: str) -> None:
        """Request `number` waits for the context `name`; those that waited before come before it."""
        with self._lock:
            if self._closed:
                return
            known = name in self._names.values()
            self._names[number] = name
            if known:
                return
            if self._shelf is None:
                self._shelf = Shelf(self._store(), ram_bytes=self._ram_bytes)
            self._shelf.expect(list(dict.fromkeys(self._names.values())))

    def remove(self, number: str) -> None:
        """It has its turn, or is gone. Unknown numbers are passed over."""
        with self._lock:
            self._names.pop(number, None)

    def close(self) -> None:
        """No thread is left."""
        with self._lock:
            self._closed, shelf = True, self._shelf
        if shelf is not None:
            shelf.close()
