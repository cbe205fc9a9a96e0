"""Choosing tokens: each row by its own options, the same alone as in any batch, distributed as the softmax says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import LogitsProcessorList, MinPLogitsWarper

import retrieval_attn as ra
from retrieval_attn.sampling import sampler as module
from retrieval_attn.sampling.sampler import Chosen, DrawMode, History, Sampler
from retrieval_attn.sampling.sampling_params import MAX_LOGPROBS, SamplingParams

DRAWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.3, top_k=5, seed=-3),
    SamplingParams(temperature=2.5, top_p=0.8, seed=2**64 - 1, logprobs=3),
    SamplingParams(temperature=0.9, min_p=0.02, seed=2**40, logprobs=20),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01),
]
VOCABULARY = 333


def sampler(draws: Sequence[SamplingParams], device: str = "cpu") -> Sampler:
    made = Sampler(len(draws), device)
    made.assign(dict(enumerate(draws)))
    return made


def pick(
    logits: Tensor, draws: Sequence[SamplingParams], positions: Tensor | int, mode: DrawMode | None = None
) -> Chosen:
    place = torch.full((len(logits),), positions) if isinstance(positions, int) else positions
    return sampler(draws, str(logits.device)).choose(logits, place.to(logits.device), mode=mode)


def warped(logits: Tensor, draw: SamplingParams) -> Tensor:
    """What transformers draws from: its own processors in its own order, (1, vocabulary)."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(draw.temperature))])
    if draw.top_k:
        processors.append(TopKLogitsWarper(draw.top_k))
    if draw.top_p < 1:
        processors.append(TopPLogitsWarper(draw.top_p))
    if draw.min_p:
        processors.append(MinPLogitsWarper(draw.min_p))
    return processors(None, logits)  # type: ignore[arg-type]  # ids play no role in these


def drawn(logits: Tensor, draw: SamplingParams, count: int, rows: int = 4000) -> Tensor:
    """Ids of `count` draws from logits (vocabulary,), at positions 0, 1, ..."""
    made = sampler([draw] * rows)
    starts = range(0, count, rows)
    return torch.cat([made.choose(logits.expand(rows, -1), torch.arange(at, at + rows)).ids for at in starts])


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """The p value of ids being draws from float64 probabilities; 0 where one was drawn that cannot be.

    Tokens expected fewer than ten times count together.
    """
    seen = torch.bincount(ids, minlength=len(probabilities)).double()
    if seen[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(ids)
    rare = expected < 10
    if not rare.all():
        seen, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected))
        seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))


OPTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, seed=11),
    SamplingParams(temperature=1.8, seed=12),
    SamplingParams(temperature=1.0, top_k=7, seed=13),
    SamplingParams(temperature=1.0, top_p=0.7, seed=14),
    SamplingParams(temperature=1.0, min_p=0.1, seed=15),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.85, min_p=0.05, seed=16),
]


@pytest.mark.parametrize("draw", OPTIONS)
def test_draws_follow_the_distribution_that_transformers_draws_from(draw: SamplingParams) -> None:
    torch.manual_seed(3)
    logits = torch.randn(50) * 2
    expected = warped(logits[None].double(), draw)[0].softmax(dim=0)
    assert chi_square(drawn(logits, draw, 40_000), expected) > 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        SamplingParams(temperature=1.45, top_k=12, top_p=0.85, min_p=0.05),
        SamplingParams(temperature=1.3, top_k=11, top_p=0.85, min_p=0.05),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.80, min_p=0.05),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.85, min_p=0.25),
    ],
)
def test_a_slightly_wrong_option_would_be_noticed(wrong: SamplingParams) -> None:
    """The test above can fail: here it must, for the last of its options."""
    torch.manual_seed(3)
    logits = torch.randn(50) * 2
    expected = warped(logits[None].double(), wrong)[0].softmax(dim=0)
    assert chi_square(drawn(logits, OPTIONS[-1], 40_000), expected) < 1e-3


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    logits = torch.full((41,), math.log(1e-4))
    logits[0] = math.log(1 - 40e-4)
    ids = drawn(logits, SamplingParams(temperature=1.0, seed=5), 100_000)
    assert abs(int((ids > 0).sum()) - 400) < 4 * 20
    assert len(ids.unique()) == 41


@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_transformers_keeps(ties: bool) -> None:
    """Tokens that are as likely as the last one that top-p keeps stay too: transformers takes some by its sort."""
    generator = torch.Generator().manual_seed(5)
    split = 0
    for trial in range(96):
        logits = torch.randn(1, 200, generator=generator) * 3
        logits = (logits * 2).round() / 2 if ties else logits
        draw = SamplingParams(
            temperature=(0.3, 0.8, 1.0, 2.5)[trial % 4],
            top_k=(0, 7, 50, 1)[trial // 4 % 4],
            top_p=(1.0, 0.9, 0.05)[trial % 3],
            min_p=(0.0, 0.05, 1.0)[trial // 16 % 3],
        )
        expected = (warped(logits, draw) > -math.inf)[0]
        kept = kept_by(logits, draw)
        more = kept & ~expected
        split += bool(more.any())
        assert not (expected & ~kept).any(), draw
        assert (logits[0][more] == logits[0][expected].min()).all(), draw
    assert bool(split) == ties


def kept_by(logits: Tensor, draw: SamplingParams) -> Tensor:
    """Which tokens of logits (1, vocabulary) can be drawn: among equal ones, all, by drawing often."""
    top_p, min_p, top_k = torch.tensor([[draw.top_p, draw.min_p, draw.top_k]]).double().T
    return module._kept(logits / draw.temperature, top_p, min_p.float(), top_k.long())[0]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_search_for_a_floor_finds_what_a_sort_finds(data: st.DataObject) -> None:
    """Scores of both signs, zeros of both signs, ties, infinities, and shares up to the whole."""
    width = data.draw(st.integers(1, 40))
    score = st.one_of(st.floats(-80, 80, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, -math.inf]))
    rows = data.draw(st.lists(st.lists(score, min_size=width, max_size=width), min_size=1, max_size=3))
    scaled = torch.tensor(rows)
    scaled[:, data.draw(st.integers(0, width - 1))] = data.draw(st.floats(-5, 5, width=32))  # one that is finite
    top_k = torch.tensor([data.draw(st.integers(0, width + 2)) for _ in rows])
    top_p = torch.tensor([data.draw(st.floats(0, 1)) for _ in rows], dtype=torch.float64)
    weights = module._weights(scaled, scaled.amax(dim=1))
    found = module._compiled_floors(scaled, weights, top_k, top_p)
    expected = module._sorted_floors(scaled, weights, top_k, top_p)
    assert torch.equal(scaled >= found[:, None], scaled >= expected[:, None])


def test_a_top_k_of_more_than_the_vocabulary_keeps_all() -> None:
    assert kept_by(torch.randn(1, 9), SamplingParams(temperature=1.0, top_k=2**31 - 1)).all()


def test_a_row_draws_the_same_alone_in_any_batch_at_any_place() -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(DRAWS), VOCABULARY) * 3
    positions = torch.tensor([0, 5, 2**33 + 1, 17, 1_000_000, 3])
    together = pick(logits, DRAWS, positions)
    everything = DrawMode(sample=True, filters=True, logprobs=MAX_LOGPROBS)
    for order in ([0], [1], [2], [3], [4], [5], [5, 4, 3, 2, 1, 0], [3, 3, 1, 3], [2, 0] * 40):
        some = [DRAWS[row] for row in order]
        alone = pick(logits[order], some, positions[order], everything)
        assert torch.equal(alone.ids, together.ids[order])
        assert alone.logprobs is not None and together.logprobs is not None
        assert torch.equal(alone.logprobs, together.logprobs[order])


row_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([0, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 2.0}]),
)


@given(st.lists(row_params, min_size=2, max_size=6), st.integers(0, 2**40), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_row_gets_its_token_whoever_shares_the_batch(params: list[SamplingParams], start: int, chance: Any) -> None:
    """Greedy and seeded, with penalties: alone, and with rows that come, go and change places from step to step."""
    generator = torch.Generator().manual_seed(start % 2**31)
    together = Sampler(len(params))
    mine: list[list[int]] = [[] for _ in params]
    alone: list[list[int]] = [[] for _ in params]
    histories = [[History(one, [3, 7], out) for one, out in zip(params, outs, strict=True)] for outs in (mine, alone)]
    for step in range(4):
        rows = chance.sample(range(len(params)), chance.randint(1, len(params)))
        logits = torch.randn(len(params), 17, generator=generator)
        found = together(
            [params[row] for row in rows], logits[rows].contiguous(), [start + step] * len(rows),
            [histories[0][row] for row in rows],
        )  # fmt: skip
        for row, token in zip(rows, found, strict=True):
            other = Sampler(1)([params[row]], logits[row : row + 1], [start + step], [histories[1][row]])[0]
            assert token is not None and token == other
            mine[row].append(token.token)
            alone[row].append(token.token)


def test_another_seed_or_position_draws_anew() -> None:
    logits = torch.zeros(1, 5000)
    ids = [
        int(pick(logits, [SamplingParams(temperature=1.0, seed=seed)], position).ids)
        for seed, position in ((0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32), (-1, 0))
    ]
    assert len(set(ids)) == len(ids)
    assert ids[-1] == int(pick(logits, [SamplingParams(temperature=1.0, seed=2**64 - 1)], 0).ids)


def test_tokens_that_are_added_to_the_vocabulary_do_not_change_the_noise() -> None:
    logits = torch.randn(1, 400)
    padded = torch.cat([logits, torch.full((1, 7), -math.inf)], dim=1)
    for position in range(20):
        draw = [SamplingParams(temperature=1.0)]
        assert torch.equal(pick(logits, draw, position).ids, pick(padded, draw, position).ids)


def test_greedy_rows_take_the_likeliest_among_rows_that_draw() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCABULARY)
    draws = [
        SamplingParams(top_k=1, top_p=0.1),
        SamplingParams(temperature=9.0),
        SamplingParams(temperature=9.0, top_p=0),
    ]
    draws.append(SamplingParams(temperature=1e-30))
    for position in range(30):
        ids = pick(logits, draws, position).ids
        assert torch.equal(ids[[0, 2, 3]], logits.argmax(dim=1)[[0, 2, 3]])


def test_among_equal_likeliest_tokens_greedy_takes_the_first() -> None:
    logits = torch.zeros(2, 64)
    logits[:, [9, 30]] = 2.0
    assert pick(logits, [SamplingParams(), SamplingParams()], 0).ids.tolist() == [9, 9]
    assert pick(logits, [SamplingParams(), SamplingParams(temperature=1.0)], 0).ids.tolist()[0] == 9


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(DRAWS), VOCABULARY) * 4
    found = pick(logits, DRAWS, 11)
    expected = logits.double().log_softmax(dim=1)
    assert found.logprobs is not None and found.top_ids is not None and found.top_logprobs is not None
    assert (found.logprobs - expected.gather(1, found.ids[:, None]).squeeze(1)).abs().max() < 2e-6
    top = expected.topk(MAX_LOGPROBS, dim=1)
    assert torch.equal(found.top_ids, top.indices)
    assert (found.top_logprobs - top.values).abs().max() < 2e-6


def test_logprobs_are_made_only_for_rows_that_ask() -> None:
    logits = torch.randn(2, 8)
    assert pick(logits, [SamplingParams(), SamplingParams(temperature=1.0)], 0).logprobs is None
    found = pick(logits, [SamplingParams(), SamplingParams(logprobs=20)], 0)
    assert found.top_ids is not None and found.top_ids.shape == (2, 8)  # as many as there are
    chosen_only = pick(logits, [SamplingParams(), SamplingParams()], 0, DrawMode(logprobs=0))
    assert chosen_only.logprobs is not None and chosen_only.top_ids is not None
    assert chosen_only.top_ids.shape == (2, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_fails_alone(bad: float) -> None:
    """NaN anywhere, infinity as the largest score, or nothing that could be drawn."""
    torch.manual_seed(4)
    logits = torch.randn(len(DRAWS), VOCABULARY)
    expected = pick(logits, DRAWS, 3)
    for row in range(len(DRAWS)):
        broken = logits.clone()
        broken[row, slice(None) if bad == -math.inf else 77] = bad
        found = pick(broken, DRAWS, 3)
        others = [other for other in range(len(DRAWS)) if other != row]
        assert found.failed.tolist() == [other == row for other in range(len(DRAWS))]
        assert int(found.ids[row]) == 0
        assert torch.equal(found.ids[others], expected.ids[others])
        assert found.logprobs is not None and expected.logprobs is not None
        assert torch.equal(found.logprobs[others], expected.logprobs[others])
        assert bool(found.logprobs[row].isnan())


def test_a_failed_row_of_one_token_fails_alone() -> None:
    """Nothing of it is kept, and the place of the last token that is kept must still be a place."""
    found = pick(torch.tensor([[math.nan], [1.0]]), [SamplingParams(temperature=1.0, top_p=0.5)] * 2, 0)
    assert found.failed.tolist() == [True, False] and found.ids.tolist() == [0, 0]


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, [3, 4]] = 0.0
    ids = drawn(logits[0], SamplingParams(temperature=5.0), 4000)
    assert set(ids.tolist()) == {3, 4}
    assert set(drawn(logits[0], SamplingParams(temperature=5.0, top_k=30, top_p=0.99), 4000).tolist()) == {3, 4}


def test_the_logits_stay_as_they_are_and_inference_mode_is_fine() -> None:
    logits = torch.randn(len(DRAWS), VOCABULARY)
    before = logits.clone()
    with torch.inference_mode():
        inside = pick(logits, DRAWS, 1)
    assert torch.equal(logits, before)
    assert torch.equal(inside.ids, pick(logits, DRAWS, 1).ids)


def test_a_sampler_has_the_mode_that_its_rows_need() -> None:
    made = Sampler(3)
    assert made.mode == DrawMode()
    made.assign({1: SamplingParams(temperature=0.5)})
    assert made.mode == DrawMode(sample=True)
    filtered = SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)
    made.assign({1: SamplingParams(temperature=0.5), 2: filtered, 0: SamplingParams(top_k=5, logprobs=1)})
    assert made.mode == DrawMode(sample=True, filters=True, logprobs=2)
    made.assign({1: SamplingParams(temperature=0.5), 0: SamplingParams(top_k=5, logprobs=1)})
    assert made.mode == DrawMode(sample=True, filters=False, logprobs=1)


def test_parameters_are_assigned_in_place() -> None:
    """A captured graph reads the addresses that it saw."""
    made = Sampler(2)
    numbers, words = made._numbers, made._words
    made.assign({1: SamplingParams(temperature=0.5, top_k=9, seed=2**32 + 5)})
    assert made._numbers is numbers and made._words is words
    assert numbers.tolist() == [[0.0, 1.0, 0.0], [0.5, 1.0, 0.0]]
    assert words.tolist() == [[0, 0, 0], [9, 5, 1]]
    for row in (-1, 2):
        with pytest.raises(IndexError, match="2 rows"):
            made.assign({row: SamplingParams()})


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": 2**64},
        {"seed": True},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ra.ConfigError, match=name):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_sampler_without_rows_is_refused() -> None:
    with pytest.raises(ra.ConfigError, match="at least 1 row"):
        Sampler(0)


def test_logits_and_positions_of_another_shape_are_refused() -> None:
    made, positions = Sampler(2), torch.zeros(2, dtype=torch.int64)
    for logits in (torch.randn(2, 0), torch.randn(6), torch.randn(2, 6).double(), torch.randn(6, 2).T):
        with pytest.raises(ra.ShapeError, match="float32 .rows, vocabulary."):
            made.choose(logits, positions)
    for place in (positions[:1], positions.int(), positions[:, None]):
        with pytest.raises(ra.ShapeError, match="positions must be int64"):
            made.choose(torch.randn(2, 6), place)
    with pytest.raises(ra.ShapeError, match="3 rows of logits"):
        made.choose(torch.randn(3, 6), torch.zeros(3, dtype=torch.int64))
