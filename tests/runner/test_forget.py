"""Context.forget: what is forgotten is attended to no more, as if the text had been read and then cut."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.attention.sequence import Forgotten
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import (
    CacheMismatchError,
    ConfigError,
    ContextLengthError,
    InputDataError,
    UnsupportedModelError,
)
from retrieval_attn.gpu.attention.window import sinks_of
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import forward
from retrieval_attn.runner.forget import _rotations_of, forget_tokens
from retrieval_attn.saving.sequence import path_from_states, path_state
from tests.model.test_hybrid import new_model
from tests.tiny_models import BASE, QUESTION, Loaded, build_model, config_of, needle_text, random_ids, tiny_model

TOKENS, START, STOP = 300, 5, 170
CONFIG = ra.Config(sink=8, window=32, retrieve="all", index="flat")


def read(model: Any, ids: Tensor, config: ra.Config = CONFIG) -> Any:
    """A cache of ids (1, n)."""
    cache = ra.RetrievalCache(model, config)
    feed(model, cache, ids)
    return cache


def feed(model: Any, cache: ra.RetrievalCache, ids: Tensor) -> Tensor:
    """Logits (1, vocabulary) after ids (1, n) more, which stand at the positions that the cache counts."""
    first = cache.get_seq_length()
    with torch.no_grad(), using_retrieval(model, 64):
        return forward(model, cache, ids, mask=None, position_ids=torch.arange(first, first + ids.shape[1])[None])


def turned(model: Any, layer: int, keys: Tensor, by: int) -> Tensor:
    """Keys (1, heads, n, head_dim), after RoPE, as if they stood `by` positions later: written out, in float64."""
    rotary = model.model.rotary_emb
    kind = getattr(model.config, "layer_types", None)
    named = getattr(rotary, f"{kind[layer]}_inv_freq", None) if kind else None
    angle = by * (rotary.inv_freq if named is None else named).double()
    half = keys.shape[3] // 2
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    moved = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([moved.real, moved.imag], dim=3)


def in_full(model: Any, ids: Tensor) -> Any:
    """transformers' own cache after ids, all keys of all layers."""
    full = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=full, use_cache=True)
    return full


def embedded_anew(model: Any, ids: Tensor, start: int, stop: int) -> Any:
    """Keys and values of transformers' own cache after ids, but for [start, stop); what follows moves up."""
    full = in_full(model, ids)
    cut = DynamicCache()
    for number, layer in enumerate(full.layers):
        key, value = layer.keys, layer.values
        moved = turned(model, number, key[:, :, stop:], start - stop).to(key.dtype)
        cut.update(
            torch.cat([key[:, :, :start], moved], dim=2),
            torch.cat([value[:, :, :start], value[:, :, stop:]], dim=2),
            number,
        )
    return cut


def continued(model: Any, cache: DynamicCache, pieces: list[Tensor]) -> list[Tensor]:
    """Logits after each of the pieces, by transformers."""
    with torch.no_grad():
        return [model(input_ids=one, past_key_values=cache, use_cache=True).logits[:, -1].float() for one in pieces]


def pieces_of(seed: int, *sizes: int) -> list[Tensor]:
    return list(random_ids(1, sum(sizes), seed).split(list(sizes), dim=1))


def assert_near(got: list[Tensor], expected: list[Tensor], relative: float = 2e-5) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert float((mine - theirs).abs().max()) <= relative * float(theirs.abs().max())


MODELS = ("llama", "llama31", "yi", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss")


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "retrieval"])
@pytest.mark.parametrize("name", MODELS)
def test_forgetting_equals_a_cache_whose_keys_are_embedded_anew(name: str, exact: bool) -> None:
    """A question of 12 tokens, single tokens over several spills, and another turn, against transformers."""
    model, ids = tiny_model(name), random_ids(1, TOKENS)
    pieces = pieces_of(1, 12, *[1] * 60, 9, 1)
    cache = read(model, ids, CONFIG.replace(question_attention="exact" if exact else "retrieval"))
    unforgotten = feed(model, cache.fork(), pieces[0])
    forget_tokens(cache, model, START, STOP)
    got = [feed(model, cache, one) for one in pieces]
    expected = continued(model, embedded_anew(model, ids, START, STOP), pieces)
    assert_near(got, expected)
    assert float((unforgotten - got[0]).abs().max()) > 1e-3 * float(got[0].abs().max()), "forgetting changed nothing"


@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3", "gemma4", "gpt_oss"])
def test_sliding_layers_forget_what_lies_in_their_window(name: str) -> None:
    """Their window reaches over what is forgotten, to the sinks, which leave it later; twice, then cropped."""
    model, ids = build_model(name, sliding_window=200), random_ids(1, TOKENS)
    cache = read(model, ids)
    forget_tokens(cache, model, START + 2, STOP - 60)
    forget_tokens(cache, model, START, STOP)
    pieces = pieces_of(1, 12, *[1] * 70, 9, 1)
    got = [feed(model, cache, one) for one in pieces]
    assert_near(got, continued(model, embedded_anew(model, ids, START, STOP), pieces))
    cache.crop(-40)
    again = pieces_of(2, 1, 5)
    assert_near(
        [feed(model, cache, one) for one in again],
        continued(model, embedded_anew(model, ids, START, STOP), [torch.cat(pieces, 1)[:, :-40], *again])[1:],
    )


def test_distances_of_attention_are_those_of_a_text_without_the_forgotten_tokens() -> None:
    """In float64, rotary tables too: the total variation of every head's attention is below 1e-12."""
    model, ids = build_model("llama").double(), random_ids(1, TOKENS)
    model.model.rotary_emb = Rotary64(16, 10_000.0)
    pieces = pieces_of(1, 12, 1)
    cache = read(model, ids)
    forget_tokens(cache, model, START, STOP)
    forget_tokens(cache, model, START - 1, STOP + 40)
    seen: dict[int, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        layer.on_attention = lambda record, number=number: seen.__setitem__(number, record.query)
    feed(model, cache, pieces[0])
    full = in_full(model, ids)
    gap = STOP + 40 - (START - 1)
    for number, query in seen.items():
        held = cache.layers[number].held
        sinks, live = sinks_of(held.window)[0], full.layers[number].keys[:, :, STOP + 40 :]
        assert sinks.dtype == torch.float64 and sinks.shape[2] == START - 1
        # of both sides from the same hidden states, which the cache's own float32 parts have rounded
        anew = torch.cat([held.unturned_sinks, turned(model, number, live, -gap)], dim=2)
        expected = weights_of(turned(model, number, query, -gap), anew)
        found = weights_of(query, torch.cat([sinks, live], dim=2))
        assert float((found - expected).abs().sum(dim=-1).max()) / 2 < 1e-12
        unturned = weights_of(query, torch.cat([held.unturned_sinks, live], dim=2))
        assert float((unturned - expected).abs().sum(dim=-1).max()) / 2 > 1e-3


class Rotary64(nn.Module):
    """A rotary embedding whose tables are exact to float64."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.inv_freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None].double() * self.inv_freq
        both = torch.cat([angles, angles], dim=2)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def weights_of(query: Tensor, keys: Tensor) -> Tensor:
    """Softmax of query (1, q_heads, n, head_dim) over all keys (1, kv_heads, m, head_dim), float64."""
    repeated = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    return torch.softmax(query @ repeated.transpose(2, 3) * query.shape[3] ** -0.5, dim=-1)


def test_forgetting_twice_is_as_forgetting_once() -> None:
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    once, twice = read(model, ids), read(model, ids)
    forget_tokens(once, model, START, STOP)
    for span in ((START + 3, 60), (START + 3, 61), (START, STOP), (START, STOP)):
        forget_tokens(twice, model, *span)
    assert once.batch.forgotten == twice.batch.forgotten == Forgotten(START, STOP)
    pieces = pieces_of(1, 12, 1, 1)
    for one in pieces:
        assert torch.equal(feed(model, once, one), feed(model, twice, one))


def test_forks_forget_for_themselves_and_share_the_rest() -> None:
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read(model, ids)
    before, other = read(model, ids), cache.fork()
    forget_tokens(other, model, START, STOP)
    later = other.fork()
    assert cache.batch.forgotten == Forgotten() and later.batch.forgotten == Forgotten(START, STOP)
    assert cache.batch.hosts(0)[0].segments == other.batch.hosts(0)[0].segments
    for one in pieces_of(1, 12, 1, 1):
        assert torch.equal(feed(model, cache, one), feed(model, before, one))
        assert torch.equal(feed(model, other, one), feed(model, later, one))


def test_a_crop_behind_what_is_forgotten_reads_its_window_again() -> None:
    """To a few tokens behind `stop`, where the window of before has moved on; farther back is refused."""
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read(model, ids)
    forget_tokens(cache, model, START, STOP)
    cache.crop(STOP + 7 - TOKENS)
    assert cache.get_seq_length() == STOP + 7
    pieces = pieces_of(1, 12, *[1] * 50)
    got = [feed(model, cache, one) for one in pieces]
    assert_near(got, continued(model, embedded_anew(model, ids[:, : STOP + 7], START, STOP), pieces))
    with pytest.raises(CacheMismatchError, match="forgotten"):
        cache.crop(-70)
    cache.crop(-cache.get_seq_length())
    assert cache.batch.forgotten == Forgotten() and cache.get_seq_length() == 0


def test_rows_that_go_apart_keep_what_is_forgotten() -> None:
    """As several questions in one batch do: padding behind what is forgotten, and rows in another order."""
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read(model, ids, CONFIG.replace(sink=4))
    forget_tokens(cache, model, 4, STOP)
    rows = cache.fork()
    rows.batch_repeat_interleave(3)
    rows.reorder_cache(torch.tensor([2, 0, 1]))
    [question] = pieces_of(1, 12)
    with torch.no_grad(), using_retrieval(model, 64):
        place = torch.arange(TOKENS, TOKENS + 12)[None].expand(3, -1)
        logits = forward(model, rows, question.expand(3, -1), mask=None, position_ids=place)
    assert_near([logits], [feed(model, cache, question).expand(3, -1)])


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ((9, 100), "a larger sink"),
        ((-1, 100), "start must lie in 0 .. 8"),
        ((8, 8), "before stop"),
        ((8, TOKENS - 31), "the window holds the last"),
        ((8.0, 100), "whole number"),
        ((8, True), "whole number"),
    ],
)
def test_other_tokens_are_refused_by_name(span: Any, said: str) -> None:
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read(model, ids)
    with pytest.raises(ConfigError, match=said):
        forget_tokens(cache, model, *span)
    assert cache.batch.forgotten == Forgotten()


def test_forgotten_tokens_stay_forgotten() -> None:
    model = tiny_model("llama")
    cache = read(model, random_ids(1, TOKENS))
    forget_tokens(cache, model, START, STOP)
    for span, said in (((START + 1, STOP + 1), "an earlier call left"), ((START, STOP - 1), "forgotten already")):
        with pytest.raises(ConfigError, match=said):
            forget_tokens(cache, model, *span)


def test_what_is_forgotten_makes_room_for_as_many_positions() -> None:
    model, ids = build_model("llama", max_position_embeddings=TOKENS + 10), random_ids(1, TOKENS)
    cache = read(model, ids)
    pieces = pieces_of(1, 20, 1)
    with pytest.raises(ContextLengthError):
        feed(model, cache.fork(), pieces[0])
    forget_tokens(cache, model, START, STOP)
    got = [feed(model, cache, one) for one in pieces]
    assert_near(got, continued(model, embedded_anew(model, ids, START, STOP), pieces))
    with pytest.raises(ContextLengthError):
        cache.require_room(10 + STOP - START - 21 + 1)
    cache.require_room(10 + STOP - START - 21)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("phi3", {}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_whose_positions_are_of_another_kind_are_refused(name: str, changes: Any, said: str) -> None:
    model = build_model(name, **changes)
    cache = read(model, random_ids(1, TOKENS))
    with pytest.raises(UnsupportedModelError, match=said):
        forget_tokens(cache, model, START, STOP)
    assert cache.batch.forgotten == Forgotten()


def test_layers_with_a_state_cannot_forget() -> None:
    model = new_model("qwen3_next")
    cache = read(model, random_ids(1, 100))
    with pytest.raises(UnsupportedModelError, match="state"):
        forget_tokens(cache, model, START, 40)


def test_what_positions_do_is_seen_and_not_assumed() -> None:
    """SmolLM3 turns the keys of some layers only; GPT-2 adds positions to its hidden states."""
    options = {**BASE, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "attention_bias": False}
    model = AutoModelForCausalLM.from_config(config_of("smollm3", **options), attn_implementation="eager").eval()
    ids = random_ids(1, TOKENS)
    cache = read(model, ids)
    forget_tokens(cache, model, START, STOP)
    rotated = _rotations_of(model)
    assert [rotated[number] is not None for number in range(4)] == [True, False, True, False]
    other = AutoModelForCausalLM.from_config(
        config_of("gpt2", vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=4096), attn_implementation="eager"
    ).eval()
    cache = read(other, ids)
    with pytest.raises(UnsupportedModelError, match="do not depend on positions by a rotary"):
        forget_tokens(cache, other, START, STOP)


def test_a_context_forgets_and_counts_what_is_left(loaded: Loaded) -> None:
    """The bundled model finds a number that stays and no longer one that is forgotten; questions in one batch, too."""
    text = needle_text(6000)
    config = ra.Config(sink=16, window=64, retrieve=50, prefill_chunk=512)
    context = ra.Context(*loaded, config).read(text)
    fork, tokens = context.fork(), context.num_tokens
    assert context.forget(16, 200) is context
    assert context.num_tokens == tokens - 184 and fork.num_tokens == tokens
    for append in ("exact", "retrieval"):
        answer = context.ask(QUESTION, max_new_tokens=16, question_attention=append)
        assert "7391846" in answer.text and answer.stats.context_tokens == context.num_tokens
    questions = [QUESTION, "Which number?"]
    together = [one.tokens for one in context.ask_many(questions, max_new_tokens=12)]
    assert together == [context.ask(question, max_new_tokens=12).tokens for question in questions]
    context.forget(16, tokens - 100)
    assert "7391846" not in context.ask(QUESTION, max_new_tokens=16).text
    assert "7391846" in fork.ask(QUESTION, max_new_tokens=16).text
    context.extend(" The special magic Turin number is: 1112223. ")
    assert "1112223" in context.ask("What is the special magic Turin number?", max_new_tokens=16).text
    with pytest.raises(InputDataError, match="empty"):
        ra.Context(*loaded, config).forget(0, 4)


def test_segments_of_forgotten_tokens_are_released_where_nobody_else_has_them() -> None:
    """After a fork that is gone the context goes on in a second segment; the first is forgotten as a whole."""
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    config = CONFIG.replace(retrieve=20, question_attention="exact")
    cache = read(model, ids, config)
    fork = cache.fork()
    feed(model, cache, pieces_of(3, 400)[0])
    path = cache.batch.hosts(1)[0]
    assert [len(one.keys[0]) >= one.length for one in path.segments] == [True, True]
    held, first = cache.host_nbytes, weakref.ref(path.segments[0].keys.base)
    assert fork.batch.hosts(1)[0].segments[0] is path.segments[0]
    forget_tokens(cache, model, START, TOKENS - 1)
    assert path.segments[0] is fork.batch.hosts(1)[0].segments[0], "not all of it is forgotten"
    forget_tokens(cache, model, START, TOKENS + 10)
    forget_tokens(cache, model, START, TOKENS + 20)
    assert path.segments[0].is_hole and len(path) == TOKENS + 400
    assert cache.host_nbytes <= held - 2 * TOKENS * path.token_bytes
    assert torch.equal(*(feed(model, one, ids[:, :3]) for one in (fork.fork(), read(model, ids, config))))
    assert first() is not None
    other = SequenceKV(path.num_kv_heads, path.head_dim, path.value_dim, path.fmt)
    plain, arrays = path_state(path, 0)
    path_from_states([(plain, {name: array.copy() for name, array in arrays.items()})], other, None)
    assert other.segments[0].is_hole
    queries = np.random.default_rng(0).standard_normal((6, 1, path.head_dim), np.float32)
    one, two = (attend_path(own, queries, TOKENS + 20, TOKENS + 300, 20, scale=0.2) for own in (path, other))
    assert np.array_equal(one.out, two.out)
    pieces = pieces_of(4, 12, 1)
    got = [feed(model, cache, piece) for piece in pieces]
    del fork, one, two
    whole = read(model, ids, config)
    feed(model, whole, pieces_of(3, 400)[0])
    kept = whole.fork()  # its segment is another's, too
    forget_tokens(whole, model, START, TOKENS + 20)
    assert_near(got, [feed(model, whole, piece) for piece in pieces])
    del kept, cache, path, other
    gc.collect()
    assert first() is None, "somebody still holds the memory"
