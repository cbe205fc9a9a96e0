"""Rotary factors that change with the length of the text: answers are those of the model's own forward over all of it.

LongRoPE: each token is the likeliest one of a forward over the whole text so far. Dynamic NTK: the whole prompt in one
forward, then transformers' own decoding. Texts, cuts and switches are random.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import retrieval_attn as ra
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.model.rope import length_rope
from retrieval_attn.offload.queries import SPAN, TrainingQueries
from retrieval_attn.runner.rows import step
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.audit import check_engine
from tests.tiny_models import VOCABULARY, build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled", "one_thread")

SWITCH = 100
CONFIG = ra.Config(sink=4, window=16, retrieve="all", prefill_chunk=32, threads=1)
FACTORS: dict[str, Any] = {
    "short_factor": [1.0] * 8,
    "long_factor": [1.5 + step for step in range(8)],
    "original_max_position_embeddings": SWITCH,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": SWITCH}),
    "longrope": ("llama", {"rope_parameters": LONG}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
}
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROPERTY = settings(max_examples=6, suppress_health_check=list(HealthCheck), print_blob=True)
kinds, counts = st.sampled_from(list(MODELS)), st.integers(1, 12)
TEXT = random_ids(1, 400, seed=11)[0].tolist()


@functools.cache
def plain(kind: str) -> Any:
    """The model with transformers' own attention, which no cache of ours has seen."""
    name, changes = MODELS[kind]
    return build_model(name, **changes)


@functools.cache
def llm_of(kind: str) -> Any:
    model = copy.deepcopy(plain(kind))
    model.generation_config.eos_token_id = []  # no answer ends early
    return SimpleNamespace(model=model, tokenizer=number_tokenizer(VOCABULARY), config=CONFIG)


@torch.no_grad()
def expected(kind: str, prompt: list[int], count: int) -> list[int]:
    model, ids = copy.deepcopy(plain(kind)), torch.tensor([prompt])
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache).logits
        for _ in range(count - 1):
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            logits = model(ids[:, -1:], past_key_values=cache).logits
        return [*ids[0, len(prompt) :].tolist(), int(logits[0, -1].argmax())]
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def context_of(kind: str) -> ra.Context:
    llm = llm_of(kind)
    return ra.Context(llm.model, llm.tokenizer, CONFIG)


@PROPERTY
@given(kinds, st.integers(2, 130), st.lists(st.integers(1, 60), max_size=2), st.integers(1, 40), counts, st.booleans())
def test_contexts(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    first: int,
    more: list[int],
    asked: int,
    count: int,
    saved: bool,
) -> None:
    """Read, extended, forked, saved and opened again, asked twice, and asked several questions at once."""
    context, end = context_of(kind).read(TEXT[:first], progress=False), first
    store = tmp_path_factory.mktemp("store") if saved else None
    for number, tokens in enumerate(more):
        if store is not None:
            context.save("it", store=store)
            context = context_of(kind).open("it", store=store, progress=False)
        other = context.fork()
        context.extend(TEXT[end : end + tokens], progress=False)
        if number == 0:
            assert other.continue_with([7], max_new_tokens=1).tokens == expected(kind, [*TEXT[:end], 7], 1)
        end += tokens
    if store is not None:
        context.save("it", store=store)
        context = context_of(kind).open("it", store=store, progress=False)
    prompt = TEXT[: end + asked]
    want = expected(kind, prompt, count)
    assert context.continue_with(TEXT[end : end + asked], max_new_tokens=count).tokens == want
    assert context.fork().continue_with(TEXT[end : end + asked], max_new_tokens=count).tokens == want
    questions = ["5 6 7", "8 " * asked]
    together = context.ask_many(questions, raw=True, max_new_tokens=count)
    for question, answer in zip(questions, together, strict=True):
        ids = context.template.question_ids(question, True)
        assert answer.tokens == expected(kind, [*TEXT[:end], *ids], count)


@PROPERTY
@given(kinds, st.lists(st.integers(1, 70), min_size=2, max_size=4), st.data(), st.booleans())
def test_engines(kind: str, lengths: list[int], data: st.DataObject, reuse: bool) -> None:
    """Prompts in parts that share their first ones, whatever the length of the whole; several rows at once."""
    parts, end = [], 0
    for length in lengths:
        parts.append(tuple(TEXT[end : end + length]))
        end += length
    wanted = data.draw(st.lists(st.tuples(st.integers(1, len(parts)), counts), min_size=2, max_size=4))
    with Engine(llm_of(kind), cache_generated=reuse) as engine:
        for together in (wanted, wanted[:2]):
            tickets = [engine.submit(Request(tuple(parts[:some]), count)) for some, count in together]
            for (some, count), ticket in zip(together, tickets, strict=True):
                prompt, found = [token for part in parts[:some] for token in part], ticket.result()
                assert found.error is None and list(found.tokens) == expected(kind, prompt, count), (some, count)
                turn = (*parts[:some], found.tokens, (5, 6, 7))
                again = engine.submit(Request(turn, 3)).result()
                assert list(again.tokens) == expected(kind, [*prompt, *found.tokens, 5, 6, 7], 3)
        check_engine(engine)


@PROPERTY
@given(kinds, st.integers(2, 130), counts, st.integers(1, 30), st.booleans())
def test_generate(kind: str, first: int, count: int, more: int, ours: bool) -> None:
    """`model.generate` with a RetrievalCache, by transformers' loop and by ours; a second turn on the same cache."""
    llm = llm_of(kind)
    ra.enable(llm.model, CONFIG)
    cache = ra.RetrievalCache(llm.model, CONFIG)
    how: dict[str, Any] = {"custom_generate": ra.generate} if ours else {}
    prompt = TEXT[:first]
    for turn in range(2):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
        found = llm.model.generate(ids, attention_mask=torch.ones_like(ids), **options, **how)[
            0, len(prompt) :
        ].tolist()
        if not (turn and kind == "dynamic" and more == 0):
            assert found == expected(kind, prompt, count), turn
        prompt = [*prompt, *found, *TEXT[200 : 200 + more]]
    ra.disable(llm.model)


def test_a_text_that_crosses_is_read_again_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    context = context_of("phi3").read(TEXT[:90], progress=False)
    with caplog.at_level(logging.WARNING, "retrieval_attn"):
        context.continue_with(TEXT[90:95], max_new_tokens=2)
        assert not caplog.records
        context.continue_with(TEXT[90:120], max_new_tokens=2)
    [line] = caplog.messages
    assert "reading 90 tokens again: a text of 120 tokens has other rotary factors" in line and "100" in line


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_plain_forward_over_keys_with_other_factors_is_refused(kind: str) -> None:
    """Its cache does not know the tokens; the cache is as it was. Logits of the whole text in one forward are exact."""
    llm = llm_of(kind)
    ra.enable(llm.model, CONFIG)
    cache, ids = ra.RetrievalCache(llm.model, CONFIG), torch.tensor([TEXT[:150]])
    llm.model(ids[:, :90], past_key_values=cache)
    with pytest.raises(ra.CacheMismatchError, match=r"rotary factors.*cache\.reset\(\)"):
        llm.model(ids[:, 90:], past_key_values=cache)
    assert cache.get_seq_length() == 90
    cache.reset()
    found = llm.model(ids, past_key_values=cache).logits
    torch.testing.assert_close(found, copy.deepcopy(plain(kind))(ids).logits, atol=1e-4, rtol=1e-4)
    ra.disable(llm.model)


@torch.no_grad()
def test_embeddings_cannot_be_read_again() -> None:
    """Their token ids are not known: by name, and not by a wrong answer."""
    llm = llm_of("phi3")
    ra.enable(llm.model, CONFIG)
    embeds = llm.model.get_input_embeddings()(torch.tensor([TEXT[:98]]))
    options: dict[str, Any] = {"inputs_embeds": embeds, "max_new_tokens": 8, **GREEDY}
    for how in ({}, {"custom_generate": ra.generate}):
        with pytest.raises(ra.CacheMismatchError, match="whole text"):
            llm.model.generate(attention_mask=torch.ones(1, 98, dtype=torch.long), **options, **how)
    ra.disable(llm.model)


def test_dynamic_ntk_has_no_longest_text(tmp_path: Path) -> None:
    """Nothing is refused beyond max_position_embeddings; a plan does not refuse it, either."""
    llm = llm_of("dynamic")
    assert ra.RetrievalCache(llm.model, CONFIG).max_positions is None
    assert ra.plan(llm.model, context=4 * SWITCH).shape.max_positions is None
    with Engine(llm) as engine:
        found = engine.submit(Request(tuple(TEXT[:180]), 4)).result()
    assert list(found.tokens) == expected("dynamic", TEXT[:180], 4)


def test_an_answer_does_not_depend_on_longer_texts_before_it() -> None:
    """Dynamic NTK in transformers keeps the factors of the longest text so far."""
    llm = llm_of("dynamic")
    model = copy.deepcopy(plain("dynamic"))
    rope = length_rope(model)
    assert rope is not None and rope.kind == "dynamic"
    ids = torch.tensor([TEXT[:SWITCH]])
    with torch.no_grad():
        before = model(ids).logits
        model(torch.tensor([TEXT[:300]]))
        assert torch.equal(model(ids).logits, before)
    with Engine(llm) as engine:
        tickets = [engine.submit(Request(tuple(TEXT[:length]), 6)) for length in (300, 100, 140, 99)]
        for length, ticket in zip((300, 100, 140, 99), tickets, strict=True):
            assert list(ticket.result().tokens) == expected("dynamic", TEXT[:length], 6)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_one_step_cross_by_themselves(kind: str) -> None:
    """`step`: a row that passes the switch is read again; its neighbours are not, and all are exact."""
    llm = llm_of(kind)
    rows = [98, 120, 60]
    caches = [context_of(kind).read(TEXT[:length], progress=False).cache for length in rows]
    wanted = [expected(kind, TEXT[:length], 6) for length in rows]
    found = [want[:1] for want in wanted]
    for number in range(5):
        tokens = [own[-1] for own in found]
        logits = step(llm.model, caches, tokens, [length + number for length in rows])
        for own, token in zip(found, logits.argmax(-1).tolist(), strict=True):
            own.append(token)
    assert found == wanted


@pytest.mark.parametrize(("kind", "tokens"), [("phi3", 90), ("phi3", 140), ("dynamic", 140)])
@torch.no_grad()
def test_training_queries_are_moved_with_the_factors_of_their_text(kind: str, tokens: int) -> None:
    """Though decoding happens beyond the switch: a query moved by d is the one whose keys are d nearer."""
    model = copy.deepcopy(plain(kind))
    assert length_rope(model) is not None
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    place, token = torch.arange(tokens)[None], torch.randn(1, 6, 1, 16).expand(-1, -1, tokens, -1)
    cos, sin = rotary(token, place)
    frequencies, sample = rotary.inv_freq, TrainingQueries(tokens, 20)
    sample.take(apply(token, token, cos, sin)[0], 0)
    moved = sample.on_device(model, attention, 0, None)
    angles = torch.arange(tokens, tokens + SPAN)[:, None].float() * frequencies
    there = torch.cat([angles, angles], dim=-1)
    tables = [table[None] * rotary.attention_scaling for table in (there.cos(), there.sin())]
    after = token[:, :, :1].expand(-1, -1, SPAN, -1)
    turned = apply(after, after, *tables)[0]
    assert torch.cdist(moved, turned[0]).amin(-1).max() < 1e-2 * float(token.norm(dim=-1).max())
