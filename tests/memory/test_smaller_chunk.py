"""index="auto" that makes room for codes by a smaller chunk: it is what the read takes, and nothing after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill
from retrieval_attn.memory import device_room
from retrieval_attn.runner import hidden_states, prefill
from retrieval_attn.store import ContextStore
from tests.index.test_host_codes import context_of, ids_of
from tests.offload.test_prefill import check_same_bytes, hooked
from tests.tiny_models import build_model, random_ids

CONFIG = ra.Config(sink=4, window=16, retrieve=2, prefill_chunk=200)
TOKENS = 400
DECIDED = 64


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` gives prompts codes in chunks of DECIDED tokens; layers split what is longer than a chunk."""

    def chosen(model_config: Any, config: ra.Config, *rest: Any, **more: Any) -> ra.Config:
        return config.replace(index="device", prefill_chunk=min(DECIDED, config.prefill_chunk))

    monkeypatch.setattr(device_room, "chosen_index", chosen)
    monkeypatch.setattr(hidden_states, "SKETCH_FROM", 100)
    monkeypatch.setattr(prefill, "MIN_CHUNK", 16)


def chunks_read(model: Any, cache: Any, tokens: int = TOKENS) -> list[int]:
    """Tokens of each call of the last layer while so many are read."""
    seen: list[int] = []
    with hooked(model.model.layers[-1].mlp, lambda module, args: seen.append(args[0].shape[1])), torch.no_grad():
        model(random_ids(1, tokens), past_key_values=cache, logits_to_keep=1)
    return seen


@pytest.mark.parametrize(("asked", "taken"), [(200, 64), (48, 48), (TOKENS, 64), (8192, 64)])
def test_the_read_takes_it_and_no_later_one(asked: int, taken: int) -> None:
    """A chunk that the caller gave stays the most, also one as long as the prompt; tokens after the first ones come in
    chunks of that, and an emptied cache reads as a new one.
    """
    config = CONFIG.replace(prefill_chunk=asked)
    model: Any = ra.enable(build_model("llama"), config)
    cache = ra.RetrievalCache(model, config)
    whole, left = divmod(TOKENS, taken)
    first = [taken] * whole + [left] * bool(left)
    assert chunks_read(model, cache) == first and set(cache.index_kinds()) == {"device"}
    whole, left = divmod(TOKENS, min(asked, TOKENS))
    assert chunks_read(model, cache) == [min(asked, TOKENS)] * whole + [left] * bool(left)
    cache.reset()
    assert chunks_read(model, cache) == first
    assert cache.config.prefill_chunk == asked


def test_the_layers_chunk_may_be_smaller_than_the_caches() -> None:
    """What the model was enabled with is the most, whatever the cache's options say."""
    model: Any = ra.enable(build_model("llama"), CONFIG, prefill_chunk=32)
    assert set(chunks_read(model, ra.RetrievalCache(model, CONFIG))) == {32, TOKENS % 32}


def test_a_chunk_that_does_not_fit_all_the_same_is_halved_for_this_read() -> None:
    """The next prompt begins with what it is asked for, not with half of what another took."""
    model: Any = ra.enable(build_model("llama"), CONFIG)
    failed: list[bool] = []

    def refuse(module: Any, args: Any) -> None:
        if not failed:
            failed.append(True)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    cache = ra.RetrievalCache(model, CONFIG)
    with hooked(model.model.layers[0].mlp, refuse):
        assert set(chunks_read(model, cache)) == {DECIDED // 2, TOKENS % (DECIDED // 2)}
    assert chunks_read(model, cache) == [200, 200]


def test_the_answers_are_those_of_the_planned_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is exact however it is cut."""
    found = []
    for decided in (DECIDED, CONFIG.prefill_chunk):
        monkeypatch.setattr("tests.memory.test_smaller_chunk.DECIDED", decided)
        model: Any = ra.enable(build_model("llama"), CONFIG)
        with torch.no_grad():
            found.append(model(random_ids(1, TOKENS), past_key_values=ra.RetrievalCache(model, CONFIG)).logits)
    torch.testing.assert_close(found[0], found[1])


def test_a_paused_read_ends_with_more_cells_than_planned() -> None:
    """An engine's reads plan with the chunk that was asked for; those to come are granted as they come."""
    context = context_of(CONFIG)
    cache = ra.RetrievalCache(context.model, CONFIG)
    ids = ids_of(context, TOKENS)
    read = ChunkedPrefill(AnswerLoop(context.model, context.tokenizer), cache, ids)
    planned = read.gate.chunks_left
    while not read.done:
        read.go(1)
        assert read.wait(60.0)
    assert read.error is None and read.gate.chunks_left == 0 and read.gate.chunks_done > planned
    context.read(ids, progress=False)
    check_same_bytes(cache, context.cache)


def test_a_saved_context_does_not_keep_it(tmp_path: Path) -> None:
    """It opens with its codes and with the chunk of where it is opened, also for a text that it reads on."""
    context = context_of(CONFIG.replace(graph=False))
    context.read(ids_of(context, TOKENS), progress=False)
    assert context.cache.index.chunk == DECIDED and context.config.prefill_chunk == 200
    store = ContextStore(tmp_path / "store")
    context.save("tight", store=store)
    for overrides, chunk in (({}, 150), ({"prefill_chunk": 300}, 300)):
        other = context_of(CONFIG.replace(graph=False, prefill_chunk=150))
        again = other.open("tight", store=store, progress=False, **overrides)
        assert (again.config.prefill_chunk, again.cache.index.config.prefill_chunk) == (chunk, chunk)
        assert again.cache.index.chunk is None and set(again.cache.index_kinds()) == {"device"}
        seen: list[int] = []
        model: Any = again.model
        with hooked(model.model.layers[-1].mlp, lambda module, args, seen=seen: seen.append(args[0].shape[1])):
            again.extend(ids_of(again, TOKENS), progress=False)
        assert seen[0] == chunk
        again.kept.wait()
