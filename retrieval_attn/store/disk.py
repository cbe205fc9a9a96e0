"""The only way from the store to files: a small set of operations, so that tests can make each of them fail."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from retrieval_attn.errors import ConfigError, RetrievalAttentionError, StoreDamagedError, StoreError
from retrieval_attn.store.mapped import Mapped, OddFileError, map_file, open_regular, read_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_PAUSE_SECONDS = 0.01
_SHARED_KINDS = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "afs")
"""Beginnings of the names of file systems whose files another machine may cut, or whose server may go away."""


class Disk:
    """File operations. All raise OSError; paths are absolute. Files are for their owner alone: 0600, folders 0700.

    `read`, `map` and `lock` raise OddFileError for paths that are not regular files, and never block on one.
    """

    def create(self, path: Path) -> int:
        """A handle to write a new file; FileExistsError where one is."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all bytes."""
        while data:
            data = data[os.write(handle, data) :]

    def flush(self, handle: int) -> None:
        """Wait until the bytes written so far are on the disk."""
        getattr(os, "fdatasync", os.fsync)(handle)

    def fsync(self, handle: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Let a handle go."""
        os.close(handle)

    def fsync_folder(self, path: Path) -> None:
        """Wait until a folder's names are on the disk."""
        if os.name == "nt":  # has no such operation
            return
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def mkdir(self, path: Path) -> None:
        """Make one folder; FileExistsError where it is."""
        os.mkdir(path, 0o700)

    def rename(self, source: Path, target: Path) -> None:
        """Move a folder to a place that is free."""
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Move a file; one that is at the target is gone."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """Names in a folder, in any order."""
        return os.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """Return the status of a file, or of a link and not its target."""
        return os.lstat(path)

    def touch(self, path: Path) -> None:
        """Set the modification time of a file to now."""
        os.utime(path)

    def read(self, path: Path, limit: int) -> bytes:
        """A file's bytes. Raises OddFileError for a file of more than `limit` bytes."""
        with os.fdopen(open_regular(path), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > limit:
                raise OddFileError(path, f"it has {nbytes} bytes, at most {limit} are expected")
            return file.read(nbytes)

    def map(self, path: Path) -> Mapped:
        """A file's bytes, as a private map where that is safe, else read when they are first needed."""
        handle = open_regular(path)
        try:
            status = os.fstat(handle)
            if _is_ours_alone(status) and not _is_shared(path, status.st_dev):
                return map_file(handle, status.st_size)
            return read_file(path, status.st_size)
        finally:
            os.close(handle)

    def lock(self, path: Path, *, wait_seconds: float) -> int | None:
        """A handle that holds the lock of a file, made if it is not there; None if another held it all the time.

        The lock ends with `close`, or with the process, however that ends.
        """
        handle = open_regular(path, os.O_RDWR | os.O_CREAT)
        if fcntl is None:
            return handle
        until = time.monotonic() + wait_seconds
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return handle
                except BlockingIOError:
                    if time.monotonic() >= until:
                        os.close(handle)
                        return None
                time.sleep(_PAUSE_SECONDS)
        except OSError:
            os.close(handle)
            raise


OS_DISK = Disk()


def _is_ours_alone(status: os.stat_result) -> bool:
    """Whether only this process's user and root may write to a file. Windows cuts no file that is mapped."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


_kinds: dict[int, bool] = {}


def _is_shared(path: Path, device: int) -> bool:
    """Whether other machines share the file system of `path`, by the kernel's list of mounts."""
    if device not in _kinds:
        _kinds[device] = file_system(path, device).startswith(_SHARED_KINDS)
    return _kinds[device]


def file_system(path: Path, device: int, mounts: str = "/proc/self/mountinfo") -> str:
    """The kind of file system that `path` on `device` is in: "ext4", "nfs4", ...; "" where the system does not tell.

    Fields of a line of the list: see proc_pid_mountinfo(5). Some file systems give files other device numbers than the
    list has: there the longest mount point above the path counts.
    """
    best, kind = -1, ""
    number, place = f"{os.major(device)}:{os.minor(device)}", str(path.resolve())
    try:
        lines = Path(mounts).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        point = fields[4].encode().decode("unicode_escape")
        found = fields[fields.index("-", 6) + 1]
        above = place == point or place.startswith(point.rstrip("/") + "/")
        # the same device is surer than any path
        weight = len(point) + (1 << 20) * (fields[2] == number)
        if (above or fields[2] == number) and weight >= best:
            best, kind = weight, found
    return kind


_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_CURES = {
    errno.EACCES: "give its owner access, or name another folder",
    errno.EPERM: "give its owner access, or name another folder",
    errno.EROFS: "name a folder on a disk that can be written",
    errno.ENOENT: "it was removed meanwhile; see what there is with `retrieval-attn contexts ls`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "look after the disk: `retrieval-attn contexts verify` tells what can still be read",
}


def damaged(path: Path, why: str) -> StoreDamagedError:
    """The error for a file whose bytes are wrong."""
    return StoreDamagedError(
        f"{path} is damaged: {why}; `retrieval-attn contexts verify` names the contexts that need it: "
        "read their texts again and save them under the same names"
    )


_NONSENSE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


@contextlib.contextmanager
def parsed(path: Path) -> Iterator[None]:
    """Turn what is raised inside the block for values that no program wrote into a StoreDamagedError.

    path: of the file that has them. ConfigError stays: options of another release are no damage.
    """
    try:
        yield
    except (ConfigError, StoreError):
        raise
    except _NONSENSE as error:
        why = str(error) if isinstance(error, RetrievalAttentionError) else repr(error)
        raise damaged(path, f"its values are not those of a saved context ({why:.300})") from error


@contextlib.contextmanager
def guarded(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError: "cannot <doing> <path>".

    An OddFileError becomes a StoreDamagedError.
    """
    try:
        yield
    except OddFileError as error:
        raise damaged(Path(error.filename), str(error.strerror)) from error
    except OSError as error:
        where = error.filename or path
        why = error.strerror or str(error)
        if error.errno in _FULL:
            raise StoreError(
                f"no room to {doing} {where}: {why}; free some, or remove contexts with `retrieval-attn contexts rm` "
                "and then `gc`",
                reason="full",
            ) from error
        cure = _CURES.get(error.errno or 0, "look after the disk, or name another folder for the store")
        raise StoreError(f"cannot {doing} {where}: {why}; {cure}") from error
