"""Writing a node: bundles go to a folder of their own, which one rename makes a node when all of it is on the disk."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy.typing as npt

from retrieval_attn.errors import StoreDamagedError, StoreError, UnknownContextError
from retrieval_attn.store.bundle import Bundle, Seal, laid_out, write_bundle
from retrieval_attn.store.disk import guarded
from retrieval_attn.store.layout import FORMAT, Pin, StoreLayout, write_file
from retrieval_attn.store.maintenance import remove_tree
from retrieval_attn.store.node import (
    DAMAGED,
    IDS,
    RECORD,
    SUFFIX,
    SavedNode,
    chain_of,
    check_identity,
    check_ids,
    digest_of,
    is_file_name,
)
from retrieval_attn.store.record import canonical, encode

logger = logging.getLogger(__name__)


class NodeWriter:
    """One save: a context manager that gives up what it wrote unless `publish` was called.

    digest: the node's. exists: the node is in the store already, so `add` and `publish` write nothing.
    """

    def __init__(
        self,
        layout: StoreLayout,
        identity: str,
        parent: str | None,
        ids: npt.NDArray[Any],
        options: dict[str, Any],
        *,
        keep: Callable[[Pin], None],
    ) -> None:
        """ids: token ids after those of `parent`. keep: receives the pin of a published node.

        Raises UnknownContextError if the parent, or an ancestor of it, was removed.
        """
        self._layout, self._keep = layout, keep
        self._identity, self._parent, self._options = identity, parent, options
        self._ids = check_ids(ids)
        self.digest = digest_of(self._identity, self._parent, self._options, self._ids)
        self._files: dict[str, Seal] = {}
        self._lock = threading.Lock()
        self._published = False
        self._made = False
        layout.create()
        with layout.locked():
            above = [] if self._parent is None else chain_of(layout, self._parent)
            if above:
                check_identity(layout, above[-1], self._identity)
            self._pin = Pin(layout, [*(record["digest"] for record in above), self.digest])
            self._folder = layout.tmp / self._pin.stem
            try:
                self.exists = is_whole(layout, self.digest)
            except BaseException:
                self.close()
                raise

    def add(self, file: str, bundle: Bundle, on_piece: Callable[[], object] | None = None) -> None:
        """Write a bundle as `file`, a name like "layer-000", and wait until it is on the disk. Any thread.

        on_piece: called after each part of an array; an exception of it ends the write.
        Raises ConfigError for values or arrays that cannot be saved, StoreError.
        """
        if not is_file_name(file) or file == IDS:
            raise StoreError(f"a bundle's name has letters, digits and _ . - only, and is not 'ids', got {file!r:.80}")
        self._add(file, bundle, on_piece)

    def _add(self, file: str, bundle: Bundle, on_piece: Callable[[], object] | None = None) -> None:
        if self.exists:
            return
        laid_out(bundle)  # raises before anything is written
        with self._lock:
            if file in self._files:
                raise StoreError(f"node {self.digest[:12]} has a bundle {file!r} already; add each once")
            self._files[file] = Seal(0, 0, 0)
            self._make_folder()
        path = self._folder / f"{file}{SUFFIX}"
        with guarded("write", path):
            self._files[file] = write_bundle(self._layout.disk, path, bundle, on_piece)

    def _make_folder(self) -> None:
        if not self._made:
            with guarded("make", self._folder):
                self._layout.disk.mkdir(self._folder)
            self._made = True

    def publish(self, plain: dict[str, Any]) -> str:
        """Make the node one of the store, for good: when this returns, no crash takes it away. Returns its digest.

        plain: JSON values that come with it. Where the node exists already, that one stays as it is. Raises as `add`.
        """
        layout, disk = self._layout, self._layout.disk
        if not self.exists:
            self._add(IDS, Bundle({}, {IDS: self._ids}))
            unfinished = [file for file, seal in self._files.items() if not seal.nbytes]
            if unfinished:
                raise StoreError(
                    f"node {self.digest[:12]} cannot be published before {', '.join(unfinished)} is written"
                )
            with guarded("write", self._folder):
                write_file(disk, self._folder / RECORD, self._record(plain))
                disk.fsync_folder(self._folder)
        target = layout.node(self.digest)
        gone = layout.fresh(".gone")
        with layout.locked(), guarded("publish", target):
            if not is_whole(layout, self.digest):
                if self.exists:
                    raise StoreError(f"{target} was damaged while it was saved again; save it once more")
                with contextlib.suppress(FileExistsError):
                    disk.mkdir(target.parent)
                with contextlib.suppress(FileNotFoundError):
                    disk.rename(target, gone)
                disk.rename(self._folder, target)
                self._made = False
            # also for a node that is there: who put it there may have died before this
            disk.fsync_folder(target.parent)
            disk.fsync_folder(layout.nodes)
        self._published = True
        self._clear(gone)
        return self.digest

    def _record(self, plain: dict[str, Any]) -> bytes:
        record = {
            "format": FORMAT,
            "digest": self.digest,
            "parent": self._parent,
            "identity": self._identity,
            "options": self._options,
            "plain": plain,
            "tokens": len(self._ids),
            "nbytes": sum(seal.nbytes for seal in self._files.values()),
            "files": {
                name: [seal.nbytes, seal.header_crc, seal.table_crc] for name, seal in sorted(self._files.items())
            },
        }
        canonical(plain, "plain")
        return encode(record)

    def _clear(self, *folders: Any) -> None:
        """Remove folders, where the disk lets us: `gc` takes what stays."""
        for folder in folders:
            try:
                remove_tree(self._layout.disk, folder)
            except OSError as error:
                logger.warning("cannot remove %s; `retrieval-attn contexts gc` will: %s", folder, error)

    def close(self) -> None:
        """Give up what was not published; a second time it does nothing."""
        if self._made:
            self._made = False
            self._clear(self._folder)
        if self._published:
            self._keep(self._pin)
            return
        try:
            self._pin.release()
        except OSError as error:
            logger.warning("cannot remove %s; `retrieval-attn contexts gc` will: %s", self._pin.path, error)

    def __enter__(self) -> NodeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_marked(layout: StoreLayout, digest: str) -> bool:
    """Whether damage of a node was found, and it was not saved again since."""
    marked = layout.node(digest) / DAMAGED
    with guarded("read", marked):
        try:
            layout.disk.stat(marked)
        except FileNotFoundError:
            return False
        return True


def is_whole(layout: StoreLayout, digest: str) -> bool:
    """Whether a node is in the store and nothing about it is known to be wrong: its record, the sizes of its files."""
    if is_marked(layout, digest):
        return False
    try:
        SavedNode(layout, digest)
    except UnknownContextError:
        return False
    except StoreDamagedError as error:
        logger.warning("saving a damaged node again: %s", error)
        return False
    return True
