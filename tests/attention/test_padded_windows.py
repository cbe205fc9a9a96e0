"""Sliding windows of padded rows: padding takes no room in a window, whatever is read, generated or cropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.runner.decode import forward
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.tiny_models import build_model

PAST, LONG, SHORT = 200, 30, 10
TOLERANCE = 1e-5


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(5, 90, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["mistral_sliding", "gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Any:
    """Windows of 24 tokens in some layers."""
    found = build_model(request.param)
    ra.enable(found)
    yield found
    ra.disable(found)


def read(model: Any) -> RetrievalCache:
    cache = RetrievalCache(model, Config(sink=4, window=16, retrieve="all"))
    step(model, cache, [ids(PAST, 0)], [0])
    return cache


def step(model: Any, cache: RetrievalCache, rows: list[Tensor], starts: list[int], *, right: bool = False) -> Tensor:
    """Logits of the last column after new tokens of each row, padded to the longest, which begin at `starts`."""
    width, count, past = max(map(len, rows)), len(rows), cache.get_seq_length()
    new, places = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width, dtype=torch.long)
    mask = torch.ones(count, width, dtype=torch.bool)
    for row, (own, start) in enumerate(zip(rows, starts, strict=True)):
        at = slice(0, len(own)) if right else slice(width - len(own), width)
        mask[row] = False
        new[row, at], places[row, at], mask[row, at] = own, torch.arange(start, start + len(own)), True
    before = cache.batch.padding(0, past) if past else None
    earlier = torch.ones(count, past, dtype=torch.bool) if before is None else before
    whole = torch.cat([earlier, mask], dim=1)
    with torch.no_grad():
        return forward(model, cache, new, mask=None if whole.all() else whole, position_ids=places)


def alone(model: Any, first: Tensor, second: Tensor) -> list[Tensor]:
    """Logits after each of two blocks of a row of its own."""
    cache = read(model)
    one = step(model, cache, [first], [PAST])[0]
    return [one, step(model, cache, [second], [PAST + len(first)])[0]]


def both(model: Any) -> RetrievalCache:
    cache = read(model)
    cache.batch_repeat_interleave(2)
    cache.batch.rows_alone = True
    return cache


def test_rows_of_questions_are_as_alone(model: Any) -> None:
    """Two questions of other lengths, then a token of each; 20 columns of padding were most of a window of 24."""
    questions, tokens = [ids(LONG, 1), ids(SHORT, 2)], [ids(1, 3), ids(1, 4)]
    expected = [alone(model, *pair) for pair in zip(questions, tokens, strict=True)]
    cache = both(model)
    first = step(model, cache, questions, [PAST, PAST])
    second = step(model, cache, tokens, [PAST + LONG, PAST + SHORT])
    for row in range(2):
        torch.testing.assert_close(first[row], expected[row][0], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(second[row], expected[row][1], rtol=0, atol=TOLERANCE)


def test_a_crop_removes_the_tokens_of_each_row(model: Any) -> None:
    """Of a padded block: a row keeps what was before, as many tokens as fit its window."""
    tokens = [ids(SHORT, 5), ids(SHORT, 6)]
    expected = [alone(model, own, ids(1, 0))[0] for own in tokens]
    cache = both(model)
    step(model, cache, [ids(LONG, 1), ids(SHORT, 2)], [PAST, PAST])
    step(model, cache, [ids(1, 3), ids(1, 4)], [PAST + LONG, PAST + SHORT])
    cache.crop(-LONG - 1)
    found = step(model, cache, tokens, [PAST, PAST])
    for row in range(2):
        torch.testing.assert_close(found[row], expected[row], rtol=0, atol=TOLERANCE)


def test_padding_on_the_right(model: Any) -> None:
    """Tokens after it see whole windows."""
    questions, tokens = [ids(LONG, 1), ids(SHORT, 2)], [ids(1, 3), ids(1, 4)]
    expected = [alone(model, *pair)[1] for pair in zip(questions, tokens, strict=True)]
    cache = both(model)
    step(model, cache, questions, [PAST, PAST], right=True)
    found = step(model, cache, tokens, [PAST + LONG, PAST + SHORT])
    for row in range(2):
        torch.testing.assert_close(found[row], expected[row], rtol=0, atol=TOLERANCE)


def test_questions_asked_together_are_answered_as_alone(model: Any) -> None:
    """`ask_many` pads shorter questions behind the context."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    context = ra.Context(model, number_tokenizer(vocabulary), Config(sink=4, window=16, retrieve="all"))
    context.read(ids(PAST, 0).tolist(), progress=False)
    questions = [" ".join(map(str, ids(count, count).tolist())) for count in (LONG, SHORT, 3)]
    together = context.ask_many(questions, raw=True, max_new_tokens=8)
    assert [one.tokens for one in together] == [
        context.ask(question, raw=True, max_new_tokens=8).tokens for question in questions
    ]
