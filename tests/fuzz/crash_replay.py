"""What a disk may hold after a power cut: the operations of a run, some of those that were not synced yet left out.

The model is harsher than file systems are. Bytes of a file that were not synced may be there, cut short, or zeros in
part. Names that were not synced are there or not, each by itself; a rename alone is one thing, as POSIX wants it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_attn.store.disk import Disk

_SECTOR = 512


@dataclass(eq=False)
class Inode:
    """A file (data, and how many bytes of it are synced) or a folder (names that are synced)."""

    folder: bool
    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    names: dict[str, Inode] = field(default_factory=dict)
    seen: dict[str, Inode] = field(default_factory=dict)


Change = list[tuple[Inode, str, Inode | None]]
"""Names that appear or go together."""


class Replay:
    """Takes operations one after the other; tells, at any time, what a crash might leave."""

    def __init__(self, root: Path) -> None:
        """root: an existing folder; all paths are below it."""
        self._root, self._top = root, Inode(True)
        self._pending: list[Change] = []
        self._handles: dict[int, Inode] = {}

    def _find(self, path: Path) -> Inode:
        inode = self._top
        for part in path.relative_to(self._root).parts:
            inode = inode.seen[part]
        return inode

    def _change(self, *items: tuple[Path, Inode | None]) -> None:
        change = [(self._find(path.parent), path.name, inode) for path, inode in items]
        for folder, name, inode in change:
            _set(folder.seen, name, inode)
        self._pending.append(change)

    def take(self, name: str, *arguments: Any) -> None:
        """One operation of a Disk, with a file's bytes where it has some."""
        if name == "create" or (name == "lock" and not self._there(arguments[1])):
            inode = Inode(False)
            self._handles[arguments[0]] = inode
            self._change((arguments[1], inode))
        elif name == "lock":
            self._handles[arguments[0]] = self._find(arguments[1])
        elif name == "write":
            self._handles[arguments[0]].data += arguments[1]
        elif name in ("flush", "fsync"):
            inode = self._handles[arguments[0]]
            inode.synced = len(inode.data)
        elif name == "mkdir":
            self._change((arguments[0], Inode(True)))
        elif name in ("rename", "replace"):
            self._change((arguments[0], None), (arguments[1], self._find(arguments[0])))
        elif name in ("unlink", "rmdir"):
            self._change((arguments[0], None))
        elif name == "fsync_folder":
            folder = self._find(arguments[0])
            done = [change for change in self._pending if any(where is folder for where, _, _ in change)]
            self._pending = [change for change in self._pending if change not in done]
            for change in done:
                _apply(change)

    def _there(self, path: Path) -> bool:
        try:
            self._find(path)
        except KeyError:
            return False
        return True

    def crash(self, target: Path, choice: random.Random) -> None:
        """Write to `target`, an empty folder, one of the states that a crash now may leave."""
        keep = choice.choice((0.0, 0.5, 0.5, 1.0))
        saved = _copy_names(self._top, {})
        for change in self._pending:
            if choice.random() < keep:
                for folder, name, inode in change:
                    _set(saved.setdefault(id(folder), dict(folder.names)), name, inode)
        _write(self._top, target, saved, choice)


def _set(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _apply(change: Change) -> None:
    for folder, name, inode in change:
        _set(folder.names, name, inode)


def _copy_names(folder: Inode, found: dict[int, dict[str, Inode]]) -> dict[int, dict[str, Inode]]:
    found[id(folder)] = dict(folder.names)
    for inode in folder.names.values():
        if inode.folder:
            _copy_names(inode, found)
    return found


def _write(folder: Inode, target: Path, saved: dict[int, dict[str, Inode]], choice: random.Random) -> None:
    for name, inode in saved.get(id(folder), folder.names).items():
        if inode.folder:
            (target / name).mkdir(mode=0o700)
            _write(inode, target / name, saved, choice)
        else:
            (target / name).write_bytes(_content(inode, choice))


def _content(inode: Inode, choice: random.Random) -> bytes:
    data, rest = bytes(inode.data), len(inode.data) - inode.synced
    way = choice.randrange(4) if rest else 3
    if way == 0:
        return data[: inode.synced]
    if way == 1:
        return data[: inode.synced + choice.randrange(rest + 1)]
    if way == 2:
        changed = bytearray(data)
        for first in range(inode.synced, len(data), _SECTOR):
            if choice.random() < 0.5:
                last = min(first + _SECTOR, len(data))
                changed[first:last] = bytes(last - first)
        return bytes(changed)
    return data


class RecordingDisk(Disk):
    """The operating system's files, and a list of what was done to them."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self.operations.append(("create", handle, path))
        return handle

    def lock(self, path: Path, *, wait_seconds: float) -> int | None:
        handle = super().lock(path, wait_seconds=wait_seconds)
        if handle is not None:
            self.operations.append(("lock", handle, path))
        return handle

    def write(self, handle: int, data: memoryview) -> None:
        super().write(handle, data)
        self.operations.append(("write", handle, bytes(data)))

    def flush(self, handle: int) -> None:
        self.operations.append(("flush", handle))

    def fsync(self, handle: int) -> None:
        self.operations.append(("fsync", handle))

    def fsync_folder(self, path: Path) -> None:
        os.stat(path)
        self.operations.append(("fsync_folder", path))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.operations.append(("mkdir", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.operations.append(("rename", source, target))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.operations.append(("replace", source, target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.operations.append(("unlink", path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.operations.append(("rmdir", path))
