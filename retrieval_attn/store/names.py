"""Names of contexts: small files that are replaced as a whole, and say which chain of nodes a context is."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrieval_attn.errors import StoreDamagedError, StoreError, UnknownContextError
from retrieval_attn.store.disk import damaged, guarded
from retrieval_attn.store.layout import FORMAT, StoreLayout, read_record, write_file
from retrieval_attn.store.record import Check, encode, is_count, is_digest, is_fields, is_list_of, is_text

AUTOMATIC = "automatic"
"""Field of `NamedContext.plain` of contexts that a prefix cache saved."""
GENERATED = "generated"
"""Field of those with generated answers, whose KV was computed with retrieval."""

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_SECONDS = 1 << 37
"""Since 1970, of a date that Python can print: in the year 6325."""
_DESCRIBED: dict[str, Check] = {
    "template": is_text,
    "tokens": is_count,
    "read_seconds": lambda value: type(value) in (int, float) and 0 <= value < _MAX_SECONDS,
    "model": is_text,
    "owner": is_text,
    AUTOMATIC: lambda value: type(value) is bool,
    GENERATED: lambda value: type(value) is bool,
}
"""What lists of contexts show, where it was saved."""
_FIELDS: dict[str, Check] = {
    "name": is_text,
    "digest": is_digest,
    "chain": lambda value: bool(value) and is_list_of(is_digest)(value),
    "plain": lambda value: (
        is_fields(value) and all(_DESCRIBED[name](value[name]) for name in _DESCRIBED if name in value)
    ),
    "saved_at": lambda value: type(value) in (int, float) and 0 <= value < _MAX_SECONDS,
    "nbytes": is_count,
}
logger = logging.getLogger(__name__)


class NamedContext(NamedTuple):
    """A name in the store. digest: its last node's; chain: all of its nodes', root first; plain: what `name` was given.

    saved_at: seconds since 1970. nbytes: of all its nodes, those that it shares with others too.
    """

    name: str
    digest: str
    chain: tuple[str, ...]
    plain: dict[str, Any]
    saved_at: float
    nbytes: int

    @property
    def is_automatic(self) -> bool:
        """Whether a prefix cache saved it: no request names it, and it is removed if the disk has no room."""
        return self.plain.get(AUTOMATIC) is True


def check_name(name: str) -> str:
    """`name`, if it may be one. Raises StoreError with the reason "name"."""
    if isinstance(name, str) and _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    path = isinstance(name, str) and ("/" in name or "\\" in name)
    raise StoreError(
        f"a context's name has 1 to 64 of the letters A-Z and a-z, digits and _ . -, got {name!r:.80}"
        + ("; it is not a path: the folder is the store's (--store, RETRIEVAL_ATTN_STORE)" if path else ""),
        reason="name",
    )


def _file(layout: StoreLayout, name: str) -> Path:
    return layout.contexts / f"{check_name(name)}.json"


def write_name(layout: StoreLayout, name: str, chain: Sequence[str], nbytes: int, plain: dict[str, Any]) -> None:
    """Let `name` mean this chain from now on; under the store's lock. Raises StoreError, ConfigError."""
    path, new = _file(layout, name), layout.fresh(".name")
    record = {"format": FORMAT, "name": name, "digest": chain[-1], "chain": list(chain), "plain": plain}
    data = encode({**record, "saved_at": time.time(), "nbytes": nbytes})
    with guarded("write", path):
        write_file(layout.disk, new, data)
        layout.disk.replace(new, path)
        layout.disk.fsync_folder(layout.contexts)


def read_name(layout: StoreLayout, name: str) -> NamedContext:
    """Read the context of a name. Raises UnknownContextError, StoreDamagedError, StoreMismatchError."""
    path = _file(layout, name)
    try:
        record = read_record(layout.disk, path, _FIELDS)
    except FileNotFoundError:
        raise _unknown(layout, name) from None
    if record["name"] != name:
        raise StoreDamagedError(f"{path} is damaged: it was saved as {record['name']!r}; move it back")
    if record["chain"][-1] != record["digest"]:
        raise damaged(path, f"the last node of its chain is {record['chain'][-1]}, not {record['digest']}")
    fields = {field: record[field] for field in NamedContext._fields}
    return NamedContext(**{**fields, "chain": tuple(record["chain"])})


def _unknown(layout: StoreLayout, name: str) -> UnknownContextError:
    names = stored_names(layout)
    near = difflib.get_close_matches(name, names, n=3)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    count = f"its {len(names)} contexts" if len(names) > 1 else "its only context"
    listed = f"`retrieval-attn contexts ls` lists {count}" if names else "it is empty"
    return UnknownContextError(f"no context {name!r} in the store {layout.root}; {advice}{listed}", context=name)


def stored_names(layout: StoreLayout) -> list[str]:
    """All names, sorted."""
    return [name.removesuffix(".json") for name in layout.listed(layout.contexts) if name.endswith(".json")]


class KnownName(NamedTuple):
    """A name that was read. stamp: inode, time in ns and size of its file, which is replaced as a whole."""

    stamp: tuple[int, int, int]
    context: NamedContext


def readable_names(layout: StoreLayout, known: dict[str, KnownName]) -> list[NamedContext]:
    """All names that can be read; a damaged one is logged, and `verify` names it.

    known: names that were read before, and are not read again; updated.
    """
    found: dict[str, KnownName] = {}
    for name in stored_names(layout):
        try:
            stamp = _stamp(layout, name)
            before = known.get(name)
            is_same = before is not None and before.stamp == stamp
            found[name] = before if is_same and before is not None else KnownName(stamp, read_name(layout, name))
        except UnknownContextError:  # removed meanwhile
            continue
        except StoreError as error:
            logger.warning("skipping a context that cannot be read: %s", error)
    known.clear()
    known.update(found)
    return [one.context for one in found.values()]


@contextlib.contextmanager
def _present(layout: StoreLayout, name: str, verb: str) -> Iterator[Path]:
    """Yield the path of a name's file. verb: of errors. Raises UnknownContextError for a file that is gone."""
    path = _file(layout, name)
    with guarded(verb, path):
        try:
            yield path
        except FileNotFoundError:
            raise _unknown(layout, name) from None


def _stamp(layout: StoreLayout, name: str) -> tuple[int, int, int]:
    with _present(layout, name, "read") as path:
        status = layout.disk.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def last_use(layout: StoreLayout, name: str) -> float:
    """Return the time of the last use of a name in seconds since 1970; 0 if it was removed. Raises StoreError."""
    with contextlib.suppress(UnknownContextError), _present(layout, name, "read") as path:
        return layout.disk.stat(path).st_mtime
    return 0.0


def note_use(layout: StoreLayout, name: str) -> None:
    """Set the time of the last use of a name to now. Raises UnknownContextError, StoreError."""
    with _present(layout, name, "write") as path:
        layout.disk.touch(path)


def remove_name(layout: StoreLayout, name: str) -> None:
    """Forget a name; under the store's lock. Raises UnknownContextError."""
    with _present(layout, name, "remove") as path:
        layout.disk.unlink(path)
        layout.disk.fsync_folder(layout.contexts)
