"""Reading every byte of saved contexts to find damage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from retrieval_attn.errors import StoreError, UnknownContextError
from retrieval_attn.store.layout import StoreLayout
from retrieval_attn.store.names import read_name, stored_names
from retrieval_attn.store.node import DAMAGED, IDS, RECORD, SUFFIX, SavedNode, read_node


class Damage(NamedTuple):
    """What is wrong. names: the contexts that need it; node: its digest, or None for a name's file; what: the error."""

    names: tuple[str, ...]
    node: str | None
    file: Path
    what: str


def verify(
    layout: StoreLayout, names: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """Check every byte that these names need; None: all names. An empty list: nothing is wrong.

    progress: told, after each file, the bytes that are checked and those that there are. Raises UnknownContextError for
    a name that the store does not have, and StoreMismatchError for another version of the store.
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
    """What is wrong with one node. One file at a time is in memory where files are read, not mapped."""
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
            node.check(file)
        except StoreError as error:
            wrong.append(Damage(names, digest, folder / f"{file}{SUFFIX}", str(error)))
        node.release(file)
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
