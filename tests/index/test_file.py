"""Saved indexes answer as the index did, and no damaged, foreign or exchanged file gives an answer at all."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError, ShapeError
from retrieval_attn.index import Format, KeyIndex, available, create
from retrieval_attn.index.file import MAGIC, load_index, save_index
from retrieval_attn.index.formats import from_float32
from retrieval_attn.index.replace import replace_file
from tests.cpu.reference import in_threads

DIM = 16
PREFIX = struct.Struct("<8sIII")


def data(n: int = 500) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """bfloat16 keys (n, DIM), training queries (2, 60, DIM), queries (5, DIM)."""
    rng = np.random.default_rng(0)
    keys = from_float32(rng.standard_normal((n, DIM), dtype=np.float32), Format.BFLOAT16)
    return keys, rng.standard_normal((2, 60, DIM), dtype=np.float32), rng.standard_normal((5, DIM), dtype=np.float32)


def build(kind: str, n: int = 500) -> tuple[KeyIndex, npt.NDArray[Any]]:
    """An index of `kind` that searches rather than scans, as far as kinds can be told."""
    keys, train, _ = data(n)
    options: dict[str, Any] = {"exact_below": 0} if kind == "roargraph" else {}
    return create(kind, keys, fmt=Format.BFLOAT16, queries=train, **options), keys


def savable() -> list[str]:
    kinds = []
    for kind in available():
        try:
            build(kind, 64)[0].state()
        except ConfigError:
            continue
        kinds.append(kind)
    return kinds


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ivf file that damage is done to."""
    index, keys = build("ivf", 90)
    path: Path = tmp_path_factory.mktemp("saved") / "index"
    save_index(path, index, keys, Format.BFLOAT16, identity="m/0/1")
    return path


@pytest.mark.parametrize("with_keys", [True, False])
def test_every_kind_comes_back(tmp_path: Path, with_keys: bool) -> None:
    """Same answers, same work, same options; a later insert works on the maps and does not reach the file."""
    assert {"ivf", "hnsw", "roargraph"} <= set(savable())
    for kind in savable():
        index, keys = build(kind)
        queries = data()[2]
        path = tmp_path / kind
        save_index(path, index, keys, Format.BFLOAT16, identity="model/3/1", with_keys=with_keys)
        before = path.read_bytes()
        back = load_index(path, identity="model/3/1", keys=None if with_keys else keys)
        assert type(back.index) is type(index) and back.fmt is Format.BFLOAT16 and back.identity == "model/3/1"
        np.testing.assert_array_equal(back.keys, keys)
        for _ in range(2):
            one, other = index.search(queries, 12), back.index.search(queries, 12)
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.scores, other.scores)
            assert one.keys_scanned == other.keys_scanned
            more = data(37)[0]
            index.insert(more)
            back.index.insert(more)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.glob(".*")] == []


def same_state(one: KeyIndex, other: KeyIndex) -> None:
    mine, theirs = one.state(), other.state()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", ["flat", "sketch", "roargraph", "device"])
def test_a_loaded_index_grows_as_the_saved_one(kind: str, trusted: bool) -> None:
    """It codes, orders and links its keys anew at the same insertion, in one array or from maps of a file."""
    keys, train, _ = data(2000)
    options: dict[str, dict[str, Any]] = {"flat": {"codes": "int8"}, "roargraph": {"exact_below": 0, "tail": 40}}
    index = create(kind, keys[:500], fmt=Format.BFLOAT16, queries=train, **options.get(kind, {}))
    index.insert(keys[500:790])
    state = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in index.state().items()}
    before = {name: np.array(value) for name, value in state.items()}
    back = type(index).from_state(keys[:790], Format.BFLOAT16, state, trusted=trusted)
    same_state(index, back)
    for start, stop in ((790, 820), (820, 1010), (1010, 1600), (1600, 1603)):
        for one in (index, back):
            one.insert(keys[start:stop])
        same_state(index, back)
    if not trusted:
        for name, value in state.items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_an_empty_index_and_a_replaced_file(tmp_path: Path) -> None:
    """Zero keys are saved too, and a second save replaces the first as a whole, also while it is mapped."""
    keys, _, queries = data()
    path = tmp_path / "index"
    save_index(path, create("ivf", keys[:0], fmt=Format.BFLOAT16), keys[:0], Format.BFLOAT16)
    assert len(load_index(path).index) == 0
    index = create("ivf", keys, fmt=Format.BFLOAT16)
    save_index(path, index, keys, Format.BFLOAT16)
    mapped = load_index(path)
    save_index(path, create("ivf", keys[:9], fmt=Format.BFLOAT16), keys[:9], Format.BFLOAT16)
    np.testing.assert_array_equal(mapped.keys, keys)
    np.testing.assert_array_equal(mapped.index.search(queries, 3).ids, index.search(queries, 3).ids)
    assert len(load_index(path).index) == 9


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return type(array).__name__ == "mmap"


def test_arrays_are_mapped_and_aligned(saved: Path) -> None:
    """Nothing is copied: the keys lie in the file's map, on a cache line, and are writeable (one Numba type)."""
    found = load_index(saved)
    assert is_mapped(found.keys)
    assert found.keys.ctypes.data % 64 == 0 and found.keys.flags.writeable


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not cost the index that was there."""
    index, keys = build("ivf", 90)
    path = tmp_path / "index"
    save_index(path, index, keys, Format.BFLOAT16)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_index(path, index, keys, Format.BFLOAT16)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(saved: Path, place: int, bit: int) -> None:
    """Any bit: a named error, or (in padding between arrays) the same index."""
    good = saved.read_bytes()
    bad = bytearray(good)
    bad[place % len(good)] ^= 1 << bit
    path = saved.with_name("flipped")
    path.write_bytes(bad)
    try:
        found = load_index(path)
    except InputDataError as error:
        assert "flipped" in str(error)
        return
    np.testing.assert_array_equal(found.keys, load_index(saved).keys)
    queries = data()[2]
    np.testing.assert_array_equal(found.index.search(queries, 9).ids, load_index(saved).index.search(queries, 9).ids)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 10**9), tail=st.booleans())
def test_a_cut_or_grown_file_is_found(saved: Path, length: int, tail: bool) -> None:
    """A download that stopped, a file that something was appended to; also without reading the arrays."""
    good = saved.read_bytes()
    path = saved.with_name("cut")
    path.write_bytes(good + b"\0" * (1 + length % 5000) if tail else good[: length % len(good)])
    for verify in (True, False):
        with pytest.raises(InputDataError, match="cut"):
            load_index(path, verify=verify)


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=200))
def test_foreign_files_are_named(saved: Path, content: bytes) -> None:
    """Anything that is not ours, and our first bytes with anything behind them."""
    path = saved.with_name("foreign")
    for full in (content, MAGIC + content):
        path.write_bytes(full)
        with pytest.raises(InputDataError):
            load_index(path)


def header_of(saved: Path) -> dict[str, Any]:
    good = saved.read_bytes()
    header: dict[str, Any] = json.loads(good[PREFIX.size : PREFIX.size + PREFIX.unpack(good[: PREFIX.size])[2]])
    return header


def rewrite(saved: Path, name: str, **changes: Any) -> Path:
    """The saved file with other header fields and a right header checksum."""
    good = saved.read_bytes()
    _, version, length, _ = PREFIX.unpack(good[: PREFIX.size])
    header = header_of(saved)
    version = changes.pop("version", version)
    header.update(changes)
    text = json.dumps({k: v for k, v in header.items() if v is not None}).encode()
    start = -(-(PREFIX.size + length) // 4096) * 4096
    path = saved.with_name(name)
    head = PREFIX.pack(MAGIC, version, len(text), zlib.crc32(text)) + text
    path.write_bytes(head.ljust(start, b"\0") + good[start:])
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"kind": "no_such_kind"}, "no_such_kind"),
        ({"kind": "hnsw"}, "m "),
        ({"format": "float8"}, "float8"),
        ({"keys": 91}, "damaged"),
        ({"head_dim": 8}, "damaged"),
        ({"keys": "many"}, "keys"),
        ({"arrays": None}, "arrays"),
        ({"arrays": [{}]}, "arrays.name"),
        ({"plain": {}}, "centroids"),
        ({"data_bytes": 5}, "bytes"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [10**9, 16], "offset": 0, "crc32": 0}]}, "outside"),
        ({"arrays": [{"name": "keys", "dtype": "O", "shape": [1], "offset": 0, "crc32": 0}]}, "dtype"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [-1], "offset": 0, "crc32": 0}]}, "outside"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [[]], "offset": 0, "crc32": 0}]}, "arrays.shape"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [2**70], "offset": 0, "crc32": 0}]}, "arrays.shape"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [1.5], "offset": 0, "crc32": 0}]}, "arrays.shape"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [2**32] * 2, "offset": 0, "crc32": 0}]}, "outside"),
        ({"arrays": [{"name": "keys", "dtype": "<u2", "shape": [1], "offset": 10**30, "crc32": 0}]}, "outside"),
        ({"arrays": [7]}, "arrays.name"),
        ({"keys": 10**30}, "sizes"),
    ],
)
def test_headers_that_do_not_hold_together(saved: Path, changes: dict[str, Any], message: str) -> None:
    """A right checksum over wrong contents (another release, another program): named, not crashed on."""
    with pytest.raises(RetrievalAttentionError, match=message):
        load_index(rewrite(saved, "rewritten", **changes))


def test_plain_values_that_no_index_has(saved: Path) -> None:
    """Of the right type for JSON, but not for the kind: Python raises OverflowError for int(inf)."""
    plain = {**header_of(saved)["plain"], "nprobe": float("inf")}
    with pytest.raises(InputDataError, match="does not describe an index of kind 'ivf'"):
        load_index(rewrite(saved, "rewritten", plain=plain))


def test_a_header_nested_without_end(saved: Path) -> None:
    """Python's parser gives up with another error than for text that is no JSON."""
    text = b"[" * 100_000
    path = saved.with_name("nested")
    path.write_bytes(PREFIX.pack(MAGIC, 1, len(text), zlib.crc32(text)) + text)
    with pytest.raises(InputDataError, match="no JSON"):
        load_index(path)


def test_threads_save_to_one_path(tmp_path: Path) -> None:
    """Their temporary file had one name for all of a process: a third of the saves failed."""
    index, keys = build("flat", 60)
    path = tmp_path / "index"

    def save() -> None:
        for _ in range(10):
            save_index(path, index, keys, Format.BFLOAT16)

    in_threads(save, save, save)
    assert len(load_index(path).index) == 60
    assert [one.name for one in tmp_path.iterdir()] == ["index"]


def test_what_a_killed_save_left_is_swept(tmp_path: Path) -> None:
    """Old files that nobody holds go; young ones, locked ones and other people's stay. Links are not followed."""
    index, keys = build("flat", 60)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.utime(victim, (1, 1))
    left = {name: tmp_path / name for name in (".index.123.tmp", ".index.0abc.tmp", ".index.held.tmp", ".other.1.tmp")}
    for path in left.values():
        path.write_text("half")
        os.utime(path, (1, 1))
    os.utime(left[".index.0abc.tmp"])
    link = tmp_path / f".index.{os.getpid()}.tmp"
    link.symlink_to(victim)
    with left[".index.held.tmp"].open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save_index(tmp_path / "index", index, keys, Format.BFLOAT16)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"victim", "index", ".index.0abc.tmp", ".index.held.tmp", ".other.1.tmp", link.name}
    assert victim.read_text() == "mine"


def test_a_slow_save_is_not_swept(tmp_path: Path) -> None:
    """A save of the same path removes files that look left over, but not one that is being written."""
    path = tmp_path / "index"

    def slowly(file: Any) -> None:
        file.write(b"first")
        os.utime(file.fileno(), (1, 1))
        replace_file(path, lambda other: other.write(b"second"))

    replace_file(path, slowly)
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_planted_temporary_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name was guessed: what a link there points to stays as it was, and so does the old index."""
    path, victim = tmp_path / "index", tmp_path / "victim"
    for one in (path, victim):
        one.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".index.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(path, lambda file: file.write(b"new"))
    assert victim.read_text() == path.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows cuts no file that is mapped")
@pytest.mark.parametrize("who", ["the group", "everybody", "another owner", "nobody else, but mapped=False"])
def test_a_file_that_is_cut_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """A map of it would end the process by SIGBUS: what others can cut is copied, and the copy does not notice."""
    index, keys = build("flat", 3000)
    path = tmp_path / "index"
    save_index(path, index, keys, Format.BFLOAT16)
    queries = data()[2]
    expected = index.search(queries, 5).ids
    path.chmod({"the group": 0o664, "everybody": 0o646}.get(who, 0o644))
    if who == "another owner":
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
    loaded = load_index(path, mapped=False if "mapped=False" in who else None, verify=False)
    assert not is_mapped(loaded.keys)
    assert is_mapped(load_index(path, mapped=True).keys)
    os.truncate(path, 4096)
    assert np.array_equal(loaded.index.search(queries, 5).ids, expected)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such permissions")
def test_a_saved_file_is_its_owners(tmp_path: Path) -> None:
    """Where the umask lets a group write to new files, as most systems do, saved indexes would never be mapped."""
    index, keys = build("flat", 60)
    before = os.umask(0)
    try:
        save_index(tmp_path / "index", index, keys, Format.BFLOAT16)
    finally:
        os.umask(before)
    assert is_mapped(load_index(tmp_path / "index").keys)


def test_the_wrong_context_is_refused(saved: Path, tmp_path: Path) -> None:
    """An index of another head or of other keys would answer, and answer wrongly."""
    keys = data(90)[0]
    with pytest.raises(InputDataError, match="m/0/2"):
        load_index(saved, identity="m/0/2")
    assert len(load_index(saved, identity="m/0/1", keys=keys).index) == 90
    other = keys.copy()
    other[50, 3] ^= 1
    with pytest.raises(InputDataError, match="not the keys"):
        load_index(saved, keys=other)
    with pytest.raises(ShapeError):
        load_index(saved, keys=keys[:80])
    with pytest.raises(InputDataError, match="cannot be read"):
        load_index(tmp_path / "nothing")
    with pytest.raises(InputDataError, match="cannot be read"):
        load_index(tmp_path)
    index, _ = build("ivf", 90)
    with pytest.raises(ShapeError, match="index's"):
        save_index(tmp_path / "new", index, keys[:80], Format.BFLOAT16)
    save_index(tmp_path / "bare", index, keys, Format.BFLOAT16, with_keys=False)
    with pytest.raises(InputDataError, match="without its keys"):
        load_index(tmp_path / "bare")
