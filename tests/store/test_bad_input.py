"""Names, values, folders and files that are not as they should be: each has its own error, and nothing is harmed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_attn.errors import (
    ConfigError,
    ShapeError,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
    UnknownContextError,
)
from retrieval_attn.store import Bundle, ContextStore, layout
from retrieval_attn.store.record import decode, encode
from tests.store.cases import IDENTITY, IDS, OPTIONS, bundle, save


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def folder_of(store: ContextStore, digest: str) -> Path:
    return store.folder / "nodes" / digest[:2] / digest


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 65, "a b", "é", "a\n", "a\0", "/etc/x", "../x", "a/b", "a\\b"])
def test_names(store: ContextStore, name: str) -> None:
    digest = save(store, "book")
    for use in (store.resolve, store.remove, lambda name: store.name(name, digest, {})):
        with pytest.raises(StoreError, match="a context's name has 1 to 64 of") as caught:
            use(name)
        assert ("it is not a path" in str(caught.value)) == ("/" in name or "\\" in name)
    assert [one.name for one in store.list()] == ["book"]


@pytest.mark.parametrize("name", ["a" * 64, "-", "War.and-Peace_2", "...", "con.json"])
def test_unusual_names_that_are_fine(store: ContextStore, name: str) -> None:
    digest = save(store, name)
    assert store.resolve(name).digest == digest and [one.name for one in store.list()] == [name]


def test_an_unknown_name_lists_near_ones(store: ContextStore) -> None:
    for name in ("war-and-peace", "anna", "emma"):
        save(store, name)
    with pytest.raises(UnknownContextError, match=r"no context 'war-and-piece' .*did you mean war-and-peace\?"):
        store.resolve("war-and-piece")
    with pytest.raises(UnknownContextError, match="contexts ls` lists its 3 contexts") as refused:
        store.remove("nothing")
    assert "did you mean" not in str(refused.value), "no name is near"


def test_another_model_is_refused_by_the_fields_that_differ(store: ContextStore) -> None:
    digest = save(store, "book")
    with pytest.raises(StoreMismatchError) as caught:
        store.get(digest, '{"layout":1,"model":"b","rope":"yarn"}')
    assert "model: saved a, now b; rope: saved nothing, now yarn" in str(caught.value)
    assert "layout" not in str(caught.value).partition("(")[2].partition(")")[0]
    with pytest.raises(StoreMismatchError, match="saved with something else"):
        store.writer("other", digest, IDS, OPTIONS)
    assert store.gc() == (0, 0, 0)


def test_a_parent_that_is_gone(store: ContextStore) -> None:
    root = save(store, "root")
    turn = save(store, "turn", parent=root, seed=3)
    shutil.rmtree(folder_of(store, root))
    for use in (
        store.chain,
        lambda digest: store.name("x", digest, {}),
        lambda digest: save(store, "y", parent=digest),
    ):
        with pytest.raises(UnknownContextError, match=f"node {turn} continues a node that is missing: .* {root}"):
            use(turn)
    [damage] = [one for one in store.verify(["turn"])]
    assert damage.node == root and damage.names == ("turn",)
    with pytest.raises(UnknownContextError, match="no node"):
        store.get("0" * 64)
    for digest in ("", "..", root[:63], root.upper() + "x"):
        with pytest.raises(StoreError, match="64 hexadecimal digits"):
            store.get(digest)


VALUES = [
    {"a": float("nan")},
    {"a": float("inf")},
    {1: 2},
    {"a": {1: 2}},
    {"a": b""},
    {"a": np.zeros(3)},
    {"a": {1, 2}},
]


@pytest.mark.parametrize("plain", VALUES, ids=str)
def test_values_that_json_would_change(store: ContextStore, plain: dict[str, Any]) -> None:
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        with pytest.raises(ConfigError, match="must be plain values"):
            writer.add("layer-000", Bundle(plain, {}))
        with pytest.raises(ConfigError, match="must be plain values"):
            writer.publish(plain)
    digest = save(store, "book")
    with pytest.raises(ConfigError, match="must be plain values"):
        store.name("other", digest, plain)
    with pytest.raises(ConfigError, match="options"):
        store.writer(IDENTITY, None, IDS, plain)
    assert store.gc().leftovers == 0 and [one.name for one in store.list()] == ["book"]


ARRAYS = [
    np.zeros(2, complex),
    np.array([b"text"]),
    np.array([object()]),
    np.zeros(2, np.longdouble),
    np.zeros(1, "M8[s]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_of_other_things_than_numbers(store: ContextStore, array: np.ndarray) -> None:
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        with pytest.raises(ConfigError, match=r"array 0/keys of dtype .* cannot be saved"):
            writer.add("layer-000", Bundle({}, {"0/keys": array}))
        with pytest.raises(ConfigError, match="array's name"):
            writer.add("layer-000", Bundle({}, {"a b": np.zeros(1)}))


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int32), np.zeros(3), np.array([2**31]), np.array([True])])
def test_token_ids(store: ContextStore, ids: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="token ids must"):
        store.writer(IDENTITY, None, ids, OPTIONS)


@pytest.mark.parametrize("file", ["", "a/b", "ids", "a" * 101, "é"])
def test_names_of_bundles(store: ContextStore, file: str) -> None:
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer, pytest.raises(StoreError, match="a bundle's name"):
        writer.add(file, bundle(0))
    node = store.get(save(store, "book"))
    for use in (node.file, lambda file: node.bundle(file, verify=True)):
        with pytest.raises(StoreError, match="no file 'layer-009'; it has layer-000, layer-001"):
            use("layer-009")


def test_a_bundle_is_added_once(store: ContextStore) -> None:
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        writer.add("layer-000", bundle(0))
        with pytest.raises(StoreError, match="already; add each once"):
            writer.add("layer-000", bundle(0))


def test_a_lock_that_is_held(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BUSY_SECONDS", 0.05)
    digest = save(store, "book")
    with store._layout.locked():
        for use in (
            store.gc,
            lambda: store.name("x", digest, {}),
            lambda: save(store, "y"),
            lambda: store.remove("book"),
        ):
            with pytest.raises(StoreError, match=r"another process has held .*LOCK") as caught:
                use()
            assert caught.value.reason == "busy"
        assert store.resolve("book").digest == digest and store.verify() == []
    store.gc()


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    """The folders `tmp` and `nodes` of somebody else must not be emptied by gc."""
    home = tmp_path / "home"
    (home / "tmp").mkdir(parents=True)
    (home / "tmp" / "letter").write_text("dear")
    store = ContextStore(home)
    assert store.gc() == (0, 0, 0)
    with pytest.raises(StoreError, match="is no store of contexts: it has no VERSION but tmp/letter"):
        save(store, "book")
    assert (home / "tmp" / "letter").read_text() == "dear"
    (home / "notes").write_text("")
    with pytest.raises(StoreError, match="notes"):
        save(store, "book")
    with pytest.raises(StoreError, match="cannot read"):
        save(ContextStore(home / "notes"), "book")


def test_a_store_of_another_version(store: ContextStore) -> None:
    save(store, "book")
    version = store.folder / "VERSION"
    version.write_text(version.read_text().replace("1", "2"))
    uses: list[Callable[[], object]] = [store.list, store.gc, store.verify, lambda: store.resolve("book")]
    for use in [*uses, lambda: save(store, "x"), lambda: store.get("0" * 64)]:
        with pytest.raises(StoreMismatchError, match="has version 2, this program knows version 1"):
            use()
    version.write_text("")
    with pytest.raises(StoreDamagedError, match="VERSION is damaged"):
        store.list()


def change_record(path: Path, **fields: Any) -> None:
    path.write_bytes(encode({**decode(path.read_bytes()), **fields}))


def test_records_of_a_newer_program(store: ContextStore) -> None:
    digest = save(store, "book")
    change_record(folder_of(store, digest) / "node.json", format=3)
    for use in (store.get, store.chain):
        with pytest.raises(StoreMismatchError, match="has format 3, this release reads format 2"):
            use(digest)
    change_record(store.folder / "contexts" / "book.json", format=3)
    with pytest.raises(StoreMismatchError, match="has format 3"):
        store.resolve("book")
    with pytest.raises(StoreMismatchError, match="has format 3"):
        store.gc()


def test_files_that_were_exchanged(store: ContextStore) -> None:
    """Whole files at the wrong place are as wrong as changed ones."""
    one, other = save(store, "one"), save(store, "other", ids=IDS[:9], seed=1)
    first, second = folder_of(store, one), folder_of(store, other)
    layers = [first / "layer-000.ra", first / "layer-001.ra"]
    assert layers[0].stat().st_size == layers[1].stat().st_size
    layers[0].write_bytes(layers[1].read_bytes())
    with pytest.raises(StoreDamagedError, match="another file than the one that was saved"):
        store.get(one).bundle("layer-000", verify=False)
    (first / "node.json").write_bytes((second / "node.json").read_bytes())
    with pytest.raises(StoreDamagedError, match=f"it is the record of {other}"):
        store.get(one)
    shutil.copy(store.folder / "contexts" / "other.json", store.folder / "contexts" / "copy.json")
    with pytest.raises(StoreDamagedError, match="saved as 'other'"):
        store.resolve("copy")
    assert {damage.names for damage in store.verify()} == {("one",), ("copy",)}


def test_token_ids_of_another_text(store: ContextStore) -> None:
    one, other = save(store, "one", layers=0), save(store, "other", ids=IDS[::-1].copy(), layers=0)
    first, second = folder_of(store, one), folder_of(store, other)
    shutil.copy(second / "ids.ra", first / "ids.ra")
    change_record(first / "node.json", files=decode((second / "node.json").read_bytes())["files"])
    with pytest.raises(StoreDamagedError, match="its token ids are not those of the node"):
        _ = store.get(one).ids
    assert [damage.names for damage in store.verify()] == [("one",)]


@pytest.mark.parametrize("file", ["layer-000.ra", "ids.ra", "node.json"])
@pytest.mark.parametrize("size", [0, 5, 100, -1, None])
def test_files_that_are_cut_or_gone(store: ContextStore, file: str, size: int | None) -> None:
    digest = save(store, "book")
    save(store, "fine", ids=IDS[:9])
    path = folder_of(store, digest) / file
    whole = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(whole[:size])
    gone = UnknownContextError if file == "node.json" and size is None else StoreDamagedError
    with pytest.raises(gone):
        _ = store.get(digest).ids
    [damage] = store.verify()
    assert damage.names == ("book",) and damage.node == digest
    assert store.gc().nodes == 0
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    assert store.verify() == []


def test_gc_removes_nothing_while_a_name_is_unreadable(store: ContextStore, caplog: pytest.LogCaptureFixture) -> None:
    save(store, "book")
    save(store, "gone", ids=IDS[:9])
    store.remove("gone")
    path = store.folder / "contexts" / "book.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreDamagedError, match=r"nothing was removed.*contexts rm book"):
        store.gc()
    assert len(list(store.folder.glob("nodes/*/*"))) == 2
    assert store.list() == [] and "book.json is damaged" in caplog.text
    assert [damage.names for damage in store.verify()] == [("book",)]
    store.remove("book")
    assert store.gc().nodes == 2
