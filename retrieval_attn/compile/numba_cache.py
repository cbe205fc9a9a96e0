"""Numba's cache of this package's kernels: in `cache_dir.numba_folder`, safe for processes side by side, never fatal.

Numba as it is keeps compiled functions next to the source, refuses to compile where it can write nowhere, fails where
a disk is full, and mixes functions up when two processes save specialisations of the same one at the same time. It has
no option for either, so importing this module puts a locator in front of Numba's, and wraps loading and saving. Kernels
of other packages are left alone. `retrieval_attn.index` and `retrieval_attn.cpu` import it before they define any.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba.core.caching

from retrieval_attn.compile import cache_dir as place

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment, unused-ignore]

caching: Any = numba.core.caching
_OURS = "retrieval_attn."
_BROKEN = (OSError, EOFError, pickle.PickleError, ValueError, KeyError, IndexError, AttributeError, ImportError)
"""What reading a damaged file of a cache raises."""


class KernelLocator:
    """Tells Numba where a kernel of this package lies: Numba's interface of a locator."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        module = py_func.__module__
        self._py_file, self._line = py_func.__code__.co_filename, py_func.__code__.co_firstlineno
        self._key = place.source_key(module)
        self._path = str(place.numba_folder() / f"{module.removeprefix(_OURS)}-{self._key}")

    def get_cache_path(self) -> str:
        return self._path

    def ensure_cache_path(self) -> None:
        Path(self._path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return self._key

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> KernelLocator | None:
        """None for a function of another package, and where the user named Numba's folder."""
        if not str(py_func.__module__).startswith(_OURS) or place.numba_folder_is_given():
            return None
        return cls(py_func)


def _install() -> None:
    caching.CacheImpl._locator_classes.insert(0, KernelLocator)
    caching.Cache.load_overload = _tolerant(caching.Cache.load_overload)
    caching.Cache.save_overload = _tolerant(_in_turn(caching.Cache.save_overload))


def _is_ours(cache: Any) -> bool:
    return str(cache._py_func.__module__).startswith(_OURS)


def _tolerant(method: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that cannot be loaded is compiled, one that cannot be saved is used all the same."""

    @functools.wraps(method)
    def tolerant(self: Any, *arguments: Any) -> Any:
        if not _is_ours(self):
            return method(self, *arguments)
        try:
            return method(self, *arguments)
        except _BROKEN as error:
            place.complain(place.numba_folder(), error)
            return None

    return tolerant


def _in_turn(save: Callable[..., Any]) -> Callable[..., Any]:
    """One process at a time saves: two at once would give kernels of one function the same file name."""

    @functools.wraps(save)
    def in_turn(self: Any, *arguments: Any) -> Any:
        if not _is_ours(self):
            return save(self, *arguments)
        with _locked(Path(self.cache_path)):
            return save(self, *arguments)

    return in_turn


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


_install()
