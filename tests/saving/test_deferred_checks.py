"""What opening a context leaves for later, and when it is done."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.engine import saved_text
from retrieval_attn.engine.engine import Engine
from retrieval_attn.model.identity import identity_of
from retrieval_attn.offload.threads import Activity, foreground
from retrieval_attn.saving import save as late_check
from retrieval_attn.saving.save import DeferredVerify
from retrieval_attn.store import ContextStore, SavedNode, bundle
from retrieval_attn.store.bundle import BundleFile
from tests.tiny_models import QUESTION, Loaded, needle_text
from tests.waiting import comes_true

LONG = 3600.0
"""Seconds."""


@pytest.fixture(scope="module")
def chain(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> list[SavedNode]:
    store = ContextStore(tmp_path_factory.mktemp("store"))
    context = ra.Context(*loaded, ra.Config()).read(needle_text(3_000), progress=False)
    return store.chain(context.save("some", store=store).digest, identity_of(*loaded))


def compared(check: DeferredVerify, files: int) -> bool:
    """Whether it compares so many files in a while."""
    return comes_true(lambda: check.compared >= files)


def test_files_in_memory_wait_for_questions(chain: list[SavedNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.2)
    check = DeferredVerify(chain)
    check.hold()
    time.sleep(0.5)
    assert check.files and not check.compared
    check.wait(progress=False)  # somebody needs to know: no question is worth more
    assert check.compared == check.files


def test_who_does_not_ask_is_compared_soon(chain: list[SavedNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.05)
    check = DeferredVerify(chain)
    assert compared(check, check.files)


def test_files_on_a_disk_are_read_at_once(chain: list[SavedNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """The question wants the same bytes in the same order."""
    monkeypatch.setattr(late_check, "FIRST_SECONDS", LONG)
    monkeypatch.setattr(bundle, "resident_bytes", lambda path: 0)
    check = DeferredVerify(chain)
    assert compared(check, check.files)


def test_nothing_is_left_of_one_that_waits(chain: list[SavedNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_check, "FIRST_SECONDS", LONG)
    check = DeferredVerify(chain)
    thread = check._thread
    del check
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.0)
    yield


@pytest.mark.cuda
@pytest.mark.usefixtures("quick")
def test_pages_are_locked_before_an_exact_question(needle_model_path: Path, tmp_path: Path) -> None:
    """Where exact questions are what a context is for; the answer is the one of a context that locked nothing."""
    model = ra.LLM(needle_model_path, device="cuda")
    model.read(needle_text(200_000), progress=False, save="some", store=tmp_path)
    texts = []
    for options in ({}, {"question_attention": "retrieval"}):
        context = model.open("some", store=tmp_path, progress=False, **options)
        layers = [layer for layer in context._cache.layers if isinstance(layer, RetrievalLayer)]
        context.kept.wait()
        hosts = [layer.held.hosts[0] for layer in layers if layer.held is not None]
        locked = [one.locked_rows is not None for host in hosts for one in host.segments]
        assert locked and set(locked) == {not options}
        texts.append(context.ask(QUESTION, question_attention="exact", max_new_tokens=12).text)
    assert len(set(texts)) == 1


def test_an_engine_that_decodes_gets_most_of_the_time(chain: list[SavedNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """And all is compared in the end, however long it decodes."""
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.0)
    pieces: list[float] = []
    whole = BundleFile.check

    def slow(self: BundleFile, stop: Any) -> None:
        for _ in range(3):
            pieces.append(time.monotonic())
            time.sleep(0.01)
            stop()
        whole(self, stop)

    monkeypatch.setattr(BundleFile, "check", slow)
    check = DeferredVerify(chain[:1])
    while check.compared < check.files:
        foreground.note()
        time.sleep(0.001)
    gaps = sorted(after - before for before, after in itertools.pairwise(pieces))
    assert gaps[len(gaps) // 2] >= 0.01 * (1 + late_check.IDLE_FACTOR)
    check.require_whole()


def test_rows_on_an_opened_context_slow_the_comparison_down(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of their steps says so."""
    monkeypatch.setattr(saved_text, "WHOLE_BYTES", 0)
    calls, note = list[float](), Activity.note

    def counted(self: Activity) -> None:
        calls.append(time.monotonic())
        note(self)

    monkeypatch.setattr(Activity, "note", counted)
    ra.Context(*loaded, ra.Config()).read(needle_text(1_500), progress=False).save("book", store=tmp_path)
    llm: Any = SimpleNamespace(model=loaded[0], tokenizer=loaded[1], config=ra.Config())
    with Engine(llm, store=tmp_path) as engine:
        found = engine.ask_saved("book", QUESTION, max_tokens=8).result()
    assert found.error is None and len(calls) >= len(found.tokens) - 1
