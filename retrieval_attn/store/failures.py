"""What goes wrong with files, as errors of this package: which file, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from retrieval_attn.errors import ConfigError, RetrievalAttentionError, StoreDamagedError, StoreError
from retrieval_attn.store.mapped import OddFileError

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
