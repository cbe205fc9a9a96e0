"""Files of a store that no program wrote: pipes, devices, links to them, and values with right checksums."""

from __future__ import annotations

import copy
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError, StoreDamagedError, StoreError
from retrieval_attn.store import ContextStore, record
from retrieval_attn.store.bundle import _PREFIX, _SEALED
from retrieval_attn.store.record import crc32c, decode, encode
from tests.store.cases import IDS, save


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def folder_of(store: ContextStore, digest: str) -> Path:
    return store.folder / "nodes" / digest[:2] / digest


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "socket": make_socket,
    "folder": Path.mkdir,
    "large": make_large,
    "zero": link_to("/dev/zero"),
    "null": link_to("/dev/null"),
    "memory": link_to("/proc/self/mem"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes that have a path")
@pytest.mark.parametrize("file", ["VERSION", "contexts/book.json", "node.json", "ids.ra", "layer-000.ra"])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_damage(store: ContextStore, file: str, kind: str) -> None:
    """Nothing is read from it, and no reader waits for it."""
    digest = save(store, "book")
    save(store, "fine", ids=IDS[:9])
    path = (store.folder if file.partition("/")[2] or file == "VERSION" else folder_of(store, digest)) / file
    path.unlink()
    ODD[kind](path)

    def read() -> None:
        node = store.get(store.resolve("book").digest)
        node.bundle("layer-000", verify=True)
        assert len(node.ids)

    with pytest.raises(StoreDamagedError, match="VERSION|book.json|node.json|ids.ra|layer-000.ra"):
        read()
    if file == "VERSION":
        return
    listed = [one.name for one in store.list()]
    assert listed == (["fine"] if file == "contexts/book.json" else ["book", "fine"])
    assert [damage.names for damage in store.verify()] == [("book",)]
    if file.endswith(".ra"):
        paths = [one for one in store.files(digest) if one.name == path.name]
        assert paths == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes that have a path")
@pytest.mark.timeout(20)
def test_a_lock_that_is_no_regular_file(store: ContextStore, tmp_path: Path) -> None:
    save(store, "book")
    (store.folder / "LOCK").unlink()
    make_pipe(store.folder / "LOCK")
    with pytest.raises(StoreDamagedError, match="LOCK is damaged: it is not a regular file"):
        store.gc()
    (store.folder / "LOCK").unlink()
    (store.folder / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="LOCK"):
        store.gc()
    assert not (tmp_path / "elsewhere").exists()


def test_gc_removes_nothing_behind_a_link(store: ContextStore, tmp_path: Path) -> None:
    """A link in `tmp` or `nodes` to somebody's folder: the link goes, if anything."""
    save(store, "book")
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("dear")
    (store.folder / "tmp" / "planted").symlink_to(home)
    (store.folder / "nodes" / "zz").symlink_to(home)
    store.gc()
    assert (home / "letter").read_text() == "dear" and store.verify() == []
    assert not (store.folder / "tmp" / "planted").is_symlink()


def test_a_folder_of_nodes_on_another_disk_is_counted(store: ContextStore, tmp_path: Path) -> None:
    save(store, "book")
    before = store.nbytes()
    (store.folder / "nodes").rename(tmp_path / "disk")
    (store.folder / "nodes").symlink_to(tmp_path / "disk")
    assert store.nbytes() == before > 10_000 and store.verify() == []


def test_a_record_that_is_too_long_is_not_written(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = save(store, "book")
    monkeypatch.setattr(record, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"a record of \d+ bytes cannot be saved, at most 936 are"):
        store.name("long", digest, {"text": "a" * 1000})
    assert [one.name for one in store.list()] == ["book"]


WRONG: list[Any] = [
    None, True, -1, 1.5, 2**63, 10**30, "", "x", "../../../etc", "\0", [], [[]], [1], ["x"], {}, {"x": 1},
]  # fmt: skip
"""Instead of what a program writes."""


def forged(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields with each value replaced by each wrong one that its field never has, and without it."""
    found = []
    for name, value in fields.items():
        found.append({other: one for other, one in fields.items() if other != name})
        found += [{**fields, name: wrong} for wrong in WRONG if wrong != value]
    return found


def test_forged_names(store: ContextStore) -> None:
    save(store, "book")
    path = store.folder / "contexts" / "book.json"
    tried = 0
    for fields in forged(decode(path.read_bytes())):
        path.write_bytes(encode(fields))
        try:
            found = store.resolve("book")
        except StoreError:
            tried += 1
            continue
        assert isinstance(found.plain, dict) and found.saved_at >= 0, fields
    assert tried > 80


@pytest.mark.parametrize("name", ["template", "tokens", "read_seconds", "model"])
def test_forged_descriptions(store: ContextStore, name: str) -> None:
    """What lists of contexts show."""
    digest = save(store, "book")
    store.name("book", digest, {"template": "x", "tokens": 3, "read_seconds": 0.5, "model": "m"})
    path = store.folder / "contexts" / "book.json"
    fields = decode(path.read_bytes())
    assert store.resolve("book").plain[name] is not None
    odd: tuple[object, ...] = (None, -1, [], {}, 2**70)
    for wrong in odd:
        path.write_bytes(encode({**fields, "plain": {**fields["plain"], name: wrong}}))
        with pytest.raises(StoreDamagedError, match="these fields are missing or malformed: plain"):
            store.resolve("book")


def test_forged_nodes(store: ContextStore) -> None:
    root = save(store, None)
    digest = save(store, "book", parent=root, ids=IDS[:9])
    path = folder_of(store, digest) / "node.json"
    whole = path.read_bytes()
    tried = 0
    files = decode(whole)["files"]
    records = forged(decode(whole))
    for wrong in [*WRONG, [1, 2], [1, 2, 3, 4], [-1, 0, 0], [1, 2**32, 0], [1, 0, None]]:
        records.append({**decode(whole), "files": {**files, "layer-000": wrong}})
    for name in ("../../x", "", "a" * 200, "a\0"):
        records.append({**decode(whole), "files": {**files, name: files["layer-000"]}})
    for fields in records:
        path.write_bytes(encode(fields))
        try:
            nodes = store.chain(digest)
            assert all(len(node.ids) for node in nodes)
        except StoreError:
            tried += 1
            continue
        names = [name for name in fields if fields[name] != decode(whole).get(name)] or [*decode(whole).keys() - fields]
        assert set(names) <= {"plain", "tokens", "nbytes"}, names
    assert tried > 100


@pytest.mark.timeout(20)
def test_a_chain_that_is_a_circle(store: ContextStore) -> None:
    root = save(store, None)
    digest = save(store, "book", parent=root, ids=IDS[:9])
    path = folder_of(store, root) / "node.json"
    path.write_bytes(encode({**decode(path.read_bytes()), "parent": digest}))
    with pytest.raises(StoreDamagedError, match="is its own ancestor"):
        store.chain(digest)
    assert not store.continues(digest)


def reseal(node: Path, file: str, header: bytes) -> None:
    """Give a bundle another header, with all its checksums, and those that its node remembers."""
    path = node / f"{file}.ra"
    old = path.read_bytes()
    magic, version, header_bytes, data_bytes, _, _ = _PREFIX.unpack(old[: _PREFIX.size])
    rest = old[_PREFIX.size + header_bytes :]
    header = header.ljust(-(-(_PREFIX.size + len(header)) // 4096) * 4096 - _PREFIX.size)
    sealed = _SEALED.pack(magic, version, len(header), data_bytes, crc32c(header))
    path.write_bytes(sealed + struct.pack("<I", crc32c(sealed)) + header + rest)
    fields = decode((node / "node.json").read_bytes())
    table_crc = fields["files"][file][2]
    fields["files"][file] = [path.stat().st_size, crc32c(header), table_crc]
    (node / "node.json").write_bytes(encode(fields))


def header_of(path: Path) -> dict[str, Any]:
    old = path.read_bytes()
    found: dict[str, Any] = json.loads(old[_PREFIX.size : _PREFIX.size + _PREFIX.unpack(old[: _PREFIX.size])[2]])
    return found


def test_forged_headers(store: ContextStore) -> None:
    digest = save(store, "book")
    node = folder_of(store, digest)
    fields = header_of(node / "layer-000.ra")
    headers: list[Any] = [one for one in forged(fields) if one.get("plain") != {} and one.get("plain") != {"x": 1}]
    for place in range(4):
        for wrong in [*WRONG, "|O", "<U4", "i4,i4", "<c16", "M8[s]", "O", [2**62, 4], [0, 2**62, 4], [-1, 4], [1] * 70]:
            changed = copy.deepcopy(fields)
            if changed["arrays"][0][place] != wrong:
                changed["arrays"][0][place] = wrong
                headers.append(changed)
    headers += [{**fields, "arrays": [*fields["arrays"], fields["arrays"][0]]}, [], 1, "x", None]
    texts = [json.dumps(one).encode() for one in headers]
    texts += [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"plain":{"a":NaN},"arrays":[]}',
        b'{"plain":{"a":1e999},"arrays":[]}',
    ]
    harmless = 0
    for text in texts:
        reseal(node, "layer-000", text)
        try:
            found = store.get(digest).bundle("layer-000", verify=True)
        except StoreDamagedError:
            continue
        harmless += 1  # another name, shape or offset within the data
        assert all(array.dtype.kind in "buif" for array in found.arrays.values()), text
        assert all(
            np.asarray(array).nbytes <= (node / "layer-000.ra").stat().st_size for array in found.arrays.values()
        )
    assert harmless < 12 < 60 < len(texts)
