"""A saved node: one immutable folder with what one save added, opened as maps of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ShapeError, StoreError, StoreMismatchError, UnknownContextError
from retrieval_attn.store.bundle import Bundle, BundleFile, Seal
from retrieval_attn.store.disk import damaged, guarded
from retrieval_attn.store.layout import StoreLayout, read_record
from retrieval_attn.store.mapped import Mapped
from retrieval_attn.store.record import Check, canonical, is_count, is_digest, is_fields, is_list_of, is_text

RECORD = "node.json"
DAMAGED = "DAMAGED"
"""An empty file in a node whose bytes were found to be wrong: the next save of the same tokens replaces the node."""
IDS = "ids"
SUFFIX = ".ra"
_FILE = re.compile(r"[\w.-]{1,100}", re.ASCII)


def is_file_name(value: Any) -> bool:
    """Whether a bundle can have this name."""
    return isinstance(value, str) and _FILE.fullmatch(value) is not None


def _is_seal(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_count, value, (1 << 62, 1 << 32, 1 << 32)))


_FIELDS: dict[str, Check] = {
    "digest": is_digest,
    "parent": lambda value: value is None or is_digest(value),
    "identity": is_text,
    "options": is_fields,
    "plain": is_fields,
    "files": lambda value: (
        is_fields(value) and all(map(is_file_name, value)) and is_list_of(_is_seal)([*value.values()])
    ),
    "nbytes": is_count,
}
logger = logging.getLogger(__name__)


def check_ids(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Token ids (tokens,) as int32. Raises ShapeError for others."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ShapeError(f"token ids must be whole numbers of shape (tokens,), got {array.dtype} of {array.shape}")
    if len(array) and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ShapeError(f"token ids must fit 32 bits, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int32)


def digest_of(identity: str, parent: str | None, options: dict[str, Any], ids: npt.NDArray[np.int32]) -> str:
    """A node's digest in hexadecimal digits. No text has a zero byte, so none of them run together."""
    texts = [identity, parent or "", canonical(options, "options"), ""]
    return hashlib.sha256("\0".join(texts).encode() + ids.astype("<i4").tobytes()).hexdigest()


def read_node(layout: StoreLayout, digest: str) -> dict[str, Any]:
    """A node's record. Raises UnknownContextError, StoreDamagedError, StoreMismatchError."""
    path = layout.node(digest) / RECORD
    try:
        record = read_record(layout.disk, path, _FIELDS)
    except FileNotFoundError:
        raise UnknownContextError(
            f"the store {layout.root} has no node {digest}; it was removed, or its folder was copied in part: "
            "read the text again and save it"
        ) from None
    if record["digest"] != digest:
        raise damaged(path, f"it is the record of {record['digest']}")
    return record


def chain_of(layout: StoreLayout, digest: str) -> list[dict[str, Any]]:
    """The records from the root to this node. Raises as `read_node`."""
    records = [read_node(layout, digest)]
    known = {digest}
    while (parent := records[-1]["parent"]) is not None:
        if parent in known:
            raise damaged(layout.node(records[-1]["digest"]) / RECORD, f"node {parent} is its own ancestor")
        known.add(parent)
        try:
            records.append(read_node(layout, parent))
        except UnknownContextError as error:
            raise UnknownContextError(f"node {digest} continues a node that is missing: {error}") from error
    return records[::-1]


def check_identity(layout: StoreLayout, record: dict[str, Any], identity: str) -> None:
    """Raise StoreMismatchError, naming what differs, unless the node was saved with this identity."""
    if record["identity"] == identity:
        return
    saved, wanted = _fields(record["identity"]), _fields(identity)
    differ = [name for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]
    lines = [f"{name}: saved {_short(saved.get(name))}, now {_short(wanted.get(name))}" for name in differ]
    raise StoreMismatchError(
        f"the context {record['digest'][:12]} in {layout.root} was saved with something else ({'; '.join(lines)}); "
        "load what it was saved with, or read the text again"
    )


def _fields(identity: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        fields = json.loads(identity)
        if isinstance(fields, dict):
            return fields
    return {"identity": identity}


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def mark_damaged(layout: StoreLayout, digest: str) -> None:
    """Remember that a node is damaged, where the disk lets us."""
    path = layout.node(digest) / DAMAGED
    try:
        layout.disk.close(layout.disk.create(path))
    except OSError as error:
        if not isinstance(error, FileExistsError):
            logger.warning("cannot mark %s as damaged: %s", path.parent, error)


class SavedNode:
    """One node. Its files are mapped when it is opened, so it can be used to the end whatever `gc` does meanwhile.

    (Where files are read instead of mapped, because other machines share the disk, each must be read before that.)
    identity, options, plain: as they were saved. nbytes: of its files. files: the names that `add` was given.
    """

    def __init__(self, layout: StoreLayout, digest: str, *, ids_only: bool = False) -> None:
        """ids_only: without its other files, which may be damaged or gone. Raises UnknownContextError,
        StoreDamagedError for a record or sizes that are wrong, StoreMismatchError.
        """
        self._layout, self._ids_only = layout, ids_only
        self.digest: str = digest
        record, self._files = self._opened()
        self.parent: str | None = record["parent"]
        self.identity: str = record["identity"]
        self.options: dict[str, Any] = record["options"]
        self.plain: dict[str, Any] = record["plain"]
        self.nbytes: int = record["nbytes"]
        self._ids: npt.NDArray[np.int32] | None = None
        if IDS not in self._files:
            raise damaged(layout.node(digest) / RECORD, "it lists no file of token ids")

    def _opened(self) -> tuple[dict[str, Any], dict[str, BundleFile]]:
        """The record and the files, all of one time: others may remove the node meanwhile, and save it again."""
        while True:
            record = read_node(self._layout, self.digest)
            folder = self._layout.node(self.digest)
            names = [IDS] if self._ids_only else record["files"]
            paths = {name: folder / f"{name}{SUFFIX}" for name in names if name in record["files"]}
            with guarded("read", folder):
                maps = {name: self._mapped(path) for name, path in paths.items()}
            found = {name: mapped for name, mapped in maps.items() if mapped is not None}
            if read_node(self._layout, self.digest) != record:
                continue
            for name in paths.keys() - found.keys():
                mark_damaged(self._layout, self.digest)
                raise damaged(paths[name], "it is not there")
            # not a method of this node: a circle would keep the maps until the garbage collector runs
            report = partial(mark_damaged, self._layout, self.digest)
            seals = {name: Seal(*seal) for name, seal in record["files"].items() if name in paths}
            return record, {name: BundleFile(paths[name], found[name], seals[name], report) for name in seals}

    def _mapped(self, path: Path) -> Mapped | None:
        try:
            return self._layout.disk.map(path)
        except FileNotFoundError:
            return None

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self._layout.node(self.digest)

    @property
    def files(self) -> list[str]:
        """Names of its bundles, sorted, but for the token ids'."""
        return sorted(name for name in self._files if name != IDS)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Token ids (tokens,), checked: they, identity, options and parent give the node's digest."""
        if self._ids is None:
            bundle = self.bundle(IDS, verify=True)
            ids = bundle.arrays[IDS].astype(np.int32, copy=False)
            if digest_of(self.identity, self.parent, self.options, ids) != self.digest:
                mark_damaged(self._layout, self.digest)
                raise damaged(self._files[IDS].path, "its token ids are not those of the node")
            self._ids = ids
        return self._ids

    def file(self, file: str) -> BundleFile:
        """Return the file of a bundle. Raises StoreError for an unknown name."""
        if file not in self._files:
            raise StoreError(f"node {self.digest[:12]} has no file {file!r}; it has {', '.join(self.files)}")
        return self._files[file]

    def bundle(self, file: str, *, verify: bool | tuple[str, ...]) -> Bundle:
        """A bundle; its arrays are private maps. verify: True checks every byte now, False only values and the table.

        With suffixes, all arrays are checked whose name ends with none of them. Raises StoreDamagedError, StoreError.
        """
        return self.file(file).bundle(verify)
