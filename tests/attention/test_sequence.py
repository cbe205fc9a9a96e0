"""One place says how long: rows, columns, padding, token ids, and taking back a forward that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import Rollback
from retrieval_attn.attention.sequence import Batch, rows_by_path, stacked, unstacked
from retrieval_attn.errors import CacheMismatchError
from tests.tiny_models import build_model, random_ids

CONFIG = ra.Config(sink=4, window=16, retrieve=6, prefill_chunk=64)


def model_of(name: str) -> Any:
    return ra.enable(build_model(name), CONFIG)


def held(cache: Any) -> set[int]:
    """Columns that the layers hold: one number where they agree."""
    return {layer.columns for layer in cache.layers}


def forward(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache, attention_mask=mask).logits
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_batch_counts_columns_and_a_sequence_its_tokens(name: str) -> None:
    """Two rows, one of them padded: columns are the batch's, lengths the rows'; every layer sees the same."""
    model = model_of(name)
    cache, ids = ra.RetrievalCache(model, CONFIG), random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    forward(model, cache, ids, mask)
    assert cache.get_seq_length() == cache.batch.columns == 90
    assert [len(sequence) for sequence in cache.batch.sequences] == [90, 60]
    assert held(cache) == {90}
    more = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    forward(model, cache, ids[:, :1], more)
    assert [len(sequence) for sequence in cache.batch.sequences] == [91, 61]
    cache.crop(-11)
    assert [len(sequence) for sequence in cache.batch.sequences] == [80, 50] and cache.batch.columns == 80
    cache.batch_select_indices(torch.tensor([1]))
    assert [len(sequence) for sequence in cache.batch.sequences] == [50]
    cache.reset()
    assert cache.batch.columns == 0 and not cache.batch.sequences


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("tokens", [1, 3, 40, 150])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_forward_that_failed_is_taken_back(name: str, tokens: int, place: str) -> None:
    """A layer fails: nothing counts, the next forward is refused, and once taken back it gives what it would have."""
    model = model_of(name)
    ids, more = random_ids(1, 100), random_ids(1, tokens, seed=3)
    plain = ra.RetrievalCache(model, CONFIG)
    forward(model, plain, ids)
    expected = forward(model, plain, more)
    cache = ra.RetrievalCache(model, CONFIG)
    forward(model, cache, ids)
    before = Rollback(cache)
    broken: Any = model.model.layers[1 if place == "first" else -1].mlp

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = broken.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, more)
    hook.remove()
    assert before.undo()
    assert cache.get_seq_length() == 100 and held(cache) == {100}
    assert torch.allclose(forward(model, cache, more), expected, atol=1e-5)
    assert cache.get_seq_length() == 100 + tokens


def test_without_rollback_the_next_forward_is_refused() -> None:
    model = model_of("llama")
    cache = ra.RetrievalCache(model, CONFIG)
    forward(model, cache, random_ids(1, 50))
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, cache, random_ids(1, 1))
    hook.remove()
    with pytest.raises(CacheMismatchError, match="failed half-way"):
        forward(model, cache, random_ids(1, 1))


def test_token_ids_are_compared_at_real_columns_only() -> None:
    """Padding may hold any id; ids that nobody said are not compared."""
    batch = Batch()
    batch.start(2)
    batch.valid = torch.tensor([[True] * 4, [False, False, True, True]])
    batch.commit(4)
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 3, 4]])
    assert batch.known_columns() == 0 and batch.first_difference(ids) is None
    batch.note_ids(ids)
    assert [list(sequence.token_ids) for sequence in batch.sequences] == [[5, 6, 7, 8], [3, 4]]
    assert batch.known_columns() == 4
    assert batch.first_difference(torch.tensor([[5, 6, 7, 8, 1], [9, 9, 3, 4, 1]])) is None
    assert batch.first_difference(torch.tensor([[5, 6, 7, 8], [0, 0, 3, 5]])) == 3
    batch.crop(3)
    assert [list(sequence.token_ids) for sequence in batch.sequences] == [[5, 6, 7], [3]]
    assert batch.known_columns() == 3


def test_rows_share_the_host_until_they_write() -> None:
    """A row repeated is the same path; the first write gives each its own, and leaves what was shared alone."""
    model = model_of("llama")
    cache = ra.RetrievalCache(model, CONFIG)
    forward(model, cache, random_ids(1, 80))
    cache.batch_repeat_interleave(3)
    layer: Any = cache.layers[0]
    assert len({id(host) for host in layer.hosts}) == 1
    for step in range(CONFIG.spill + 1):  # more than the window's tail has room for
        forward(model, cache, random_ids(3, 1, seed=step))
    assert len({id(host) for host in layer.hosts}) == 3
    assert all(len(host) > 80 for host in layer.hosts)


def test_a_fork_keeps_its_index_when_the_first_cache_begins_anew() -> None:
    model = model_of("llama")
    cache = ra.RetrievalCache(model, CONFIG)
    forward(model, cache, random_ids(1, 80))
    fork = cache.fork()
    cache.reset()
    assert fork.index is not cache.index
    layers: Any = fork.layers
    assert all(layer.index is fork.index for layer in layers)


def test_the_device_part_does_not_grow_with_the_context() -> None:
    """80 or 800 tokens: the same device bytes, and all keys on the host."""
    model = model_of("llama")
    caches = [ra.RetrievalCache(model, CONFIG) for _ in range(2)]
    for tokens, cache in zip((80, 800), caches, strict=True):
        forward(model, cache, random_ids(1, tokens))
    assert caches[0].device_nbytes == caches[1].device_nbytes
    per_token = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert caches[1].host_nbytes >= 800 * per_token


def test_rows_that_share_a_path_ask_together() -> None:
    """Rows 0, 2 and 3 over one path, row 1 over another, then one path of all: each row gets its own answers back."""
    model = model_of("llama")
    one, other = (ra.RetrievalCache(model, CONFIG) for _ in range(2))
    for cache in (one, other):
        forward(model, cache, random_ids(1, 90))
    (first,), (second,) = one.batch.hosts(0), other.batch.hosts(0)
    query = torch.arange(4 * 6 * 5 * 2.0).view(4, 6, 5, 2)
    for hosts, expected in (
        ([first, second, first, first], [(first, [0, 2, 3]), (second, [1])]),
        ([first] * 4, [(first, [0, 1, 2, 3])]),
    ):
        found = rows_by_path(hosts)
        assert [(id(host), rows) for host, rows in found] == [(id(host), rows) for host, rows in expected]
        for _, rows in found:
            together = stacked(query, rows)
            assert together.shape == (6, 5 * len(rows), 2)
            assert torch.equal(together[:, :5], query[rows[0]])
            assert torch.equal(unstacked(together, len(rows)), query[rows])
            assert torch.equal(unstacked(together[..., 0], len(rows)), query[rows][..., 0])
    assert stacked(query[:1], [0]).data_ptr() == query.data_ptr()
