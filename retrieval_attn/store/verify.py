"""Reading every byte of saved contexts to find damage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from retrieval_attn.errors import StoreError, UnknownContextError
from retrieval_attn.store.layout import Layout
from retrieval_attn.store.names import read_name, stored_names
from retrieval_attn.store.node import DAMAGED, IDS, RECORD, SavedNode


class Damage(NamedTuple):
    """What is wrong. names: the contexts that need it; node: its digest, or None for a name's file; what: the error."""

    names: tuple[str, ...]
    node: str | None
    file: Path
    what: str


def verify(
    layout: Layout, names: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """Check every byte that these names need; None: all names. An empty list: nothing is wrong.

    progress: told, after each file, the bytes that are checked and those that there are. Raises UnknownContextError for
    a name that the store does not have, and StoreMismatchError for another version of the store.
    """
    layout.exists()
    found: list[Damage] = []
    needed: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
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
        sizes[name] = named.nbytes
    nodes: dict[str, SavedNode] = {}
    for digest, users in needed.items():
        try:
            nodes[digest] = SavedNode(layout, digest)
        except StoreError as error:
            if _still_needs(layout, users, digest):
                found.append(Damage(tuple(users), digest, layout.node(digest) / RECORD, str(error)))
    total, done = sum(node.nbytes for node in nodes.values()), 0
    for digest, node in nodes.items():
        wrong = _check(layout, node, tuple(needed[digest]))
        found += wrong
        if not wrong:
            with contextlib.suppress(OSError):
                layout.disk.unlink(layout.node(digest) / DAMAGED)
        done += node.nbytes
        if progress is not None:
            progress(done, total)
    return found


def _check(layout: Layout, node: SavedNode, names: tuple[str, ...]) -> list[Damage]:
    wrong = []
    for file in [IDS, *node.files]:
        try:
            node.check(file)
            if file == IDS:
                node.ids  # noqa: B018  # the property checks that they give the digest
        except StoreError as error:
            wrong.append(Damage(names, node.digest, layout.node(node.digest) / f"{file}.ra", str(error)))
    return wrong


def _still_needs(layout: Layout, names: Sequence[str], digest: str) -> bool:
    """Whether one of the names still reaches a node that could not be opened."""
    for name in names:
        with contextlib.suppress(StoreError):
            if digest in read_name(layout, name).chain:
                return True
    return False
