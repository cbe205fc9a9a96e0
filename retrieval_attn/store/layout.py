"""Where things lie in a store, the store's lock, and the pins by which running saves keep nodes from `gc`.

    STORE/VERSION LOCK tmp/ nodes/ab/<sha256>/node.json layer-000.ra ... contexts/<name>.json responses/

A pin is a locked file `tmp/<uuid>.lock` that lists digests: it holds as long as its process lives. What begins with the
same uuid in `tmp` belongs to it. LOCK is held for moments only: to take a pin, to publish, to name, to find garbage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.errors import StoreError, StoreMismatchError
from retrieval_attn.store.disk import Disk, damaged, guarded
from retrieval_attn.store.record import MAX_BYTES, Check, decode, encode, is_digest

VARIABLE = "RETRIEVAL_ATTN_STORE"
"""Environment variable: the folder for saved contexts."""
VERSION = 1
FORMAT = 2
"""Of the records of nodes, names and pins."""
BUSY_SECONDS = 30.0
_KIND = "retrieval-attn contexts "
_VERSION_BYTES = 1 << 12
_PARTS = {"VERSION", "LOCK", "tmp", "nodes", "contexts", "responses"}
logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """The store's folder if none is given: RETRIEVAL_ATTN_STORE, else in the user's data folder."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser().absolute() if given else user_folder() / "contexts"


def user_folder() -> Path:
    """Return this package's folder in the user's data folder; nothing is created."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser().absolute() / "retrieval_attn"


@dataclass(frozen=True)
class StoreLayout:
    """Paths of one store. disk: the way to its files."""

    root: Path
    disk: Disk

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    @property
    def contexts(self) -> Path:
        return self.root / "contexts"

    def node(self, digest: str) -> Path:
        """The folder of a node. Raises StoreError for what is no digest."""
        if not is_digest(digest):
            raise StoreError(f"a node's digest is 64 hexadecimal digits, got {digest!r:.80}")
        return self.nodes / digest[:2] / digest

    def fresh(self, suffix: str) -> Path:
        """Return an unused path in `tmp`."""
        return self.tmp / f"{uuid.uuid4().hex}{suffix}"

    def exists(self) -> bool:
        """Whether there is a store. Raises StoreMismatchError for one of another version."""
        path = self.root / "VERSION"
        with guarded("read", path):
            try:
                text = self.disk.read(path, _VERSION_BYTES).decode("ascii", "replace")
            except FileNotFoundError:
                return False
        found = text.removeprefix(_KIND).removesuffix("\n")
        if text != f"{_KIND}{found}\n" or not found.isdecimal():
            raise damaged(path, f"it must contain '{_KIND}{VERSION}', it contains {text!r:.80}")
        if found != str(VERSION):
            raise StoreMismatchError(
                f"the store {self.root} has version {found}, this program knows version {VERSION}; "
                f"use the program that wrote it, or name another folder (--store, {VARIABLE})"
            )
        return True

    def create(self) -> None:
        """Make what of the store is not there. Raises StoreError where the folder holds other things."""
        found = self.exists()
        with guarded("make", self.root):
            self._make(self.root)
            for path in (self.tmp, self.nodes, self.contexts) if found else ():
                self._make(path)  # some programs that copy folders leave out empty ones
            if found:
                return
            foreign = self._foreign()
            if self.exists():  # another process was faster
                return
            if foreign:
                raise StoreError(
                    f"{self.root} is no store of contexts: it has no VERSION but {', '.join(foreign[:3])}; "
                    "name an empty folder"
                )
            for path in (self.tmp, self.nodes, self.contexts):
                with contextlib.suppress(FileExistsError):
                    self.disk.mkdir(path)
            new = self.fresh(".version")
            write_file(self.disk, new, f"{_KIND}{VERSION}\n".encode())
            self.disk.replace(new, self.root / "VERSION")
            self.disk.fsync_folder(self.root)

    def _foreign(self) -> list[str]:
        """Return files that no interrupted creation of a store leaves; `gc` must never remove them."""
        found = [self.root / name for name in self.listed(self.root) if name not in _PARTS]
        found += [self.tmp / name for name in self.listed(self.tmp) if not name.endswith(".version")]
        found += [folder / name for folder in (self.nodes, self.contexts) for name in self.listed(folder)]
        return [str(path.relative_to(self.root)) for path in found]

    def _make(self, folder: Path) -> None:
        try:
            self.disk.mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make(folder.parent)
            self.disk.mkdir(folder)
        self.disk.fsync_folder(folder.parent)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock inside the block. Raises StoreError with the reason "busy" after BUSY_SECONDS."""
        path = self.root / "LOCK"
        with guarded("lock", path):
            handle = self.disk.lock(path, wait_seconds=BUSY_SECONDS)
        if handle is None:
            raise StoreError(
                f"another process has held {path} for {BUSY_SECONDS:.0f} s; wait for its `gc`, or end that process",
                reason="busy",
            )
        try:
            yield
        finally:
            self.let_go(handle)

    def let_go(self, handle: int) -> None:
        """Close a lock's handle. Nothing was written by it, so an error of that loses nothing."""
        try:
            self.disk.close(handle)
        except OSError as error:
            logger.warning("cannot close a lock of %s: %s", self.root, error)

    def listed(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; none where it is not there."""
        with guarded("list", folder):
            try:
                return sorted(self.disk.listdir(folder))
            except FileNotFoundError:
                return []


class Pin:
    """Keeps nodes from `gc` while it is held. Made under the store's lock."""

    def __init__(self, layout: StoreLayout, digests: Sequence[str]) -> None:
        """Raises StoreError where it cannot be written; nothing is left then."""
        self._disk, self.path = layout.disk, layout.fresh(".lock")
        self.digests = tuple(digests)
        self._handle: int | None = None
        with guarded("write", self.path):
            self._handle = self._disk.lock(self.path, wait_seconds=0)
            assert self._handle is not None, "nobody else knows this name"
            try:
                self._disk.write(self._handle, memoryview(encode({"format": FORMAT, "digests": list(digests)})))
            except BaseException:
                with contextlib.suppress(OSError):
                    self.release()
                raise

    @property
    def stem(self) -> str:
        """Prefix of the names of the save's files in `tmp`."""
        return self.path.name.removesuffix(".lock")

    def release(self) -> None:
        """Let the nodes go; a second time it does nothing. Raises OSError."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            self._disk.unlink(self.path)
        finally:
            self._disk.close(handle)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises OSError."""
    handle = disk.create(path)
    try:
        disk.write(handle, memoryview(data))
        disk.fsync(handle)
    finally:
        disk.close(handle)


def read_record(disk: Disk, path: Path, fields: Mapping[str, Check]) -> dict[str, Any]:
    """A record whose `fields` pass these checks.

    Raises FileNotFoundError, StoreDamagedError, StoreMismatchError for one that a newer program wrote, StoreError.
    """
    with guarded("read", path):
        try:
            data = disk.read(path, MAX_BYTES)
        except FileNotFoundError:
            data = None
    if data is None:
        raise FileNotFoundError(path)
    try:
        record = decode(data)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if type(record.get("format")) is int and record["format"] != FORMAT:
        raise StoreMismatchError(
            f"{path} has format {record['format']}, this release reads format {FORMAT}; use the release that saved it"
        )
    checks = {"format": lambda value: type(value) is int, **fields}
    wrong = [name for name, check in checks.items() if name not in record or not check(record[name])]
    if wrong:
        raise damaged(path, f"these fields are missing or malformed: {', '.join(wrong)}")
    return record
