"""Contexts on disk: immutable, content-addressed nodes of plain arrays, and names for them. Imports no torch."""

from __future__ import annotations

from retrieval_attn.store.bundle import Bundle
from retrieval_attn.store.disk import OS_DISK, Disk
from retrieval_attn.store.maintenance import Damage, Freed
from retrieval_attn.store.names import NamedContext, check_name
from retrieval_attn.store.node import SavedNode
from retrieval_attn.store.shelf import Shelf
from retrieval_attn.store.store import ContextStore
from retrieval_attn.store.writer import NodeWriter

__all__ = [
    "OS_DISK",
    "Bundle",
    "ContextStore",
    "Damage",
    "Disk",
    "Freed",
    "NamedContext",
    "NodeWriter",
    "SavedNode",
    "Shelf",
    "check_name",
]
