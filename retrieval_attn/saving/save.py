"""Contexts on disk: what of a cache goes into a node of the store, and a cache out of a chain of nodes.

After CachedAttention (Gao et al. 2024, section 3), which saves the keys and values of a conversation; here indexes,
codes and clusters are saved with them, so that nothing is built again. Every save writes what came since the last one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.sequence import Forgotten
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.compile.progress import ProgressBar
from retrieval_attn.config import Config
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.errors import ConfigError, StoreDamagedError, StoreError, StoreMismatchError
from retrieval_attn.model.identity import identity_of
from retrieval_attn.offload.codes import SentCodes
from retrieval_attn.offload.page_lock import lock_ahead
from retrieval_attn.offload.threads import foreground, with_device_memory
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.progress import ReadingBar
from retrieval_attn.runner.ready import compilation, make_ready, prepared
from retrieval_attn.saving.layers import (
    Marks,
    asked_exactly,
    file_of,
    ids_array,
    layer_devices,
    layer_state,
    make_rows_ahead,
    marks_of,
    restore_layer,
    restored_cache,
    saving_fork,
)
from retrieval_attn.saving.sequence import State
from retrieval_attn.store import Bundle, ContextStore, NodeWriter, SavedNode, check_name
from retrieval_attn.store.disk import damaged, guarded, parsed
from retrieval_attn.store.node import RECORD, SUFFIX
from retrieval_attn.store.record import is_count, is_list_of

log = logging.getLogger(__name__)


LOOK_SECONDS = 0.05
"""Between two looks at how far the thread is that compares."""
FIRST_SECONDS = 0.5
"""After opening: who opens a context to ask at once is not disturbed before the question comes."""
QUESTION_SECONDS = 2.0
"""After the beginning of a question."""
SHARED_SECONDS = 1.0
"""After a decode step, or the beginning of a request's prefill: checksums are compared in a share of the time."""
IDLE_FACTOR = 7
"""Idle time per time of comparing while sequences decode: an eighth of the memory's bandwidth is used at most."""


class DeferredVerify:
    """Compares the checksums that opening left out, in a thread, a layer after the other.

    What is in memory gives way to questions, which want the memory's bandwidth, too: a first answer waited up to a
    quarter of a second. Of a file on a disk the thread reads what the question will want next.

    error: what it found. files, compared: how many there are, and were compared.
    """

    def __init__(
        self,
        chain: Sequence[SavedNode],
        locked: Iterable[Segment] = (),
        on_damage: Callable[[StoreDamagedError], None] | None = None,
    ) -> None:
        """locked: segments of the files, to be page-locked before that if all are in memory. on_damage: is told, by the
        thread that compares.
        """
        self.error: StoreDamagedError | None = None
        self.files, self.compared = sum(len(node.files) for node in chain), 0
        self._ended, self._pause = threading.Event(), _Pause()
        self._pause.until(FIRST_SECONDS)
        task = list(chain), [weakref.ref(one) for one in locked], weakref.ref(self), self._ended, self._pause
        thread = threading.Thread(target=_run, args=(*task, on_damage), name="retrieval_attn-check", daemon=True)
        weakref.finalize(self, self._ended.set)
        self._thread = thread
        thread.start()

    def hold(self) -> None:
        """Compare nothing for a while: a question is being read."""
        self._pause.until(QUESTION_SECONDS)

    def wait(self, *, progress: bool) -> None:
        """Until all was compared. Raises StoreDamagedError. progress: show a bar."""
        self._pause.end()
        with ProgressBar(
            total=self.files, desc="comparing", unit="file", delay=2.0, leave=False, disable=not progress
        ) as bar:
            while self._thread.is_alive():
                self._thread.join(LOOK_SECONDS)
                bar.update(self.compared - bar.n)
        self.require_whole()

    def require_whole(self) -> None:
        """Raise StoreDamagedError if anything was found so far."""
        if self.error is not None:
            raise self.error


class _Pause:
    """A time until which nothing is done. Within SHARED_SECONDS of a decode step work takes a share of the time."""

    def __init__(self) -> None:
        self._until, self._over = 0.0, threading.Event()
        self._resumed = time.monotonic()

    def until(self, seconds: float) -> None:
        """From now on, or as long as it was before; nothing after `end`."""
        self._until = max(self._until, time.monotonic() + seconds)

    def end(self) -> None:
        """For good: a caller waits for what is done after it."""
        self._over.set()

    def wait(self, ended: threading.Event) -> bool:
        """Until it is over or `ended`, and while sequences decode IDLE_FACTOR times as long as the work since the last
        call took; whether it is ended.
        """
        if foreground.was_within(SHARED_SECONDS):
            self.until(IDLE_FACTOR * (time.monotonic() - self._resumed))
        while not ended.is_set() and not self._over.is_set() and (left := self._until - time.monotonic()) > 0:
            self._over.wait(min(left, LOOK_SECONDS))
        self._resumed = time.monotonic()
        return ended.is_set()


def _run(
    chain: list[SavedNode],
    locked: list[weakref.ref[Segment]],
    owner: weakref.ref[DeferredVerify],
    ended: threading.Event,
    pause: _Pause,
    on_damage: Callable[[StoreDamagedError], None] | None,
) -> None:
    def stop() -> bool:
        return pause.wait(ended)

    try:
        if locked and all(node.file(file).is_in_memory for node in chain for file in node.files):
            lock_ahead(locked, stop)
        for file in sorted({file for node in chain for file in node.files}):
            for node in chain:
                if file in node.files:
                    one = node.file(file)
                    one.check(stop if one.is_in_memory else ended.is_set)
                    if (found := owner()) is not None:
                        found.compared += 1
                        del found
    except StoreError as error:
        found, damage = owner(), error if isinstance(error, StoreDamagedError) else StoreDamagedError(str(error))
        if found is not None:
            found.error = damage
        log.error("%s", error)
        if on_damage is not None:
            on_damage(damage)


RUNTIME = "threads", "graph", "drafts", "prefill_chunk", "question_attention", "full_attention"
"""Options that say how a machine works, not what was saved: an opened context has those of who opens it."""
CHECKERS = 2
"""Threads that check the small arrays of layers ahead of the one that is brought back."""
CHECKED_LATER = ("keys", "values", "/codes")
"""Arrays, by the end of their names, whose checksums a thread compares after a context was opened: nearly all bytes.
None of them says where something lies: a wrong bit makes a wrong answer at most, of which the thread tells."""


@dataclass(frozen=True)
class SavedPoint:
    """A node that a context continues: digest, in the store of a folder; its tokens, what it had forgotten of them, and
    where its host parts end.
    """

    store: str
    digest: str
    tokens: int
    forgotten: Forgotten
    marks: Marks


@dataclass
class Saved:
    """A save, which may still be under way. digest, nbytes, seconds: right once it is done.

    tokens: of the context. new_tokens: those that this save wrote; 0: the store had it already.
    """

    name: str
    tokens: int
    digest: str = ""
    new_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the save; None without one, and while it runs."""
        return self._error

    def start(self, write: Callable[[], None], *, daemon: bool = True) -> None:
        """Run `write` in a thread. `wait` raises its exception. daemon: whether the end of Python ends it."""

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save-{self.name}", daemon=daemon)
        self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the save ends, at most `seconds`; None: without a limit. Return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.done

    @property
    def runs_here(self) -> bool:
        """Whether the thread that writes is the current one."""
        return self._thread is threading.current_thread()

    @property
    def done(self) -> bool:
        """Whether all of it is on the disk, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Saved:
        """Until it is done. Raises what went wrong: StoreError and what is below it."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self


class Saver:
    """Saves one cache as it is now. `run` does it; the cache may go on meanwhile.

    Attributes:
        saved: progress of the save.
        wait: sleeps for some seconds until a GPU may have memory again; an exception of it ends the save.
        on_piece: called after each part of an array that was written, likewise.
    """

    def __init__(
        self,
        store: ContextStore,
        name: str,
        identity: str,
        fork: RetrievalCache,
        points: Sequence[SavedPoint],
        plain: Mapping[str, Any],
    ) -> None:
        """Store the arguments and look up the node that the cache continues.

        Args:
            store: the store.
            name: name of the context.
            identity: identity of the model, see `identity_of`.
            fork: cache that nothing changes until `run` returns: of `saving_fork`, or a view.
            points: nodes that the cache may continue, the newest last.
            plain: record that is kept with the name.
        """
        check_name(name)
        self._store, self._plain, self._fork, self._identity = store, dict(plain), fork, identity
        self.wait: Callable[[float], object] = time.sleep
        self.on_piece: Callable[[], object] | None = None
        (sequence,) = self._fork.batch.sequences
        usable = [one for one in points if one.store == str(store.folder) and one.marks.begins(self._fork)]
        self._parent = next((one for one in reversed(usable) if store.continues(one.digest)), None)
        self._ids = ids_array(sequence.token_ids)
        self._forgotten = self._fork.batch.forgotten
        self._options = saved_options(self._fork.config, self._forgotten)
        self.saved = Saved(name, len(self._ids))

    def run(self, on_layer: Callable[[], object] | None = None) -> SavedPoint:
        """Write what the store does not have, then give it its name. on_layer: called after each layer."""
        began = time.perf_counter()
        parent, marks = self._parent, marks_of(self._fork)
        if parent is not None and (parent.tokens, parent.forgotten) == (len(self._ids), self._forgotten):
            point = parent  # nothing came since
        else:
            digest, existed = self._write(parent, on_layer)
            marks = marks.of_another() if existed else marks
            point = SavedPoint(str(self._store.folder), digest, len(self._ids), self._forgotten, marks)
        self._store.name(self.saved.name, point.digest, self._plain)
        self.saved.digest, self.saved.seconds = point.digest, time.perf_counter() - began
        return point

    def _write(self, parent: SavedPoint | None, on_layer: Callable[[], object] | None) -> tuple[str, bool]:
        """The node's digest, and whether the store had it already."""
        known = 0 if parent is None else parent.tokens
        above = None if parent is None else parent.digest
        with self._store.writer(self._identity, above, self._ids[known:], self._options) as writer:
            if writer.exists:
                return writer.digest, True
            since = None if parent is None else parent.marks
            for number in range(len(self._fork.layers)):
                copy_layer = functools.partial(layer_bundle, self._fork, number, since)
                layer = with_device_memory(copy_layer, self.wait)
                self.saved.nbytes += write_layer(writer, layer, self.on_piece)
                if on_layer is not None:
                    on_layer()
            self.saved.new_tokens = len(self._ids) - known
            return writer.publish(node_plain(self._fork)), False


def layer_bundle(cache: RetrievalCache, number: int, since: Marks | None) -> tuple[str, Bundle] | None:
    """The file for layer `number`, and what the layer holds beyond `since`; None for one that keeps nothing."""
    file = file_of(cache, number)
    return None if file is None else (file, Bundle(*layer_state(cache, number, since)))


def write_layer(
    writer: NodeWriter, layer: tuple[str, Bundle] | None, on_piece: Callable[[], object] | None = None
) -> int:
    """Write what `layer_bundle` gave; returns bytes of arrays. on_piece: see `NodeWriter.add`."""
    if layer is None:
        return 0
    writer.add(*layer, on_piece)
    return sum(array.nbytes for array in layer[1].arrays.values())


def node_plain(cache: RetrievalCache) -> dict[str, Any]:
    """Return the record of a node: the options of its read, and the index that was decided on."""
    index = cache.index.config
    decided = {"index": index.index, "index_options": dict(index.index_options)}
    return {"config": cache.config.to_dict(), "decided": decided}


def saved_options(config: Config, forgotten: Forgotten) -> dict[str, Any]:
    """Return the options that saved data depends on, in addition to the tokens."""
    options = {name: value for name, value in config.to_dict().items() if name not in RUNTIME}
    return {**options, "forgotten": list(forgotten)}


def saving_bar(name: str, layers: int, *, show: bool) -> ProgressBar:
    """Shown only when saving takes longer than two seconds."""
    return ProgressBar(total=layers, desc=f"saving {name}", unit="layer", delay=2.0, leave=False, disable=not show)


class SavedLineage:
    """Saved contexts that one context continues, and the deferred check of the files that it was opened from.

    saving: the last save, which may be under way; None before the first.
    """

    def __init__(self, points: Sequence[SavedPoint] = (), check: DeferredVerify | None = None) -> None:
        self._points, self._check = tuple(points), check
        self.saving: Saved | None = None

    def fork(self) -> SavedLineage:
        """For a fork of the context."""
        return SavedLineage(self._points, self._check)

    def emptied(self) -> SavedLineage:
        """For the same context after all its text was read again: its keys are in no file."""
        other = SavedLineage()
        other.saving = self.saving
        return other

    def note(self, point: SavedPoint) -> None:
        """The context, as it was, is saved there."""
        self._points = (*self._points, point)

    def require_whole(self) -> None:
        """Raise StoreDamagedError if the files were found to be damaged so far."""
        if self._check is not None:
            self._check.require_whole()

    def hold(self) -> None:
        """A question is asked: what compares the files gives way to it for a while."""
        if self._check is not None:
            self._check.hold()

    def wait(self, *, progress: bool = False) -> None:
        """Until the files that the context was opened from were compared with their checksums: an opened context
        answers before that. Raises StoreDamagedError. progress: show a bar if that takes longer than two seconds.
        """
        if self._check is not None:
            self._check.wait(progress=progress)

    def saver(
        self, store: ContextStore, name: str, identity: str, fork: RetrievalCache, plain: Mapping[str, Any]
    ) -> Saver:
        """Return a saver of a cache that continues this lineage; `note` the point that its `run` returns."""
        return Saver(store, name, identity, fork, self._points, plain)

    def save(
        self,
        store: ContextStore,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: RetrievalCache,
        plain: Mapping[str, Any],
        wait: bool,
    ) -> Saved:
        """See `Context.save`. plain: kept with the name. A bar shows the layers."""
        check_name(name)
        saver = self.saver(store, name, identity_of(model, tokenizer), saving_fork(cache), plain)
        self.saving = saver.saved
        if wait:
            with saving_bar(name, len(cache.layers), show=True) as bar:
                self._run(saver, bar.update)
        else:
            saver.saved.start(functools.partial(self._run_beside, saver), daemon=False)
        return saver.saved

    def _run(self, saver: Saver, on_layer: Callable[[], object] | None = None) -> None:
        self.note(saver.run(on_layer))

    def _run_beside(self, saver: Saver) -> None:
        try:
            self._run(saver)
        except BaseException as error:
            log.warning("saving the context %r failed: %s", saver.saved.name, error)
            raise


@dataclass(frozen=True)
class SavedChain:
    """A saved context that was found and not opened yet: its nodes, the root first, their files mapped.

    name: by which it was found, for messages. folder: of the store.
    """

    name: str
    folder: Path
    nodes: tuple[SavedNode, ...]

    @property
    def digest(self) -> str:
        """Digest of its last node: it identifies the content, independent of names."""
        return self.nodes[-1].digest

    @property
    def forgotten(self) -> Forgotten:
        """Range of tokens that no token attends to any more."""
        with parsed(self.nodes[-1].folder / RECORD):
            start, stop = self.nodes[-1].options["forgotten"]
            if not is_list_of(is_count)([start, stop]) or start > stop:
                raise ValueError(f"forgotten tokens must be a range of token numbers, got {start} to {stop}")
            return Forgotten(start, stop)

    def ids(self) -> npt.NDArray[np.int32]:
        """All token ids (tokens,), checked. Raises StoreDamagedError."""
        return np.concatenate([node.ids for node in self.nodes])


def find_saved(store: ContextStore, name: str, identity: str, template: str, *, ids_only: bool = False) -> SavedChain:
    """Return the chain saved under a name. identity: of the model to open it; template: see `open_saved`.

    ids_only: it is not opened; only its token ids, and what is said of it, need be whole. Raises UnknownContextError,
    StoreMismatchError, StoreDamagedError.
    """
    named = store.resolve(name)
    chain = saved_chain(store, name, named.digest, identity, ids_only=ids_only)
    if named.plain.get("template") != template:
        raise StoreMismatchError(
            f"the context {name!r} was saved with another chat template than the tokenizer has now, so questions would "
            "not continue it; open it with the tokenizer it was saved with, or read the text again"
        )
    return chain


def saved_chain(store: ContextStore, name: str, digest: str, identity: str, *, ids_only: bool = False) -> SavedChain:
    """The nodes up to a digest, their files mapped again. name: for messages. Raises as `ContextStore.chain`."""
    return SavedChain(name, store.folder, tuple(store.chain(digest, identity, ids_only=ids_only)))


def emptied(saved: SavedChain, model: PreTrainedModel, config: Config) -> RetrievalCache:
    """An empty cache with the options that a saved context was read with. Raises StoreMismatchError."""
    last = saved.nodes[-1]
    chosen = _opened_config(last, config, {})
    cache = RetrievalCache(model, chosen)
    cache.index.take(_decided(last, chosen), len(saved.ids()))
    return cache


def open_saved(
    store: ContextStore,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    overrides: Mapping[str, Any],
    progress: bool,
    template: str,
) -> tuple[RetrievalCache, SavedLineage]:
    """The cache of a saved context, whose arrays are maps of its files. config: its RUNTIME options are taken.

    overrides: options that replace saved ones, of RUNTIME and `retrieve`. template: `template_digest` of the one that
    questions will have. Raises UnknownContextError, StoreMismatchError, StoreDamagedError, ConfigError.
    """
    found = find_saved(store, name, identity_of(model, tokenizer), template)
    cache, kept = open_chain(found, model, config, overrides, progress=progress)
    with using_retrieval(model, cache.config.prefill_chunk):
        make_ready(model, cache)
    return cache, kept


def open_chain(
    saved: SavedChain,
    model: PreTrainedModel,
    config: Config,
    overrides: Mapping[str, Any],
    *,
    progress: bool = False,
    on_layer: Callable[[], object] | None = None,
    on_damage: Callable[[StoreDamagedError], None] | None = None,
    whole_bytes: int = 0,
) -> tuple[RetrievalCache, SavedLineage]:
    """Open a context that was found, as `open_saved` does; nothing is captured or rehearsed for its first answer.

    on_layer: called after each layer; what it raises ends the opening. Runs in parallel to steps of the same model.
    on_damage: is told of damage that is found later. whole_bytes: contexts of up to this size are verified at once.
    """
    nodes, last = saved.nodes, saved.nodes[-1]
    chosen = _opened_config(last, config, overrides)
    index = _decided(last, chosen)
    ids = saved.ids().tolist()
    cache = restored_cache(model, chosen, index, ids, saved.forgotten)
    cache.on_layer = on_layer
    devices = layer_devices(model, len(cache.layers))
    with (
        compilation(model, cache, len(ids), progress=progress) as compiling,
        prepared(model, cache, compiling),
        ReadingBar(cache, f"opening {saved.name}", progress),
    ):
        small = sum(node.nbytes for node in nodes) <= whole_bytes
        _restore_layers(cache, nodes, devices, saved.folder, True if small else CHECKED_LATER)
    cache.on_layer = None
    make_rows_ahead(cache)
    point = SavedPoint(str(saved.folder), saved.digest, len(ids), saved.forgotten, marks_of(cache))
    return cache, SavedLineage([point], DeferredVerify(nodes, asked_exactly(cache, devices), on_damage))


def _restore_layers(
    cache: RetrievalCache,
    chain: Sequence[SavedNode],
    devices: Sequence[torch.device],
    folder: Path,
    verify: bool | tuple[str, ...],
) -> None:
    """folder: of the store, for errors. verify: as in `SavedNode.bundle`."""
    files, sent = dict(_files(chain[-1])), SentCodes()

    def states(number: int) -> list[State]:
        bundles = [node.bundle(files[number], verify=verify) for node in chain] if number in files else []
        return [(dict(one.plain), dict(one.arrays)) for one in bundles]

    try:
        with ThreadPoolExecutor(CHECKERS, "retrieval_attn-open") as pool:
            for number, told in enumerate(pool.map(states, range(len(devices)))):
                if told:
                    with _saved_options(chain[-1].folder / f"{files[number]}{SUFFIX}"):
                        restore_layer(cache, number, devices[number], told, sent)
                elif not isinstance(cache.layers[number], StateLayer):
                    raise damaged(chain[-1].folder / RECORD, f"it has no layer {number}")
                if cache.on_layer is not None:
                    cache.on_layer()
    finally:
        with guarded("read", folder):
            sent.wait()


def template_digest(*parts: str) -> str:
    """Return the digest of a template's texts: a question with another template does not continue a saved text."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def described(template: str, tokens: int, read_seconds: float, model: PreTrainedModel) -> dict[str, Any]:
    """Return the record that is kept with a saved context's name. template: `template_digest` of its template."""
    name = str(getattr(model.config, "_name_or_path", ""))
    return {"template": template, "tokens": tokens, "read_seconds": read_seconds, "model": name}


def _opened_config(node: SavedNode, config: Config, overrides: Mapping[str, Any]) -> Config:
    other = sorted(set(overrides) - {*RUNTIME, "retrieve"})
    if other:
        raise ConfigError(
            f"{', '.join(other)} cannot change for a saved context, whose data depends on it; read the text again, "
            f"or give some of {', '.join(RUNTIME)}, retrieve"
        )
    with _saved_options(node.folder / RECORD):
        saved = Config.from_dict(node.plain["config"])
    runtime = {name: getattr(config, name) for name in RUNTIME}
    return saved.replace(**{**runtime, **overrides})


def _decided(node: SavedNode, config: Config) -> Config:
    """`config` with the index that the first read decided on."""
    with _saved_options(node.folder / RECORD):
        return config.replace(**node.plain["decided"])


@contextlib.contextmanager
def _saved_options(path: Path) -> Iterator[None]:
    """Parse as `parsed`; a ConfigError, of options that this release does not have, becomes a StoreMismatchError."""
    try:
        with parsed(path):
            yield
    except ConfigError as error:
        raise StoreMismatchError(
            f"the context was saved with options that this release does not have ({str(error).rstrip('.')}); read the "
            "text again, or open it with the release that saved it"
        ) from error


def _files(node: SavedNode) -> list[tuple[int, str]]:
    with parsed(node.folder / RECORD):
        return [(int(file.removeprefix("layer-")), file) for file in node.files if file.startswith("layer-")]
