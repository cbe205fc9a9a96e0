"""Groups: nodes that the same names reach. They come and go together, so a policy counts each group as one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from retrieval_attn.errors import StoreError
from retrieval_attn.store.names import NamedContext
from retrieval_attn.store.pages import resident_bytes
from retrieval_attn.store.store import ContextStore

__all__ = ["Group", "grouped"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """nodes: root first; the last one's digest is the group's. names: that reach them. parent: the group before it.

    files: in the order of their layers, the first ones of all nodes before the second ones. nbytes: of all of them.
    """

    nodes: tuple[str, ...]
    names: frozenset[str]
    parent: str | None
    files: tuple[Path, ...]
    nbytes: int

    @property
    def digest(self) -> str:
        return self.nodes[-1]

    def resident_bytes(self) -> int:
        """How many of the files' bytes are in memory, as far as the system tells."""
        found = 0
        for path in self.files:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found += resident_bytes(path) or 0
        return found


def grouped(
    store: ContextStore, contexts: Collection[NamedContext]
) -> tuple[dict[str, Group], dict[str, tuple[str, ...]]]:
    """All groups by digest, and the digests of each context's, root first. A context that lacks a node is left out."""
    reached: dict[str, set[str]] = {}
    for context in contexts:
        for node in context.chain:
            reached.setdefault(node, set()).add(context.name)
    groups: dict[str, Group] = {}
    of_name: dict[str, tuple[str, ...]] = {}
    for context in contexts:
        try:
            own = _groups_of(store, context, reached, groups)
        except (OSError, StoreError) as error:
            logger.warning("the context %r stays where it is, in RAM or on disk: %s", context.name, error)
            continue
        groups.update((group.digest, group) for group in own)
        of_name[context.name] = tuple(group.digest for group in own)
    return groups, of_name


def _groups_of(
    store: ContextStore, context: NamedContext, reached: dict[str, set[str]], known: dict[str, Group]
) -> list[Group]:
    """The groups of one chain. Whatever name reaches a node reaches those before it: equal sets stand together."""
    groups: list[Group] = []
    run: list[str] = []
    for node, following in zip(context.chain, [*context.chain[1:], None], strict=True):
        run.append(node)
        if following is not None and reached[following] == reached[node]:
            continue
        group = known.get(node)
        if group is None:
            files = sorted((path for one in run for path in store.files(one)), key=lambda path: path.name)
            nbytes = sum(path.stat().st_size for path in files)
            parent = groups[-1].digest if groups else None
            group = Group(tuple(run), frozenset(reached[node]), parent, tuple(files), nbytes)
        groups.append(group)
        run = []
    return groups
