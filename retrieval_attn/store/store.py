"""The store: nodes by digest, names for them. Truth is in files; nothing is kept in memory but what runs."""

from __future__ import annotations

import builtins
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, StoreError, UnknownContextError
from retrieval_attn.store.disk import OS_DISK, Disk, guarded
from retrieval_attn.store.layout import Pin, StoreLayout, default_folder
from retrieval_attn.store.maintenance import Damage, Freed, Trimmed, stored_bytes, sweep, trim, verify
from retrieval_attn.store.names import (
    KnownName,
    NamedContext,
    check_name,
    note_use,
    read_name,
    readable_names,
    remove_name,
    write_name,
)
from retrieval_attn.store.node import SUFFIX, SavedNode, chain_of, check_identity
from retrieval_attn.store.writer import NodeWriter, is_marked, is_whole


def _absolute(folder: str | Path) -> Path:
    """The folder's absolute path. Raises ConfigError for what no folder can be called."""
    try:
        os.fsencode(folder)
        if "\0" not in str(folder):
            return Path(folder).expanduser().absolute()
    except (TypeError, UnicodeEncodeError, RuntimeError):  # the last: a home that is not known
        pass
    raise ConfigError(f"the folder of a store must be a path, got {folder!r:.80}; name a folder, or leave it out")


class ContextStore:
    """Saved contexts in one folder. Several processes and threads may use it at once.

    A node that this object published stays, whatever `gc` does elsewhere, until it is named, or until `close`, or until
    the process ends.
    """

    def __init__(self, folder: str | Path | None = None, *, disk: Disk = OS_DISK) -> None:
        """folder: created by the first save. Defaults to RETRIEVAL_ATTN_STORE, else a folder in the user's data folder.

        disk: file operations.
        """
        self.folder = default_folder() if folder is None else _absolute(folder)
        self._layout = StoreLayout(self.folder, disk)
        self._pins: builtins.list[Pin] = []
        self._known: dict[str, KnownName] = {}
        self._lock = threading.Lock()

    def writer(
        self, identity: str, parent: str | None, ids: npt.NDArray[np.int32], options: dict[str, Any]
    ) -> NodeWriter:
        """A writer for the node of these token ids (tokens,) after `parent`; use it in a `with` block.

        Raises UnknownContextError where the parent is gone, StoreMismatchError where it has another identity.
        """
        return NodeWriter(self._layout, identity, parent, ids, options, keep=self._keep)

    def _keep(self, pin: Pin) -> None:
        with self._lock:
            self._pins.append(pin)

    def get(self, digest: str, identity: str | None = None) -> SavedNode:
        """A node, mapped. identity: None takes any.

        Raises UnknownContextError, StoreDamagedError, and StoreMismatchError for another identity.
        """
        self._layout.exists()
        node = SavedNode(self._layout, digest)
        if identity is not None:
            check_identity(self._layout, {"digest": digest, "identity": node.identity}, identity)
        return node

    def chain(self, digest: str, identity: str | None = None, *, ids_only: bool = False) -> builtins.list[SavedNode]:
        """All nodes from the root to this one, mapped. Raises as `get`; a parent that is gone: UnknownContextError.

        ids_only: without what their other files hold, which may be damaged.
        """
        self._layout.exists()
        records = chain_of(self._layout, digest)
        if identity is not None:
            check_identity(self._layout, records[-1], identity)
        return [SavedNode(self._layout, record["digest"], ids_only=ids_only) for record in records]

    def known_damaged(self, named: NamedContext) -> bool:
        """Whether damage was found in what a name means, and it was not saved again since. Raises StoreError."""
        return any(is_marked(self._layout, digest) for digest in named.chain)

    def continues(self, digest: str) -> bool:
        """Whether a node can have children: all nodes up to it are there, and no damage of them is known."""
        try:
            self._layout.exists()
            return all(is_whole(self._layout, record["digest"]) for record in chain_of(self._layout, digest))
        except StoreError:
            return False

    def files(self, digest: str) -> builtins.list[Path]:
        """Paths of a node's bundles, sorted. Raises UnknownContextError for a node that is gone."""
        folder = self._layout.node(digest)
        names = [name for name in self._layout.listed(folder) if name.endswith(SUFFIX)]
        if not names:
            raise UnknownContextError(f"the store {self.folder} has no node {digest}; it was removed")
        return [folder / name for name in names]

    def name(self, name: str, digest: str, plain: dict[str, Any]) -> None:
        """Let `name` mean this node from now on, as a whole or not at all; what it meant before is for `gc`.

        plain: JSON values that come with the name. Raises StoreError for a name that may not be one, ConfigError for
        other values, UnknownContextError for a node that is gone, StoreError without space.
        """
        check_name(name)
        layout = self._layout
        layout.create()
        with layout.locked():
            records = chain_of(layout, digest)
            digests = [record["digest"] for record in records]
            with guarded("write", layout.nodes):
                for folder in {layout.node(one).parent for one in digests}:
                    layout.disk.fsync_folder(folder)  # who published them may have died before it did this
                layout.disk.fsync_folder(layout.nodes)
            write_name(layout, name, digests, sum(record["nbytes"] for record in records), plain)
        self._release(set(digests))

    def _release(self, digests: set[str] | None) -> None:
        """Release the pins of these nodes; None: all."""
        with self._lock:
            over = [pin for pin in self._pins if digests is None or pin.digests[-1] in digests]
            self._pins = [pin for pin in self._pins if pin not in over]
        for pin in over:
            with guarded("remove", pin.path):
                pin.release()

    def resolve(self, name: str) -> NamedContext:
        """Return the context of a name. Raises UnknownContextError, which names similar ones, and StoreDamagedError."""
        check_name(name)
        self._layout.exists()
        return read_name(self._layout, name)

    def list(self) -> builtins.list[NamedContext]:
        """All names, sorted; one whose file is damaged is left out and logged, `verify` tells more."""
        self._layout.exists()
        return readable_names(self._layout, self._known)

    @property
    def names_version(self) -> int | None:
        """Modification time of the names in ns; None without any. Raises StoreError."""
        with guarded("read", self._layout.contexts):
            try:
                return self._layout.disk.stat(self._layout.contexts).st_mtime_ns
            except FileNotFoundError:
                return None

    def remove(self, name: str) -> None:
        """Forget a name; `gc` then removes what no other name needs. Raises UnknownContextError."""
        check_name(name)
        if not self._layout.exists():
            read_name(self._layout, name)
        with self._layout.locked():
            remove_name(self._layout, name)

    def verify(
        self, names: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> builtins.list[Damage]:
        """Read every byte of these contexts, or of all. progress: told checked bytes and all bytes after each node."""
        return verify(self._layout, names, progress)

    def gc(self) -> Freed:
        """Remove nodes that no name reaches, and what dead saves left. Raises StoreDamagedError for a damaged name."""
        return sweep(self._layout)

    def note_use(self, name: str) -> None:
        """Make a context the most recently used one. Raises UnknownContextError, StoreError."""
        note_use(self._layout, name)

    def trim(self, nbytes: int) -> Trimmed:
        """Remove automatic contexts, the least recently used first, until the others have `nbytes` of files or less.

        `gc` then frees their files. Raises StoreError.
        """
        return trim(self._layout, nbytes)

    def free_bytes(self) -> int:
        """Free bytes of the file system that the folder is, or will be, in. Raises StoreError."""
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        with guarded("read", folder):
            return shutil.disk_usage(folder).free

    def nbytes(self) -> int:
        """Bytes of all nodes, and of saves under way."""
        return stored_bytes(self._layout)

    def close(self) -> None:
        """Release nodes that were published and not named: the next `gc` may remove them."""
        self._release(None)
