"""A cache that was saved and restored computes to the last bit what the one never saved computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.errors import InputDataError, StoreMismatchError
from retrieval_attn.offload.codes import SentCodes
from retrieval_attn.runner.forget import forget_tokens
from retrieval_attn.saving.layers import (
    Marks,
    file_of,
    layer_devices,
    layer_state,
    marks_of,
    restore_layer,
    restored_cache,
    saving_fork,
)
from tests.model.test_hybrid import CONFIGS as HYBRIDS
from tests.model.test_hybrid import new_model
from tests.runner.graph_cases import CONFIG
from tests.tiny_models import build_model, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("small_graphs")

States = list[tuple[dict[str, Any], dict[str, Any]] | None]
KINDS: dict[str, dict[str, Any]] = {
    "flat": {"index": "flat"},
    "auto": {"index": "auto"},
    "sketch": {"index": "sketch", "retrieve": 2},
    "roargraph": {"index": "roargraph", "retrieve": 2},
    "device": {"index": "device", "retrieve": 2, "index_options": {"key_bytes": 16}},
}
LONG = 1500
"""Tokens, of which clusters are made, and indexes are searched."""


def read(model: Any, config: ra.Config, tokens: int = LONG, seed: int = 0) -> ra.RetrievalCache:
    cache = ra.RetrievalCache(model, config, check=False)
    feed(model, cache, random_ids(1, tokens, seed))
    return cache


@torch.no_grad()
def feed(model: Any, cache: ra.RetrievalCache, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids.to(model.device), past_key_values=cache).logits
    sequence = cache.batch.sequences[0]
    cache.batch.note_ids(torch.cat([torch.tensor([sequence.token_ids.tolist()], dtype=torch.int64), ids], dim=1))
    return logits


def saved(cache: ra.RetrievalCache, since: Marks | None = None) -> States:
    """As they would come back from a disk: arrays of their own."""
    fork = saving_fork(cache)
    states: States = []
    for number in range(len(fork.layers)):
        if file_of(fork, number) is None:
            states.append(None)
            continue
        plain, arrays = layer_state(fork, number, since)
        states.append((copy.deepcopy(plain), {name: np.array(array) for name, array in arrays.items()}))
    return states


def restored(model: Any, cache: ra.RetrievalCache, nodes: list[States]) -> ra.RetrievalCache:
    """From copies: each opening maps the files anew, and insertions write to what it has mapped."""
    ids = cache.batch.sequences[0].token_ids.tolist()
    found = restored_cache(model, cache.config, cache.index.config, ids, cache.batch.forgotten)
    sent = SentCodes()
    for number, device in enumerate(layer_devices(model, len(found.layers))):
        states = copy.deepcopy([node[number] for node in nodes])
        if states[-1] is not None:
            restore_layer(found, number, device, [state for state in states if state is not None], sent)
    sent.wait()
    return found


def same_from_here(model: Any, one: ra.RetrievalCache, other: ra.RetrievalCache, tokens: int = 30) -> None:
    """A question, exactly and through the index, then tokens one by one, over the end of a window."""
    for count in (12, 3, *[1] * tokens):
        ids = random_ids(1, count, seed=count + one.get_seq_length())
        mine, others = feed(model, one, ids), feed(model, other, ids)
        assert torch.equal(mine, others)
    assert one.index_kinds() == other.index_kinds() and one.get_seq_length() == other.get_seq_length()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_every_kind_of_index(kind: str, host_dtype: str) -> None:
    """Of what was read, after more came, and of two nodes, the second of which has what came alone."""
    config = CONFIG.replace(**KINDS[kind], host_dtype=host_dtype, tail=True)
    model = ra.enable(copy.deepcopy(tiny_model("llama")), config)
    cache = read(model, config)
    first, marks = saved(cache), marks_of(saving_fork(cache))
    again = restored(model, cache, [first])
    assert again.stats().index_seconds == 0
    same_from_here(model, cache.fork(), again)
    for length in (40, 300):
        feed(model, cache, random_ids(1, length, seed=7))
    assert marks.begins(cache)
    second = saved(cache, marks)
    assert size(second) < size(first) / 2
    same_from_here(model, cache.fork(), restored(model, cache, [first, second]))


def size(states: States) -> int:
    return sum(array.nbytes for state in states if state is not None for array in state[1].values())


@pytest.mark.parametrize("dim", [64, 128])
def test_wider_heads_in_bfloat16(dim: int) -> None:
    sizes = {"head_dim": dim, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = CONFIG.replace(index="sketch", retrieve=8, tail=True)
    model = ra.enable(build_model("llama", **sizes).to(torch.bfloat16), config)
    cache = read(model, config)
    same_from_here(model, cache.fork(), restored(model, cache, [saved(cache)]))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "mistral_sliding", "gpt_oss", "qwen3_moe", "llama31"])
def test_every_family(name: str) -> None:
    """Sliding layers, learned sinks, soft caps."""
    model = ra.enable(copy.deepcopy(tiny_model(name)), CONFIG)
    cache = read(model, CONFIG, 300)
    same_from_here(model, cache.fork(), restored(model, cache, [saved(cache)]))


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_hybrids(name: str) -> None:
    """Linear attention, short convolutions, state spaces; layers without a state have no file."""
    model = ra.enable(new_model(name, initializer_range=0.2), CONFIG)
    cache = read(model, CONFIG, 120)
    states = saved(cache)
    assert sum(state is not None and state[0]["kind"] == "state" for state in states) >= 1
    same_from_here(model, cache.fork(), restored(model, cache, [states]), tokens=6)


def test_a_fork_shares_what_was_saved_and_a_crop_does_not() -> None:
    config = CONFIG.replace(index="flat", tail=True)
    model = ra.enable(copy.deepcopy(tiny_model("llama")), config)
    cache = read(model, config, 400)
    first, marks = saved(cache), marks_of(saving_fork(cache))
    fork = cache.fork()
    feed(model, fork, random_ids(1, 300, seed=5))
    assert marks.begins(fork)
    same_from_here(model, fork.fork(), restored(model, fork, [first, saved(fork, marks)]))
    cache.crop(-200)
    assert not marks.begins(cache)
    same_from_here(model, cache.fork(), restored(model, cache, [saved(cache)]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_what_was_forgotten_stays_so(name: str) -> None:
    """And more may be forgotten afterwards."""
    config = CONFIG.replace(tail=True)
    model = ra.enable(copy.deepcopy(tiny_model(name)), config)
    cache = read(model, config, 600)
    first, marks = saved(cache), marks_of(saving_fork(cache))
    forget_tokens(cache, model, config.sink, 200)
    again = restored(model, cache, [first, saved(cache, marks)])
    same_from_here(model, cache.fork(), again)
    for one in (cache, again):
        forget_tokens(one, model, config.sink, 400)
    for length in (12, 1, 1):
        ids = random_ids(1, length, seed=11)
        feed(model, cache, ids)
    assert cache.batch.forgotten == again.batch.forgotten


def test_what_cannot_be_saved_or_restored() -> None:
    model = ra.enable(copy.deepcopy(tiny_model("llama")), CONFIG)
    with pytest.raises(InputDataError, match="one sequence"):
        saving_fork(ra.RetrievalCache(model, CONFIG))
    cache = read(model, CONFIG, 100)
    several = cache.fork()
    several.batch_repeat_interleave(2)
    with pytest.raises(InputDataError, match="has 2"):
        saving_fork(several)
    states = saved(cache)
    sliding = ra.enable(copy.deepcopy(tiny_model("mistral_sliding")), CONFIG)
    with pytest.raises(StoreMismatchError, match="kind 'retrieval'"):
        restored(sliding, cache, [states])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_released_tokens_take_no_bytes(name: str) -> None:
    """The first segment is forgotten as a whole: a node of its own, as long as what is left, that can be cropped."""
    config = CONFIG.replace(index="flat", tail=True)
    model = ra.enable(build_model(name, **({"sliding_window": 400} if name == "gemma3" else {})), config)
    cache = read(model, config, 600)
    whole, marks = saved(cache), marks_of(saving_fork(cache))
    feed(model, cache, random_ids(1, 300, seed=5))
    forget_tokens(cache, model, config.sink, 610)
    assert cache.batch.hosts(1)[0].segments[0].is_hole and not marks.begins(cache)
    states = saved(cache)
    assert size(states) < size(whole)
    again = restored(model, cache, [states])
    same_from_here(model, cache.fork(), again)
    for one in (cache, fresh := restored(model, cache, [states])):
        one.crop(-270)
    same_from_here(model, cache, fresh)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["device", "sketch"])
@pytest.mark.parametrize("dim", [64, 128])
def test_four_queries_of_a_head_in_bfloat16(device: str, kind: str, dim: int) -> None:
    """Codes and clusters come back to the device as they were."""
    sizes = {"head_dim": dim, "num_attention_heads": 8, "num_key_value_heads": 2}
    options = KINDS[kind] | ({"index_options": {"key_bytes": dim // 2}} if kind == "device" else {})
    config = CONFIG.replace(**options, tail=True, graph=False)
    model = ra.enable(build_model("llama", **sizes).to(device, torch.bfloat16), config)
    cache = read(model, config)
    first, marks = saved(cache), marks_of(saving_fork(cache))
    same_from_here(model, cache.fork(), restored(model, cache, [first]))
    feed(model, cache, random_ids(1, 300, seed=7))
    fork, again = cache.fork(), restored(model, cache, [first, saved(cache, marks)])
    same_from_here(model, fork, again)
    for one, other in zip(fork.coded_indexes, again.coded_indexes, strict=True):
        mine, others = one.state(), other.state()
        assert mine.keys() == others.keys() and all(np.array_equal(mine[name], others[name]) for name in mine)
