"""Files that are replaced as a whole: a reader or a crash sees the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

STALE_SECONDS = 60.0
"""A temporary file this old that nobody has locked was left by a process that was killed."""


def replace_file(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = 0o666) -> None:
    """Call write(file) on a new file beside `path`, then put it, on the disk, in the place of `path`.

    Several threads and processes may do so at once; the last one wins. The new file's name cannot be guessed, and
    nothing that lies there is opened. Files that were left by processes that ended in the middle are removed.
    mode: permissions of the new file; the umask takes some away.
    Raises OSError; `path` is then as before.
    """
    stem = f".{path.name[:200]}."  # with what follows, no longer than file systems allow
    _sweep(path.parent, stem)
    temporary = path.with_name(f"{stem}{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(handle, "wb") as file:
            _lock(handle)
            write(file)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lock(handle: int) -> bool:
    """Hold the file until it is closed; False if another process does. True where the system has no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError:
        return False
    return True


def _sweep(folder: Path, stem: str) -> None:
    """Remove old temporary files that no process holds."""
    for name in folder.glob(f"{glob.escape(stem)}*.tmp"):
        with contextlib.suppress(OSError):  # another process may be at it
            if name.is_symlink() or not name.is_file() or time.time() - name.stat().st_mtime < STALE_SECONDS:
                continue
            with open(name, "rb") as file:
                if _lock(file.fileno()):
                    name.unlink()
