"""What opening a context leaves for later, and when it is done."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.model.identity import identity_of
from retrieval_attn.saving import save as late_check
from retrieval_attn.saving.save import DeferredVerify
from retrieval_attn.store import ContextStore, SavedNode, node
from tests.tiny_models import QUESTION, Loaded, needle_text

LONG = 3600.0
"""Seconds."""


@pytest.fixture(scope="module")
def chain(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> list[SavedNode]:
    store = ContextStore(tmp_path_factory.mktemp("store"))
    context = ra.Context(*loaded, ra.Config()).read(needle_text(3_000), progress=False)
    return store.chain(context.save("some", store=store).digest, identity_of(*loaded))


def compared(check: DeferredVerify, files: int) -> bool:
    """Whether it compares so many files in a while."""
    end = time.monotonic() + 10
    while check.compared < files and time.monotonic() < end:
        time.sleep(0.01)
    return check.compared >= files


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
    monkeypatch.setattr(node, "resident_bytes", lambda path: 0)
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
