"""A context that several threads use, and one whose files are damaged: what a question finds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrieval_attn as ra
from retrieval_attn.errors import StoreDamagedError, UnsupportedModelError
from retrieval_attn.saving import save as late_check
from retrieval_attn.store import ContextStore
from retrieval_attn.store.bundle import _PREFIX
from tests.tiny_models import Loaded

CONFIG = ra.Config(sink=4, window=16, retrieve="all", index="flat", threads=1)
IDS = [(7 * number) % 3000 + 10 for number in range(200)]
MORE = [(11 * number) % 3000 + 10 for number in range(60)]
ASKED = [11, 12, 13]


def answer(context: ra.Context) -> str:
    return context.continue_with(ASKED, max_new_tokens=6).text


def saved(context: ra.Context, store: ContextStore) -> int:
    return context.save("name", store=store).tokens


USES: dict[str, Callable[[ra.Context, ContextStore], Any]] = {
    "ask": lambda context, store: answer(context),
    "stream": lambda context, store: "".join(context.stream("What?", max_new_tokens=4, raw=True)) != "",
    "fork": lambda context, store: context.fork().num_tokens,
    "save": saved,
    "extend": lambda context, store: context.extend(MORE, progress=False).num_tokens,
}


@pytest.mark.parametrize("use", USES)
def test_what_comes_while_a_context_is_extended_waits(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """It finds the whole context, as if it had come afterwards."""
    context = ra.Context(*loaded, CONFIG).read(IDS, progress=False)
    begun, go_on = threading.Event(), threading.Event()
    append = ra.Context._append

    def slow(self: ra.Context, ids: list[int], progress: bool) -> None:
        if self is context and not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        append(self, ids, progress)

    monkeypatch.setattr(ra.Context, "_append", slow)
    found: list[Any] = []
    extending = threading.Thread(target=lambda: context.extend(MORE, progress=False))
    using = threading.Thread(target=lambda: found.append(USES[use](context, ContextStore(tmp_path / "one"))))
    extending.start()
    assert begun.wait(60)
    using.start()
    using.join(0.3)
    waited = using.is_alive() and not found
    go_on.set()
    extending.join(60)
    using.join(60)
    assert waited
    alone = ra.Context(*loaded, CONFIG).read(IDS, progress=False).extend(MORE, progress=False)
    assert found == [USES[use](alone, ContextStore(tmp_path / "other"))]


def test_a_callback_may_ask_the_same_context(loaded: Loaded) -> None:
    """A thread does not wait for itself."""
    context = ra.Context(*loaded, CONFIG).read(IDS, progress=False)
    inner: list[str] = []
    text = context.ask("What?", max_new_tokens=2, raw=True, on_text=lambda _: inner.append(answer(context))).text
    assert text and set(inner) == {answer(context)}


def test_a_saved_key_that_is_no_number_is_damage(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit makes a key NaN: the file is to blame, not the model, also before its checksums were compared."""
    store = ContextStore(tmp_path / "store")
    digest = ra.Context(*loaded, CONFIG).read(IDS, progress=False).save("text", store=store).digest
    (file,) = store.folder.glob(f"nodes/*/{digest}/layer-002*")
    data = bytearray(file.read_bytes())
    header_bytes = _PREFIX.unpack(data[: _PREFIX.size])[2]
    header = json.loads(data[_PREFIX.size : _PREFIX.size + header_bytes])
    ((_, dtype, shape, offset),) = [one for one in header["arrays"] if one[0] == "host/0/keys"]
    begin = _PREFIX.size + header_bytes + offset
    keys = np.frombuffer(data, np.uint32, int(np.prod(shape)), begin)
    exponents = (keys >> np.uint32(23)) & np.uint32(255)
    tokens = np.arange(len(keys)) // shape[2] % shape[1]
    places = np.flatnonzero((exponents == 127) & (keys << np.uint32(9) > 0) & (tokens > 50) & (tokens < 150))
    assert dtype == "<f4" and len(places)
    keys[places[0]] ^= np.uint32(1 << 30)  # of a number from 1 to 2
    file.chmod(0o600)
    file.unlink()
    file.write_bytes(data)
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 600.0)
    context = ra.Context(*loaded, CONFIG).open("text", store=store, progress=False)
    with pytest.raises(StoreDamagedError, match="layer-002"):
        answer(context)


def test_a_model_that_is_no_number_is_to_blame(loaded: Loaded, tmp_path: Path) -> None:
    """Of an opened context whose files are whole."""
    store = ContextStore(tmp_path / "store")
    ra.Context(*loaded, CONFIG).read(IDS, progress=False).save("text", store=store)
    context = ra.Context(*loaded, CONFIG).open("text", store=store, progress=False)
    weight = loaded[0].model.norm.weight.data
    before = weight.clone()
    try:
        weight[0] = float("nan")
        with pytest.raises(UnsupportedModelError, match="its weights, or its keys"):
            answer(context)
    finally:
        weight.copy_(before)
    assert answer(context)
