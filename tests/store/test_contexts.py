"""Saving, naming, loading, removing: what a store promises when nothing goes wrong."""

from __future__ import annotations

import os
import stat
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from retrieval_attn.errors import StoreDamagedError, StoreError, UnknownContextError
from retrieval_attn.store import Bundle, ContextStore, NamedContext, names
from retrieval_attn.store import bundle as bundles
from retrieval_attn.store.disk import Disk, file_system
from retrieval_attn.store.layout import StoreLayout
from retrieval_attn.store.mapped import Mapped, read_file
from tests.store.cases import IDENTITY, IDS, OPTIONS, bundle, check_equal, save


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def nodes_of(store: ContextStore) -> set[str]:
    return {path.name for path in store.folder.glob("nodes/*/*")}


def left_in_tmp(store: ContextStore) -> list[str]:
    return os.listdir(store.folder / "tmp")


def test_what_was_saved_is_loaded(store: ContextStore) -> None:
    digest = save(store, "book")
    again = ContextStore(store.folder)
    named = again.resolve("book")
    assert (named.name, named.digest, named.plain) == ("book", digest, {"template": "x"})
    node = again.get(digest, IDENTITY)
    assert node.files == ["layer-000", "layer-001"] and node.parent is None and node.digest == digest
    assert node.options == OPTIONS and node.plain == {"seed": 0} and node.identity == IDENTITY
    np.testing.assert_array_equal(node.ids, IDS)
    check_equal(node.bundle("layer-000", verify=True), bundle(0))
    check_equal(node.bundle("layer-001", verify=("keys", "values")), bundle(1))
    assert named.nbytes == node.nbytes == sum(path.stat().st_size for path in store.folder.glob("nodes/*/*/*.ra"))
    assert again.verify() == [] and left_in_tmp(store) == []


def test_the_digest_tells_identity_parent_options_and_tokens_apart(store: ContextStore) -> None:
    def digest(identity: str, parent: str | None, ids: list[int], options: dict[str, int]) -> str:
        with store.writer(identity, parent, np.array(ids, np.int32), options) as writer:
            return writer.digest

    with store.writer("i", None, np.array([1], np.int32), {}) as writer:
        root = writer.publish({})
    cases: list[tuple[str, str | None, list[int], dict[str, int]]]
    cases = [("i", None, [1], {}), ("i", None, [1, 2], {}), ("i", None, [2], {}), ("j", None, [1], {})]
    cases += [("i", None, [1], {"a": 1}), ("i", root, [1], {}), ("i", None, [], {})]
    found = [digest(*case) for case in cases]
    assert len(set(found)) == len(cases) and found[0] == root
    assert digest("i", None, [1], {}) == root


def test_a_chain_shares_what_came_before(store: ContextStore) -> None:
    root = save(store, "a")
    first = save(store, "a", parent=root, seed=10)
    second = save(store, "b", parent=root, ids=IDS[:5], seed=20)
    last = save(store, "a", parent=first, ids=IDS[:0], seed=30, layers=0)
    assert [node.digest for node in store.chain(last)] == [root, first, last]
    assert store.resolve("a").chain == (root, first, last) and store.resolve("b").chain == (root, second)
    assert [one.name for one in store.list()] == ["a", "b"]
    assert nodes_of(store) == {root, first, second, last}
    assert store.nbytes() >= sum(store.get(one).nbytes for one in (root, first, second, last))
    assert store.gc().nodes == 0
    store.remove("a")
    assert store.gc().nodes == 2 and nodes_of(store) == {root, second}
    assert store.verify() == []


def test_maps_stay_valid_after_the_node_is_gone(store: ContextStore) -> None:
    """A load that is under way ends well, too: files are mapped when the node is opened."""
    node = store.get(save(store, "book"))
    loaded = node.bundle("layer-000", verify=False)
    store.remove("book")
    freed = store.gc()
    assert freed.nodes == 1 and freed.nbytes >= node.nbytes and nodes_of(store) == set()
    node.file("layer-000").check()
    check_equal(loaded, bundle(0))
    check_equal(node.bundle("layer-001", verify=True), bundle(1))


def test_open_nodes_keep_no_file_open(store: ContextStore) -> None:
    """A chain of a hundred turns of 32 layers has more files than a process may have open."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not list open files")
    digest = save(store, "book", layers=3)
    before = len(os.listdir("/proc/self/fd"))
    node = store.get(digest)
    arrays = [node.bundle(file, verify=True).arrays for file in node.files]
    assert len(os.listdir("/proc/self/fd")) == before and len(arrays) == 3


def test_writing_to_a_loaded_array_changes_no_file(store: ContextStore) -> None:
    node = store.get(save(store, "book"))
    node.bundle("layer-000", verify=True).arrays["0/keys"][:] = 7
    assert store.verify() == []
    check_equal(ContextStore(store.folder).get(node.digest).bundle("layer-000", verify=True), bundle(0))


def test_what_is_published_stays_until_it_is_named_or_let_go(store: ContextStore) -> None:
    other = ContextStore(store.folder)
    digest = save(store, None)
    assert other.gc().nodes == 0 and nodes_of(store) == {digest}
    store.name("book", digest, {})
    assert left_in_tmp(store) == []
    unnamed = save(store, None, ids=IDS[:7])
    store.close()
    assert other.gc().nodes == 1 and nodes_of(store) == {digest} and unnamed != digest


def test_gc_leaves_a_save_alone_and_what_it_continues(store: ContextStore) -> None:
    root = save(store, "book")
    with store.writer(IDENTITY, root, IDS, OPTIONS) as writer:
        writer.add("layer-000", bundle(5))
        store.remove("book")
        assert store.gc() == (0, 0, 0)
        digest = writer.publish({})
        assert ContextStore(store.folder).gc().nodes == 0
    store.name("book", digest, {})
    assert store.verify() == [] and store.resolve("book").chain == (root, digest)


def test_automatic_contexts_make_room(store: ContextStore) -> None:
    """The least recently used go first; nodes that a name still reaches stay, and so do contexts of users."""
    for number, name in enumerate(["one", "two", "three", "user"]):
        with store.writer(IDENTITY, None, IDS + number, OPTIONS) as writer:
            writer.add("layer-000", bundle(number))
            digest = writer.publish({})
        store.name(name, digest, {} if name == "user" else {"automatic": True, "owner": name})
        os.utime(store.folder / "contexts" / f"{name}.json", (number + 1, number + 1))
    with store.writer(IDENTITY, store.resolve("one").digest, IDS + 9, OPTIONS) as writer:
        writer.add("layer-000", bundle(9))
        digest = writer.publish({})
    store.name("four", digest, {"automatic": True})
    assert {one.name for one in store.list() if one.is_automatic} == {"one", "two", "three", "four"}
    every = sum(store.resolve(name).nbytes for name in ("two", "three", "four"))
    store.note_use("two")
    assert store.trim(every) == ((), every) == store.trim(1 << 60)
    removed, held = store.trim(every - 1)
    assert removed == ("one", "three") and held == every - store.resolve("user").nbytes, "one is a part of four"
    assert store.gc().nodes == 1 and len(store.list()) == 3 and store.verify() == []
    assert store.trim(0) == (("four", "two"), 0) and store.gc().nodes == 3
    assert [one.name for one in store.list()] == ["user"] and nodes_of(store) == {store.resolve("user").digest}
    with pytest.raises(UnknownContextError, match="no context 'two'"):
        store.note_use("two")


def test_names_are_read_once(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they changed: given to another node, used, or removed."""
    read: list[str] = []
    read_name = names.read_name

    def noted(layout: StoreLayout, name: str) -> NamedContext:
        read.append(name)
        return read_name(layout, name)

    monkeypatch.setattr(names, "read_name", noted)
    digest = save(store, "book")
    save(store, "other")
    assert [one.name for one in store.list()] == [one.name for one in store.list()] == read == ["book", "other"]
    store.name("book", digest, {"tokens": 9})
    assert store.list()[0].plain == {"tokens": 9} and read == ["book", "other", "book"]
    ContextStore(store.folder).remove("other")
    assert [one.name for one in store.list()] == ["book"] and len(read) == 3
    save(store, "other")
    assert [one.name for one in store.list()] == ["book", "other"] and read[3:] == ["other"]


def test_a_save_that_is_given_up_leaves_nothing(store: ContextStore) -> None:
    with pytest.raises(ZeroDivisionError), store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        writer.add("layer-000", bundle(0))
        raise ZeroDivisionError
    assert left_in_tmp(store) == [] and nodes_of(store) == set() and store.list() == []


def test_two_writers_of_one_node(store: ContextStore) -> None:
    other = ContextStore(store.folder)
    with store.writer(IDENTITY, None, IDS, OPTIONS) as one, other.writer(IDENTITY, None, IDS, OPTIONS) as two:
        assert not one.exists and not two.exists
        for writer in (one, two):
            writer.add("layer-000", bundle(0))
        assert one.publish({"by": "one"}) == two.publish({"by": "two"})
    with store.writer(IDENTITY, None, IDS, OPTIONS) as three:
        assert three.exists
        three.add("layer-000", bundle(0))
        assert three.publish({}) == one.digest
    store.name("book", one.digest, {})
    other.close()
    assert nodes_of(store) == {one.digest} and left_in_tmp(store) == [] and store.verify() == []
    assert store.get(one.digest).plain == {"by": "one"}


def test_layers_may_be_added_by_threads(store: ContextStore) -> None:
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        threads = [
            threading.Thread(target=writer.add, args=(f"layer-{number:03}", bundle(number))) for number in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        node = store.get(writer.publish({}))
    for number in range(6):
        check_equal(node.bundle(f"layer-{number:03}", verify=True), bundle(number))


def test_files_are_for_their_owner_alone(store: ContextStore) -> None:
    before = os.umask(0)
    try:
        save(store, "book", parent=save(store, "other"), seed=3)
    finally:
        os.umask(before)
    for path in [store.folder, *store.folder.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_only_what_is_asked_for_is_checked(store: ContextStore) -> None:
    """Index arrays before first use; keys and values later, by `check`, which a caller may stop."""
    digest = save(store, "book")
    path = next(store.folder.glob("nodes/*/*/layer-000.ra"))
    whole = bytearray(path.read_bytes())
    wanted = bundle(0)
    place = whole.index(np.ascontiguousarray(wanted.arrays["0/keys"]).tobytes()[-4096:])
    whole[place + 2048] ^= 1
    path.write_bytes(whole)
    node = store.get(digest)
    loaded = node.bundle("layer-000", verify=("keys", "values"))
    np.testing.assert_array_equal(loaded.arrays["0/index/0/order"], wanted.arrays["0/index/0/order"])
    node.file("layer-000").check(stop=lambda: True)
    with pytest.raises(StoreDamagedError, match=r"layer-000\.ra is damaged: the checksum of block .* 0/keys"):
        node.file("layer-000").check()
    with pytest.raises(StoreDamagedError, match="0/keys"):
        node.bundle("layer-000", verify=True)


def test_a_damaged_node_is_replaced_by_the_next_save(store: ContextStore) -> None:
    """Or it would be for good that a text, read and saved again, cannot be loaded."""
    digest = save(store, "book")
    path = next(store.folder.glob("nodes/*/*/layer-001.ra"))
    for hurt in (lambda data: data[:-7], lambda data: data[:5000] + b"!" + data[5001:]):
        path.write_bytes(hurt(path.read_bytes()))
        [damage] = store.verify()
        assert damage.names == ("book",) and damage.node == digest and "layer-001.ra" in damage.what
        assert save(store, "book") == digest
        assert store.verify() == [] and left_in_tmp(store) == []
        check_equal(store.get(digest).bundle("layer-001", verify=True), bundle(1))


def test_verify_takes_back_a_mark_on_a_whole_node(store: ContextStore) -> None:
    digest = save(store, "book")
    mark = store.folder / "nodes" / digest[:2] / digest / "DAMAGED"
    mark.touch()
    assert store.verify(["book"]) == [] and not mark.exists()


def test_verify_tells_how_far_it_is(store: ContextStore) -> None:
    save(store, "book", parent=save(store, None), seed=3)
    seen: list[tuple[int, int]] = []
    assert store.verify(progress=lambda done, total: seen.append((done, total))) == []
    assert seen == [(seen[0][0], seen[1][0]), (store.resolve("book").nbytes,) * 2]


def test_populate_reads_files(store: ContextStore) -> None:
    node = store.get(save(store, "book"))
    node.file("layer-000").populate()
    check_equal(node.bundle("layer-000", verify=True), bundle(0))
    with pytest.raises(StoreError, match="no file 'layer-999'"):
        node.file("layer-999").populate()


class ReadingDisk(Disk):
    """As where other machines share the disk: nothing is mapped."""

    def map(self, path: Path) -> Mapped:
        return read_file(path, path.stat().st_size)


def test_files_on_shared_disks_are_read_not_mapped(store: ContextStore) -> None:
    digest = save(store, "book")
    node = ContextStore(store.folder, disk=ReadingDisk()).get(digest)
    node.file("layer-000").populate()
    check_equal(node.bundle("layer-000", verify=True), bundle(0))
    late = ContextStore(store.folder, disk=ReadingDisk()).get(digest)
    assert late.bundle("layer-000", verify=True) and store.verify() == []
    late.file("layer-000").release()
    store.remove("book")
    store.gc()
    check_equal(node.bundle("layer-000", verify=False), bundle(0))
    with pytest.raises(StoreError, match="it was removed meanwhile"):
        late.bundle("layer-000", verify=True)


MOUNTS = r"""21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/me/my\040disk rw - fuse.sshfs host: rw
"""


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    cases = {"/srv/x": "ext4", "/home/you": "nfs4", "/home/me/my disk/x": "fuse.sshfs", "/homes": "ext4"}
    for path, kind in cases.items():
        assert file_system(Path(path), os.makedev(9, 9), str(mounts)) == kind
    assert file_system(Path("/elsewhere"), os.makedev(0, 40), str(mounts)) == "nfs4"
    assert file_system(Path("/x"), 0, str(tmp_path / "none")) == ""


class CountingDisk(Disk):
    """Counts waits for data."""

    flushes = 0

    def flush(self, handle: int) -> None:
        self.flushes += 1
        super().flush(handle)


def test_few_bytes_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_DIRTY", 1 << 18)
    monkeypatch.setattr(bundles, "_PIECE", 1 << 16)
    disk = CountingDisk()
    store = ContextStore(tmp_path / "store", disk=disk)
    node = store.get(save(store, "book"))
    assert disk.flushes >= node.nbytes // (1 << 18) - 3 > 0
    check_equal(node.bundle("layer-000", verify=True), bundle(0))


def test_a_view_is_not_copied_as_a_whole(store: ContextStore) -> None:
    storage = np.ones((4, 1 << 20, 4), np.float32)  # 64 MiB, of which half are saved
    view = storage[:, : 1 << 19]
    with store.writer(IDENTITY, None, IDS, OPTIONS) as writer:
        writer.add("warm", Bundle({}, {"a": np.ones(10_000)}))
        tracemalloc.start()
        try:
            writer.add("layer-000", Bundle({}, {"0/keys": view}))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        node = store.get(writer.publish({}))
    assert peak < 1 << 20
    np.testing.assert_array_equal(node.bundle("layer-000", verify=True).arrays["0/keys"], view)


def test_the_folder_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVAL_ATTN_STORE", str(tmp_path / "here"))
    assert ContextStore().folder == tmp_path / "here"
    monkeypatch.delenv("RETRIEVAL_ATTN_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert ContextStore().folder == tmp_path / "data" / "retrieval_attn" / "contexts"


def test_asking_makes_no_store(tmp_path: Path) -> None:
    store = ContextStore(tmp_path / "deep" / "store")
    assert store.list() == [] and store.verify() == [] and store.gc() == (0, 0, 0) and store.nbytes() == 0
    for ask in (store.resolve, store.remove):
        with pytest.raises(UnknownContextError, match="it is empty"):
            ask("book")
    assert not store.folder.exists()
    save(store, "book")
    assert [one.name for one in ContextStore(store.folder).list()] == ["book"]


def test_empty_folders_that_a_copy_left_out_come_back(store: ContextStore) -> None:
    digest = save(store, "book")
    (store.folder / "tmp").rmdir()
    assert store.verify() == []
    assert save(store, "again") == digest
