"""Garbage collection and verification of a store, safe during loads and saves of other threads and processes.

A node is removed by one rename, so no half of it remains. Processes that have mapped it keep their maps.
"""

from __future__ import annotations

import contextlib
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from retrieval_attn.errors import StoreDamagedError, StoreError, UnknownContextError
from retrieval_attn.store.disk import Disk, guarded
from retrieval_attn.store.layout import StoreLayout, read_record
from retrieval_attn.store.names import last_use, read_name, readable_names, remove_name, stored_names
from retrieval_attn.store.node import DAMAGED, IDS, RECORD, SUFFIX, SavedNode, read_node
from retrieval_attn.store.record import is_digest, is_list_of


class Freed(NamedTuple):
    """Result of `gc`. nodes: removed nodes. leftovers: files and folders of interrupted saves."""

    nodes: int
    leftovers: int
    nbytes: int


def sweep(layout: StoreLayout) -> Freed:
    """Remove nodes that neither a name nor a running save reaches, and what dead saves left in `tmp`.

    Raises StoreDamagedError, before anything is removed, where a name's file is damaged: what it reaches is unknown.
    """
    if not layout.exists():
        return Freed(0, 0, 0)
    with layout.locked():
        kept = _named(layout)
        stale, pinned = _leftovers(layout)
        nodes = []
        for part in layout.listed(layout.nodes):
            if not _is_folder(layout, layout.nodes / part):  # a link leads out of the store
                continue
            for digest in layout.listed(layout.nodes / part):
                if digest in kept or digest in pinned:
                    continue
                gone = layout.fresh(".gone")
                with guarded("remove", layout.nodes / part / digest):
                    layout.disk.rename(layout.nodes / part / digest, gone)
                nodes.append(gone)
    nbytes = 0
    for path in [*stale, *nodes]:
        with guarded("remove", path):
            nbytes += remove_tree(layout.disk, path)
    return Freed(len(nodes), len(stale), nbytes)


class Trimmed(NamedTuple):
    """Result of `trim`. names: removed contexts, oldest use first. nbytes: of the nodes of those that stay."""

    names: tuple[str, ...]
    nbytes: int


def trim(layout: StoreLayout, nbytes: int) -> Trimmed:
    """Remove names of automatic contexts, the least recently used first, until their nodes have `nbytes` or less.

    `sweep` then removes nodes without a name. Raises StoreError.
    """
    if not layout.exists():
        return Trimmed((), 0)
    with layout.locked():
        found = [one for one in readable_names(layout, {}) if one.is_automatic]
        users = Counter(digest for one in found for digest in one.chain)
        sizes = {digest: _size(layout, digest) for digest in users}
        held, removed = sum(sizes.values()), list[str]()
        for one in sorted(found, key=lambda one: last_use(layout, one.name)):
            if held <= nbytes:
                break
            remove_name(layout, one.name)
            removed.append(one.name)
            users.subtract(one.chain)
            held -= sum(sizes[digest] for digest in one.chain if not users[digest])
    return Trimmed(tuple(removed), held)


def _named(layout: StoreLayout) -> set[str]:
    """Digests of all nodes that names reach."""
    with guarded("read", layout.contexts):
        # a name that was removed or replaced must not come back after its nodes went
        layout.disk.fsync_folder(layout.contexts)
    kept = set[str]()
    for name in stored_names(layout):
        try:
            kept.update(read_name(layout, name).chain)
        except StoreDamagedError as error:
            raise StoreDamagedError(
                f"nothing was removed, for it is not known what {name!r} needs: {error}; "
                f"or remove it with `retrieval-attn contexts rm {name}`"
            ) from error
    return kept


def _leftovers(layout: StoreLayout) -> tuple[list[Path], set[str]]:
    """Return paths in `tmp` that no running process has pinned, and the digests that running ones have."""
    entries = layout.listed(layout.tmp)
    alive, pinned = set[str](), set[str]()
    for entry in entries:
        path = layout.tmp / entry
        if not entry.endswith(".lock"):
            continue
        with guarded("lock", path):
            handle = layout.disk.lock(path, wait_seconds=0)
        if handle is not None:
            layout.let_go(handle)
            continue
        alive.add(entry.partition(".")[0])
        try:
            pinned.update(read_record(layout.disk, path, {"digests": is_list_of(is_digest)})["digests"])
        except FileNotFoundError:  # it has just ended
            continue
    return [layout.tmp / entry for entry in entries if entry.partition(".")[0] not in alive], pinned


def _is_folder(layout: StoreLayout, path: Path) -> bool:
    with guarded("read", path):
        try:
            return stat.S_ISDIR(layout.disk.stat(path).st_mode)
        except FileNotFoundError:
            return False


def remove_tree(disk: Disk, path: Path) -> int:
    """Remove a file or a folder with all that is in it; returns its bytes. What is gone already is no error."""
    try:
        status = disk.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            disk.unlink(path)
            return status.st_size
        nbytes = sum(remove_tree(disk, path / name) for name in disk.listdir(path))
        disk.rmdir(path)
        return nbytes
    except FileNotFoundError:
        return 0


def stored_bytes(layout: StoreLayout) -> int:
    """Bytes of all files of nodes, and of those that are being written."""

    def size(path: Path) -> int:
        try:
            status = layout.disk.stat(path)
        except FileNotFoundError:
            return 0
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        return sum(size(path / name) for name in layout.listed(path))

    with guarded("read", layout.root):
        folders = layout.nodes, layout.tmp  # themselves links, where the nodes lie on another disk
        return sum(size(folder / name) for folder in folders for name in layout.listed(folder))


class Damage(NamedTuple):
    """A damaged file. names: contexts that need it. node: digest, None for a name's file. what: the error message."""

    names: tuple[str, ...]
    node: str | None
    file: Path
    what: str


def verify(
    layout: StoreLayout, names: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """Check every byte of these contexts, None for all. Return the damage, an empty list for none.

    progress: called after each node with the checked bytes and all bytes. Raises UnknownContextError for an unknown
    name, and StoreMismatchError for another version of the store.
    """
    layout.exists()
    found: list[Damage] = []
    needed: dict[str, list[str]] = {}
    for name in stored_names(layout) if names is None else names:
        try:
            named = read_name(layout, name)
        except UnknownContextError:
            if names is None:  # removed meanwhile
                continue
            raise
        except StoreError as error:
            found.append(Damage((name,), None, layout.contexts / f"{name}.json", str(error)))
            continue
        for digest in named.chain:
            needed.setdefault(digest, []).append(name)
    sizes = {digest: _size(layout, digest) for digest in needed}
    done = 0
    for digest, users in needed.items():
        found += _check(layout, digest, tuple(users))
        done += sizes[digest]
        if progress is not None:
            progress(done, sum(sizes.values()))
    return found


def _size(layout: StoreLayout, digest: str) -> int:
    with contextlib.suppress(StoreError):
        return int(read_node(layout, digest)["nbytes"])
    return 0


def _check(layout: StoreLayout, digest: str, names: tuple[str, ...]) -> list[Damage]:
    """Check one node, one file in memory at a time if files are read and not mapped."""
    folder = layout.node(digest)
    try:
        node = SavedNode(layout, digest)
    except StoreError as error:
        needed = _still_needs(layout, names, digest)
        return [Damage(names, digest, folder / RECORD, str(error))] if needed else []
    wrong = []
    for file in [IDS, *node.files]:
        try:
            if file == IDS:
                node.ids  # noqa: B018  # the property checks that they give the digest
            node.file(file).check()
        except StoreError as error:
            wrong.append(Damage(names, digest, folder / f"{file}{SUFFIX}", str(error)))
        node.file(file).release()
    if not wrong:
        with contextlib.suppress(OSError):
            layout.disk.unlink(folder / DAMAGED)
    return wrong


def _still_needs(layout: StoreLayout, names: Sequence[str], digest: str) -> bool:
    """Whether one of the names still reaches a node that could not be opened."""
    for name in names:
        with contextlib.suppress(StoreError):
            if digest in read_name(layout, name).chain:
                return True
    return False
