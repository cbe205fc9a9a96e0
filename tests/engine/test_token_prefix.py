"""Prompts that share tokens with a cached one up to any token: cropped entries, one read, exact bytes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.attention.cache import seal
from retrieval_attn.engine import prefix_handle
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.request import Finished
from retrieval_attn.runner.rows import step
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.emulation.emulated import emulated
from tests.engine.audit import check_engine
from tests.engine.test_reuse import CONFIG, SHARED, Session, ids, llm_of, read_counts, request
from tests.model.test_hybrid import new_model

ALL: dict[str, Any] = {"retrieve": "all", "tail": False}


@pytest.fixture(autouse=True)
def short_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 64 tokens become entries."""
    monkeypatch.setattr(prefix_handle, "LAST_TOKENS", 64)


def answer(engine: Engine, parts: Any, tokens: int = 12, **options: Any) -> Finished:
    done = engine.submit(request(parts, tokens, **options)).result()
    assert done.error is None
    return done


def alone(llm: Any, prompt: tuple[int, ...], tokens: int = 12) -> tuple[int, ...]:
    with Engine(llm, prefix_cache_bytes=0) as engine:
        return answer(engine, (prompt,), tokens).tokens


@pytest.mark.parametrize("common", [80, 301, 640])
@pytest.mark.parametrize(
    ("index", "graphs"),
    [
        *((index, False) for index in ("auto", "flat", "sketch", "roargraph", "device")),
        ("flat", True),
        ("device", True),
    ],
)
def test_a_prompt_continues_another_up_to_any_token(index: str, graphs: bool, common: int) -> None:
    """All keys are retrieved, so the answer is that of a prefill of the whole prompt, in eager steps and in graphs."""
    llm = llm_of(index=index, **ALL)
    first, second = ids(700, 1), (*ids(700, 1)[:common], *ids(150, 2))
    expected = alone(llm, first), alone(llm, second)
    steps = emulated() if graphs else nullcontext()
    with steps, Engine(llm, prefix_cache_bytes=SHARED) as engine, read_counts(llm) as read:
        assert answer(engine, (first,)).tokens == expected[0]
        del read[:]
        done = answer(engine, (second,))
        assert (done.cached_tokens, sum(read)) == (common, 150)
        assert done.tokens == expected[1]
        assert answer(engine, (first,)).tokens == expected[0]  # what the crop shares has not changed
        check_engine(engine)


def fed(session: Session, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) after each of these tokens, decoded one by one."""
    scores = []
    for token in tokens:
        scores.append(step(session._loop.model, [session._cache], [token], [len(session._held)]))
        session._held = (*session._held, token)
    return torch.log_softmax(torch.cat(scores).float(), -1)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence in nats per token."""
    return float(torch.nn.functional.kl_div(one, other, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("index", ["sketch", "roargraph", "device"])
def test_estimates_of_a_cropped_text_are_those_of_a_fresh_read(index: str) -> None:
    """Clusters are corrected for the tokens that are cut, and nothing behind the crop is found."""
    options: dict[str, Any] = {"index": index, "retrieve": 32, "tail": True}
    longer, fresh, exact = Session(llm_of(**options)), Session(llm_of(**options)), Session(llm_of(**ALL))
    cropped, kept = Session(llm_of(**options)), 1203
    longer.turn((ids(1400, 1),), 1)
    for session in (fresh, exact):
        session.turn((ids(1400, 1)[:kept],), 1)
    seal(longer._cache)
    cropped._cache, cropped._held = longer._cache.fork(), longer._held[:kept]
    cropped._cache.crop(kept - longer._cache.get_seq_length())
    for session in (cropped, fresh, exact):
        session.turn((ids(90, 2),), 1)
    found, expected, right = (fed(session, ids(24, 3)) for session in (cropped, fresh, exact))
    assert divergence(found, right) <= 1.5 * divergence(expected, right) + 1e-6
    # as two estimates from clusters of different texts: their errors add up
    assert divergence(found, expected) <= divergence(found, right) + divergence(expected, right)


def test_a_generated_answer_is_cropped_too() -> None:
    llm = llm_of(**ALL)
    prompt = ids(200, 1)
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        done = answer(engine, (prompt,), 100)
        edited = (*prompt, *done.tokens[:71], *ids(30, 3))
        following = answer(engine, (edited,))
        assert following.cached_tokens == 271
        assert following.tokens == alone(llm, edited)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral_sliding"])
def test_models_that_cannot_go_back_read_the_prompt(kind: str) -> None:
    """Sliding windows have dropped the keys of earlier tokens."""
    llm = llm_of(kind, **ALL)
    first, second = ids(300, 1), (*ids(300, 1)[:211], *ids(50, 2))
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (first,))
        done = answer(engine, (second,))
        assert done.cached_tokens == 0 and done.tokens == alone(llm, second)


def test_models_with_a_state_read_the_prompt() -> None:
    """A state cannot go back to an earlier token."""
    model = new_model("qwen3_next")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    llm = SimpleNamespace(model=model, tokenizer=number_tokenizer(vocabulary), config=CONFIG.replace(**ALL))
    first, second = ids(300, 1), (*ids(300, 1)[:211], *ids(50, 2))
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (first,))
        done = answer(engine, (second,))
        assert done.cached_tokens == 0 and done.tokens == alone(llm, second)


def test_several_clients_wait_for_one_read() -> None:
    """Their questions are in the part of the document, and differ: one reads it, each of the others its question."""
    llm = llm_of(**ALL)
    document = ids(900, 1)
    prompts = [(*document, *ids(9, 10 + number)) for number in range(6)]
    expected = [alone(llm, prompt) for prompt in prompts]
    with Engine(llm, prefix_cache_bytes=SHARED) as engine, read_counts(llm) as read:
        answer(engine, (document[:100],))  # a text with the same beginning is no reason to read it six times
        del read[:]
        handles = [engine.submit(request((prompt,), 12)) for prompt in prompts]
        done = [handle.result() for handle in handles]
        assert [one.tokens for one in done] == expected
        assert sorted(one.cached_tokens for one in done) == [100, *[900] * 5]
        assert sum(read) == 809 + 5 * 9
        check_engine(engine)


def test_namespaces_share_nothing() -> None:
    llm = llm_of(**ALL)
    first, second = ids(300, 1), (*ids(300, 1)[:250], *ids(50, 2))
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (first,), namespace="a")
        assert answer(engine, (second,), namespace="b").cached_tokens == 0
        assert answer(engine, (second,), namespace="a").cached_tokens == 250


@pytest.mark.parametrize("seed", range(3))
def test_random_crops_are_answered_as_alone(seed: int) -> None:
    """Prompts that branch at random tokens, several at once, in a cache that holds only some of them."""
    draw = random.Random(seed)
    llm = llm_of(**ALL)
    prompts = [ids(500, 100 + seed)]
    for number in range(14):
        base = draw.choice(prompts)
        prompts.append((*base[: draw.randrange(1, len(base))], *ids(draw.randrange(1, 200), number)))
    expected = [alone(llm, prompt, 6) for prompt in prompts]
    cached = 0
    with Engine(llm, prefix_cache_bytes=3_000_000) as engine:
        for start in range(0, len(prompts), 3):
            handles = [engine.submit(request((prompt,), 6)) for prompt in prompts[start : start + 3]]
            for handle, tokens in zip(handles, expected[start : start + 3], strict=True):
                done = handle.result()
                assert done.tokens == tokens
                cached += done.cached_tokens
            check_engine(engine)
        assert cached > 500
        assert engine._tree is not None
        sizes = engine._tree.sizes
        assert engine._tree.evict(sizes) == sizes
        assert engine._tree.sizes == Sizes()


def test_bytes_of_a_cropped_continuation_are_its_own() -> None:
    """A continuation counts the tokens behind the crop, and not the tokens that it shares."""
    llm = llm_of(index="flat", **ALL)
    first, second = ids(600, 1), (*ids(600, 1)[:400], *ids(100, 2))
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (first,))
        assert engine._tree is not None
        before = engine._tree.sizes.total
        answer(engine, (second,))
        more = engine._tree.sizes.total - before
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (second,))
        assert engine._tree is not None
        whole = engine._tree.sizes.total
    assert 0 < more < whole / 2, f"{more} bytes more, {whole} for all of its tokens"


def test_short_parts_of_a_conversation_are_read_together() -> None:
    """Messages of 40 tokens each, as one part and not as 80; the answer is that of one part."""
    llm, messages = llm_of(**ALL), [ids(40, number) for number in range(80)]
    with Engine(llm, prefix_cache_bytes=SHARED) as engine, read_counts(llm) as read:
        done = answer(engine, (*messages, ids(9, 90)))
        assert len(read) <= 60 and sum(read) == 3209, "64 tokens at a time"
        again = answer(engine, (*messages, ids(70, 91)))
        assert again.cached_tokens == 3200
    whole = tuple(token for message in messages for token in message)
    assert done.tokens == alone(llm, (*whole, *ids(9, 90)))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([9], [9]), ([9, 8], [9, 8]), ([9, 8, 7], [9, 8, 7]), ([9, 8, 7, 6], [9, 15, 6]),
        ([900, *[700] * 6, 5], [900, 2100, 2100, 5]), ([20_000, *[2100] * 4, 5], [20_000, 6300, 2100, 5]),
    ],
)  # fmt: skip
def test_joined_parts(sizes: list[int], expected: list[int]) -> None:
    parts = [np.full(size, number, np.int32) for number, size in enumerate(sizes)]
    joined = prefix_handle.joined_parts(parts)
    assert [len(part) for part in joined] == expected
    assert np.array_equal(np.concatenate(joined), np.concatenate(parts))


def test_consecutive_short_parts_get_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry has windows of its own: turns of some tokens are cropped from the entry of the turns after them."""
    monkeypatch.setattr(prefix_handle, "LAST_TOKENS", 210)
    monkeypatch.setattr(prefix_handle, "LEAST_TOKENS", 100)
    llm = llm_of(**ALL)
    turns, long = tuple(ids(20, number) for number in range(1, 7)), ids(100, 9)
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (*turns, long, *turns))
        assert engine._tree is not None
        found = engine._tree.latest(None, 99)
        assert sorted(one.end - one.marks for one in found) == [120, 320], "before the long one, up to the last part"
        following = (*turns[:5], ids(30, 8))
        done = answer(engine, following)
        assert done.cached_tokens == 100
        assert done.tokens == alone(llm, tuple(token for part in following for token in part))
        check_engine(engine)
