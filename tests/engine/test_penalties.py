"""Penalties, bias and minimum length: as plain torch and transformers compute them, the same alone as in any batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from retrieval_attn.errors import ConfigError
from retrieval_attn.sampling.sampler import History, Penalties, Sampler
from retrieval_attn.sampling.sampling_params import Sampling, SamplingParams

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)

adjusting = st.builds(
    SamplingParams,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.01, 100)),
    presence_penalty=st.one_of(st.just(0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0), st.floats(-2, 2)),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=5),
)
histories = st.builds(
    History,
    adjusting,
    TOKENS.filter(bool),
    TOKENS,
    st.frozensets(st.integers(0, VOCABULARY - 1), max_size=3),
    st.integers(0, 40),
)


def logits_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5


def reference(scores: Tensor, history: History) -> Tensor:
    """Scores (vocabulary,) token by token, in the order of vLLM's documentation; the repetition is transformers'."""
    draw, ids = history.draw, torch.tensor([*history.prompt, *history.output])[None]
    scores = RepetitionPenaltyLogitsProcessor(float(draw.repetition_penalty))(ids, scores[None].clone())[0]
    bias = dict(draw.biases)
    for token in range(VOCABULARY):
        count = history.output.count(token)
        if count:
            scores[token] -= torch.tensor(draw.frequency_penalty * 1.0) * count
            scores[token] -= draw.presence_penalty
        scores[token] += bias.get(token, 0.0)
    if history.ends:
        least = MinNewTokensLengthLogitsProcessor(len(history.prompt), history.min_tokens, sorted(history.ends))
        scores = least(ids, scores[None])[0]
    return scores


@given(histories, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_scores_are_those_of_transformers_and_plain_torch(history: History, seed: int) -> None:
    logits = logits_of(1, seed)
    before = logits.clone()
    found = Penalties()(logits, [history])
    expected = reference(logits[0], history)
    assert torch.equal(found[0].isinf(), expected.isinf())
    assert torch.allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


@given(st.lists(st.one_of(st.none(), histories), min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_a_row_has_the_same_scores_alone_in_any_batch(rows: list[History | None], chance: Any) -> None:
    """Bit by bit, with other rows that come and go, and with one object that has seen the steps before."""
    logits, together = logits_of(len(rows)), Penalties()
    for _ in range(3):
        order = chance.sample(range(len(rows)), chance.randint(1, len(rows)))
        found = together(logits[order], [rows[row] for row in order])
        for place, row in enumerate(order):
            one = rows[row]
            alone = logits[row] if one is None else Penalties()(logits[row : row + 1], [one])[0]
            assert torch.equal(found[place], alone)
            if one is not None:
                one.output.append(chance.randrange(VOCABULARY))


def test_rows_without_such_options_cost_nothing() -> None:
    """Not even a copy: the logits themselves are returned, and no tensor is made."""
    logits, penalties = logits_of(3), Penalties()
    done = History(SamplingParams(), [1], [5, 6], frozenset({3}), 2)
    assert History.of(SamplingParams(0.8, 5), [1], [], frozenset({3}), 0) is None
    assert penalties(logits, [None, done, None]) is logits and penalties(logits, []) is logits
    assert penalties._state == []


def test_every_option_changes_what_is_chosen() -> None:
    """Of a row whose likeliest tokens are 7, 8, 9: the tests above could compare nothing with nothing."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.5, 2.0])

    def chosen(output: list[int], ends: Sequence[int] = (), least: int = 0, **options: Any) -> int:
        history = History(SamplingParams(**options), [1, 7], output, ends, least)
        found = Sampler(1, torch.device("cpu"))([SamplingParams(**options)], logits, [2], [history])[0]
        assert found is not None
        return found.token

    assert chosen([]) == 7
    assert chosen([], repetition_penalty=1.3) == 8  # of the prompt
    assert chosen([], presence_penalty=2.0, frequency_penalty=2.0) == 7  # not of the prompt
    assert chosen([7], presence_penalty=0.6) == 8
    assert chosen([7], frequency_penalty=0.4) == 7 and chosen([7, 7], frequency_penalty=0.4) == 8
    assert chosen([], logit_bias={"9": 1.5}) == 9 and chosen([], logit_bias={7: -100}) == 8
    assert chosen([5], [7, 8], 2) == 9 and chosen([5, 5], [7, 8], 2) == 7


def test_log_probabilities_are_those_before_penalties() -> None:
    draw = SamplingParams(logit_bias={3: 100.0}, logprobs=2)
    logits = logits_of(1)
    found = Sampler(1, torch.device("cpu"))([draw], logits, [2], [History(draw, [1])])[0]
    expected = logits[0].double().log_softmax(0)
    assert found is not None and found.token == 3 and found.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    assert [token for token, _ in found.top] == expected.topk(2).indices.tolist()


@given(adjusting)
@settings(max_examples=100, deadline=None)
def test_options_go_through_json(draw: SamplingParams) -> None:
    assert SamplingParams(**json.loads(json.dumps(asdict(draw)))) == draw


WRONG: list[dict[str, Any]] = [
    {"repetition_penalty": 0},
    {"repetition_penalty": 101},
    {"repetition_penalty": math.nan},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"frequency_penalty": True},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"01": 1}},
    {"logit_bias": {-1: 1}},
    {"logit_bias": {2**31: 1}},
    {"logit_bias": {1: 101}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: "1"}},
    {"logit_bias": {1: 1, "1": 2}},
    {"logit_bias": 5},
    {"logit_bias": "5"},
    {"logit_bias": [5]},
    {"min_p": 1.5},
    {"top_p": -0.1},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
@pytest.mark.parametrize("kind", [SamplingParams, Sampling])
def test_options_out_of_their_range_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(**options)
