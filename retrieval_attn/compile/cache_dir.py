"""The one folder for compiled kernels, Numba's and Triton's, and the keys under which they lie there.

    <folder>/numba/<Python, Numba, LLVM, processor>/<module>-<key of its sources>/
    <folder>/numba/<Python, Numba, LLVM, processor>/jobs/     which jobs of `jobs.py` are done
    <folder>/triton/<triton, torch>/

<folder> is what RETRIEVAL_ATTN_CACHE names, else `retrieval_attn` in the user's cache folder. NUMBA_CACHE_DIR and
TRITON_CACHE_DIR, where they are set, win for their kernels. It can be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

VARIABLE = "RETRIEVAL_ATTN_CACHE"
"""Environment variable: the folder for compiled kernels."""
PACKAGE = Path(__file__).resolve().parents[1]

logger = logging.getLogger(__name__)
_IMPORT = re.compile(r"^\s*(?:from (retrieval_attn[\w.]*) import ([\w, ]+|\()|import (retrieval_attn[\w.]+))", re.M)
_complained: set[str] = set()


def folder() -> Path:
    """The folder for compiled kernels; it may not exist yet."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "retrieval_attn"


@functools.cache
def _numba_key() -> str:
    import llvmlite.binding
    import numba

    settings = vars(numba.config)
    processor = settings.get("CPU_NAME") or llvmlite.binding.get_host_cpu_name()
    features = settings.get("CPU_FEATURES") or llvmlite.binding.get_host_cpu_features().flatten()
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    versions = f"{python}-numba{numba.__version__}-llvmlite{llvmlite.__version__}"
    return f"{versions}-{platform.machine()}-{processor}-{_short(str(features).encode())}"


def numba_folder() -> Path:
    """Where Numba's kernels for this processor lie."""
    import numba

    given = vars(numba.config)["CACHE_DIR"]
    return Path(given).absolute() if given else folder() / "numba" / _numba_key()


def numba_folder_is_given() -> bool:
    """Whether the user named Numba's folder: it then lays its files out itself."""
    import numba

    return bool(vars(numba.config)["CACHE_DIR"])


def triton_folder() -> Path:
    """Where Triton's kernels lie; Triton keys them by device and source itself."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given).absolute() if given else folder() / "triton" / f"{_version('triton')}-torch{_version('torch')}"


def use_triton_folder() -> None:
    """Make Triton keep its kernels in `triton_folder`, or in one for this process alone where that cannot be.

    To be called before a kernel is compiled. Triton offers the environment variable alone, for the whole process.
    """
    wanted = triton_folder()
    try:
        require_writable(wanted)
    except OSError as error:
        complain(wanted, error)
        wanted = Path(tempfile.mkdtemp(prefix="retrieval_attn-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(wanted)


def require_writable(path: Path) -> None:
    """Make the folder where it is missing. Raises OSError if nothing can be written there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b"\0" * 4096)


def complain(path: Path, error: BaseException) -> None:
    """Say once for a folder that kernels cannot be kept there."""
    if str(path) not in _complained:
        _complained.add(str(path))
        logger.warning(
            "compiled kernels cannot be kept in %s (%s: %s), so every process compiles them again, for a minute or "
            "so. Make room or give access there, or name another folder in %s.",
            path,
            type(error).__name__,
            error,
            VARIABLE,
        )


@functools.cache
def source_key(module: str) -> str:
    """Changes with the source of a module of the package and of every one that it imports from there.

    A compiled function holds code of those that it calls: Numba looks at the function's own file alone.
    """
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name == "retrieval_attn.errors":
            continue
        path = _file_of(name)
        if path is None:
            continue
        found[name] = path.read_bytes()
        for source, names, whole in _IMPORT.findall(found[name].decode()):
            waiting += [source or whole, *(f"{source}.{one.strip()}" for one in names.split(",") if source)]
    return _short(b"".join(key.encode() + b"\0" + found[key] for key in sorted(found)))


def _file_of(module: str) -> Path | None:
    """The file of a module of the package; None for a package, a function or anything else."""
    parts = module.split(".")
    path = PACKAGE.joinpath(*parts[1:]).with_suffix(".py") if len(parts) > 1 else None
    return path if path is not None and path.is_file() else None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
