"""Saved contexts whose values no program wrote, under right checksums: StoreDamagedError, or an answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.errors import StoreDamagedError, StoreError
from retrieval_attn.store import ContextStore
from retrieval_attn.store.record import decode, encode
from tests.store.test_forged import header_of, reseal
from tests.tiny_models import Loaded

CONFIG = ra.Config(sink=4, window=16, retrieve=20, index="flat", threads=1)
IDS = [(7 * number) % 3000 + 10 for number in range(700)]
WRONG: list[Any] = [None, True, -1, 2**62, 1.5, "x", [], {}, [[]]]
GONE = "gone"
SHAPES: list[Any] = [[], [1], [0], [2, 2]]
DTYPES = ["<f8", "|i1", "<i8"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from leaves(part, (*path, key))


def changed(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """A copy with another part at `path`, or without it."""
    found = copy.deepcopy(value)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    if wrong == GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = wrong
    return found


class Forger:
    """A store with one context, the header of one layer of it and the record of its node."""

    def __init__(self, loaded: Loaded, folder: Path) -> None:
        self.loaded, self.store = loaded, ContextStore(folder)
        digest = ra.Context(*loaded, CONFIG).read(IDS, progress=False).save("text", store=self.store).digest
        self.node = folder / "nodes" / digest[:2] / digest
        self._layer, self._record = self.node / "layer-001.ra", self.node / "node.json"
        for path in (self._layer, self._record):
            path.chmod(0o600)
        self._whole = self._layer.read_bytes(), self._record.read_bytes()
        self.header, self.record = header_of(self._layer), decode(self._whole[1])

    def use(self) -> None:
        """Open, ask, extend and ask."""
        context = ra.Context(*self.loaded, CONFIG).open("text", store=self.store, progress=False)
        context.continue_with([11, 12, 13], max_new_tokens=2)
        context.extend(IDS[:40], progress=False).continue_with([11, 12], max_new_tokens=2)

    def tell(self, header: dict[str, Any] | None, record: dict[str, Any] | None) -> None:
        """Write one of the two with all checksums; the other is as it was. What is mapped stays."""
        for path, data in zip((self._layer, self._record), self._whole, strict=True):
            path.unlink()
            path.write_bytes(data)
        if header is not None:
            path = self._layer
            data = path.read_bytes()
            reseal(self.node, "layer-001", json.dumps(header).encode())
            assert path.read_bytes() != data
        if record is not None:
            self._record.write_bytes(encode(record))


@pytest.fixture(scope="module")
def forger(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Forger:
    found = Forger(loaded, tmp_path_factory.mktemp("forged") / "store")
    found.use()
    return found


def headers(header: dict[str, Any]) -> list[dict[str, Any]]:
    """A header with each part replaced."""
    found = [
        changed(header, path, wrong) for path in leaves(header, ()) if path[0] == "plain" for wrong in (*WRONG, GONE)
    ]
    for number in range(len(header["arrays"])):
        found += [changed(header, ("arrays", number, 2), shape) for shape in SHAPES]
        found += [changed(header, ("arrays", number, 1), dtype) for dtype in DTYPES]
        found.append(changed(header, ("arrays", number), GONE))
    return [one for one in found if one != header]


def test_forged_layers(forger: Forger) -> None:
    """A fixed draw of all of them: each takes a tenth of a second."""
    drawn = random.Random(5).sample(headers(forger.header), 120)
    refused = 0
    for header in drawn:
        forger.tell(header, None)
        try:
            forger.use()
        except StoreError:
            refused += 1
    assert refused > 70


CLUSTERS: list[tuple[tuple[Any, ...], Any]] = [
    (("members", 0, 1), [-1]), (("members", 0, 1), 1.5), (("members", 0, 2), {}), (("members", 0, 0), 7),
    (("span", 1), "x"), (("span", 1), 1.5), (("span", 0), None), (("samples", 1), [[]]), (("samples", 0), 31),
]  # fmt: skip


@pytest.mark.parametrize(("place", "wrong"), CLUSTERS, ids=str)
def test_forged_clusters(forger: Forger, place: tuple[Any, ...], wrong: Any) -> None:
    """They are looked at when a context is opened, not when a question comes to them."""
    forger.tell(changed(forger.header, ("plain", "host", "clusters", *place), wrong), None)
    with pytest.raises(StoreDamagedError, match="layer-001"):
        forger.use()


@pytest.mark.parametrize("name", ["sinks/key", "tail/value", "host/clusters/probes", "host/members/0", "host/0/keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forged_shapes(forger: Forger, name: str, shape: list[int]) -> None:
    places = [number for number, one in enumerate(forger.header["arrays"]) if one[0] == name]
    forger.tell(changed(forger.header, ("arrays", places[0], 2), shape), None)
    with pytest.raises(StoreDamagedError, match="layer-001"):
        forger.use()


def test_forged_nodes(forger: Forger) -> None:
    """What a node says of itself, and a layer that it lacks."""
    parts = [(name, *path) for name in ("plain", "options") for path in leaves(forger.record[name])]
    records = [changed(forger.record, path, wrong) for path in parts for wrong in (None, -1, 2**62, "x", GONE)]
    records = [one for one in records if one != forger.record]
    for record in random.Random(6).sample(records, 60):
        forger.tell(None, record)
        with pytest.raises(ra.RetrievalAttentionError):
            forger.use()
            raise StoreError("a value that is not needed")
    forger.tell(None, changed(forger.record, ("files", "layer-002"), GONE))
    with pytest.raises(StoreDamagedError, match=r"node\.json is damaged: it has no layer 2"):
        forger.use()
