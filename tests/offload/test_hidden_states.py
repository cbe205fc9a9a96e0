"""Hidden states of a prompt in host memory: the same answers, chunk by chunk, and less of the device's memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.memory.device import DeviceLayout
from retrieval_attn.model.placement import why_not_on_host
from retrieval_attn.offload import hidden
from retrieval_attn.offload.hidden import Ferry
from retrieval_attn.offload.traffic import Traffic
from retrieval_attn.runner import hidden_states
from tests.model.test_hybrid import new_model, shared_model
from tests.offload.test_prefill import by_layer, check_same_bytes, hooked
from tests.tiny_models import build_model, random_ids, tiny_model

CONFIG = ra.Config(sink=4, window=16, index="flat")
TOKENS = 400
CHUNK = 96
"""Not a divisor of TOKENS: the last chunk is shorter."""
HYBRIDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2"]
"""Models most of whose layers keep a state. One that has no rotary embedding (Nemotron-H) is refused."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers split what is longer than a chunk of these tests."""
    monkeypatch.setattr("retrieval_attn.runner.prefill.MIN_CHUNK", 16)


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """The trips of chunks while this lasts."""
    trips: list[tuple[str, int, int]] = []
    with monkeypatch.context() as patch:
        for name in ("fetch", "store"):
            original = getattr(Ferry, name)

            def noted(self: Ferry, states: Any, start: int, stop: int, *rest: Any, _way: Any = (name, original)) -> Any:
                trips.append((_way[0], start, stop))
                return _way[1](self, states, start, stop, *rest)

            patch.setattr(Ferry, name, noted)
        yield trips


@contextlib.contextmanager
def hidden_in(place: str) -> Iterator[None]:
    """Keep hidden states of prompts on the "device" or the "host" in this block, whatever fits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_states, "reading_layout", lambda *given, **named: DeviceLayout(place == "host"))
        yield


def logits_and_cache(name: str, place: str, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return the last token's logits after reading `ids`, with hidden states in `place`."""
    with reading(place, name) as model:
        cache = ra.RetrievalCache(model, CONFIG)
        return model(ids, past_key_values=cache, logits_to_keep=1, **options).logits, cache


@contextlib.contextmanager
def reading(place: str, name: str = "llama") -> Iterator[Any]:
    """Yield a tiny model that reads in chunks of these tests, with hidden states in `place`."""
    model = shared_model(name) if name in HYBRIDS else tiny_model(name)
    with hidden_in(place), by_layer(model, CONFIG, CHUNK):
        yield model


def states(cache: Any) -> list[torch.Tensor]:
    """Of the layers that keep one, in order."""
    return [state for layer in cache.layers if isinstance(layer, StateLayer) for _, state in layer.states()]


def check_same_states(one: Any, other: Any) -> None:
    """Every state of two caches has the same bits."""
    assert len(states(one)) == len(states(other))
    assert all(torch.equal(mine, its) for mine, its in zip(states(one), states(other), strict=True))


@pytest.mark.parametrize(
    "name", ["llama", "mistral_sliding", "gemma2", "gemma3", "gemma4", "qwen3_moe", "gpt_oss", "phi3", *HYBRIDS]
)
def test_the_host_path_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, keys and values on the host, and states, whatever a model does to embeddings; every chunk of every layer
    and of the final norm went up and down once.
    """
    ids = random_ids(2, TOKENS)
    expected, cache = logits_and_cache(name, "device", ids)
    with counted(monkeypatch) as trips:
        logits, other = logits_and_cache(name, "host", ids)
    assert torch.equal(logits, expected)
    check_same_bytes(cache, other)
    check_same_states(cache, other)
    assert bool(states(cache)) == (name in HYBRIDS)
    chunks = [(start, min(start + CHUNK, TOKENS)) for start in range(0, TOKENS, CHUNK)]
    layers = len(cache.layers)
    assert [trip[1:] for trip in trips if trip[0] == "fetch"] == chunks * (layers + 1)
    assert [trip[1:] for trip in trips if trip[0] == "store"] == chunks * (layers + 2)  # the embedding's, too


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_padded_rows_and_whole_answers(name: str) -> None:
    """Two rows of which one is padded; `output_hidden_states` gets every layer's, none overwritten by the next."""
    ids = random_ids(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    options = {"attention_mask": mask, "output_hidden_states": True}
    answers, caches = [], []
    for place in ("device", "host"):
        with reading(place, name) as model:
            caches.append(ra.RetrievalCache(model, CONFIG))
            answers.append(model(ids, past_key_values=caches[-1], **options))
    check_same_states(*caches)
    for one, two in zip(answers[0].hidden_states, answers[1].hidden_states, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(answers[0].logits, answers[1].logits)


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_more_text_after_a_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, one that is a single chunk, a long one with a padded row: states and keys go from one to the next."""
    pieces = list(random_ids(2, 2 * TOKENS + CHUNK).split([TOKENS, CHUNK, TOKENS], dim=1))
    mask = torch.ones(2, 2 * TOKENS + CHUNK, dtype=torch.long)
    mask[0, :37] = 0
    found = []
    for place in ("device", "host"):
        with reading(place, name) as model, counted(monkeypatch) as trips:
            cache = ra.RetrievalCache(model, CONFIG)
            logits, journeys = [], []
            for piece in pieces:
                known = mask[:, : cache.get_seq_length() + piece.shape[1]]
                logits.append(model(piece, past_key_values=cache, attention_mask=known).logits)
                journeys.append(len(trips))
        assert journeys[0] == journeys[1] and (0 < journeys[1] < journeys[2]) == (place == "host")
        found.append((torch.cat(logits, dim=1), cache))
    assert torch.equal(found[0][0], found[1][0])
    check_same_bytes(found[0][1], found[1][1])
    check_same_states(found[0][1], found[1][1])


def test_a_chunk_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device says so in the middle of the second layer: what was stored stays, the rest goes on in halves."""
    ids = random_ids(1, TOKENS)
    expected, _ = logits_and_cache("llama", "device", ids)
    calls = 0

    def refuse(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with reading("host") as model, hooked(model.model.layers[1].mlp, refuse), counted(monkeypatch) as trips:
        cache = ra.RetrievalCache(model, CONFIG)
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    assert ("fetch", 2 * CHUNK, 3 * CHUNK) in trips and ("fetch", 2 * CHUNK, 2 * CHUNK + CHUNK // 2) in trips
    torch.testing.assert_close(logits, expected)


def test_short_prompts_and_tokens_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is one chunk, or a token after a context, has nothing to put away."""
    with reading("host") as model, counted(monkeypatch) as trips:
        cache = ra.RetrievalCache(model, CONFIG)
        model(random_ids(1, CHUNK), past_key_values=cache)
        model(random_ids(1, 1), past_key_values=cache)
        assert not trips
        model(random_ids(1, 2 * CHUNK), past_key_values=cache)
        assert trips


def test_models_that_cannot_keep_them_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown module next to the layers may read hidden states: they stay on the device even if they do not fit."""

    def tight(*sizes: Any, hidden_movable: bool) -> DeviceLayout:
        return DeviceLayout(True, 1) if hidden_movable else DeviceLayout()

    monkeypatch.setattr(hidden_states, "reading_layout", tight)
    model: Any = build_model("llama")
    model.model.adapter = torch.nn.Linear(1, 1)
    ra.enable(model, CONFIG, prefill_chunk=CHUNK)
    with torch.no_grad():
        assert "adapter" in (why_not_on_host(model) or "")
        with counted(monkeypatch) as trips:
            model(random_ids(1, TOKENS), past_key_values=ra.RetrievalCache(model, CONFIG))
        assert not trips
        del model.model.adapter
        with counted(monkeypatch) as trips:
            model(random_ids(1, TOKENS), past_key_values=ra.RetrievalCache(model, CONFIG))
        assert trips


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_of_before_a_chunk_is_put_back(name: str) -> None:
    """The device's memory ends behind a layer's mixer: its state has gone ahead, and comes back with half the chunk."""
    ids = random_ids(1, TOKENS)
    answers = []
    for place in ("device", "host"):
        calls: list[int] = []

        def refuse(module: Any, args: Any, calls: list[int] = calls) -> None:
            calls.append(args[0].shape[1])
            if len(calls) == 3:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

        with reading(place, name) as model:
            expected = model(ids, past_key_values=ra.RetrievalCache(model, CONFIG)).logits
            layer = next(one for one in model.model.layers if not hasattr(one, "self_attn"))
            with hooked(layer.feed_forward if name == "lfm2" else layer.mlp, refuse):
                cache = ra.RetrievalCache(model, CONFIG)
                answers.append((model(ids, past_key_values=cache).logits, cache))
        assert calls[:4] == [CHUNK, CHUNK, CHUNK, CHUNK // 2]
    torch.testing.assert_close(answers[0][0], expected)
    assert torch.equal(answers[0][0], answers[1][0])
    check_same_states(answers[0][1], answers[1][1])


@pytest.mark.parametrize(("layout", "alone"), [(DeviceLayout(True, 1), [True] * 4), (DeviceLayout(True), [False] * 2)])
def test_keys_have_left_when_a_state_begins(
    layout: DeviceLayout, alone: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not beside what such a layer computes, where the device holds one layer's at a time."""
    waits: list[bool] = []
    own = Traffic.make_room

    def noted(self: Traffic, alone: bool = False, **options: Any) -> float:
        waits.append(alone)
        return own(self, alone, **options)

    monkeypatch.setattr(Traffic, "make_room", noted)
    with reading("device", "qwen3_5_text") as model:
        monkeypatch.setattr(hidden_states, "reading_layout", lambda *given, **named: layout)
        model(random_ids(1, TOKENS), past_key_values=ra.RetrievalCache(model, CONFIG), logits_to_keep=1)
    assert waits == alone


def test_layers_compute_where_their_chunks_go() -> None:
    """Breaks if what leaves a GPU is waited for on the host, because hidden states lie there."""
    held = hidden_states.HiddenStates(build_model("llama"))
    assert held.computed_on(torch.zeros(1, device="meta")).type == "meta"
    held._forward.ferry = Ferry(torch.device("meta"), TOKENS)
    assert held.computed_on(torch.zeros(1)).type == "meta"


def test_a_failed_reading_leaves_nothing_behind() -> None:
    """After an error in a layer the next prompt is read as ever."""
    ids = random_ids(1, TOKENS)
    expected, _ = logits_and_cache("llama", "device", ids)

    def fail(module: Any, args: Any) -> None:
        raise ValueError("no")

    with reading("host") as model:
        with hooked(model.model.layers[1].mlp, fail), pytest.raises(ValueError, match="no"):
            model(ids, past_key_values=ra.RetrievalCache(model, CONFIG))
        logits = model(ids, past_key_values=ra.RetrievalCache(model, CONFIG), logits_to_keep=1).logits
    assert torch.equal(logits, expected)


@pytest.mark.cuda
def test_the_device_holds_chunks_only() -> None:
    """bfloat16 on a GPU: the same bits as with hidden states there, and a peak that does not grow by them: of 32,768
    tokens more, 192 MiB. What else a prompt holds on the GPU grows as much in both places.
    """
    model: Any = build_model("llama", hidden_size=3072, num_hidden_layers=3, max_position_embeddings=131072)
    model.to("cuda", torch.bfloat16)
    config = CONFIG.replace(prefill_chunk=2048)
    grown, answers = {}, {}
    for place in ("device", "host"):
        peaks = dict.fromkeys((32768, 65536), 1 << 60)
        for tokens in (
            *peaks,
            *peaks,
            *peaks,
        ):  # what is copied beside layers is freed sooner or later: the least counts
            ids = random_ids(1, tokens).to("cuda")
            ra.enable(model, config)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            cache = ra.RetrievalCache(model, config)
            with torch.no_grad(), hidden_in(place):
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits.cpu()
            torch.cuda.synchronize()
            peaks[tokens] = min(peaks[tokens], torch.cuda.max_memory_allocated() - before)
            ra.disable(model)
            if tokens == 32768:
                answers[place] = logits, cache
        grown[place] = peaks[65536] - peaks[32768]
    assert torch.equal(answers["device"][0], answers["host"][0])
    check_same_bytes(answers["device"][1], answers["host"][1])
    assert grown["device"] - grown["host"] >= 0.95 * 32768 * 3072 * 2, grown


@pytest.mark.cuda
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_on_a_gpu_have_the_same_bits(name: str) -> None:
    """Masks and positions are made where hidden states lie, and used where layers compute."""
    model: Any = new_model(name).to("cuda")
    ids = random_ids(2, TOKENS).to("cuda")
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    found = []
    with torch.no_grad():
        for place in ("device", "host"):
            config = CONFIG.replace(prefill_chunk=CHUNK)
            ra.enable(model, config)
            cache = ra.RetrievalCache(model, config)
            with hidden_in(place):
                found.append((model(ids, past_key_values=cache, attention_mask=mask).logits, cache))
            ra.disable(model)
    assert torch.equal(found[0][0], found[1][0])
    check_same_bytes(found[0][1], found[1][1])
    check_same_states(found[0][1], found[1][1])


@pytest.mark.cuda
def test_refused_page_locked_memory_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ordinary memory does the same, with one log line."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("retrieval_attn.offload.page_lock._said", set())
    monkeypatch.setattr(hidden, "register", lambda *args: "out of memory")
    ferry = Ferry(torch.device("cuda", 0), 1000)
    like = torch.randn(2, 1, 64, device="cuda")
    states = ferry.empty(like)
    again = ferry.empty(like)
    assert not states.is_pinned() and len(caplog.records) == 1 and "ulimit -l" in caplog.text
    rows = torch.randn(2, 1000, 64, device="cuda")
    for start in range(0, 1000, 300):
        ferry.store(states, start, min(start + 300, 1000), rows[:, start : start + 300])
    for start in range(0, 1000, 300):
        part = ferry.fetch(states, start, min(start + 300, 1000))
        ferry.store(again, start, min(start + 300, 1000), 2 * part)
    ferry.finish()
    assert torch.equal(again, 2 * rows.cpu())
    ferry.close()
