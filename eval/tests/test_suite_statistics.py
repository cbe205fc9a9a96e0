"""Statistics of suites against closed forms and published numbers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from retrieval_attn_eval.suite.statistics import (
    effective_length,
    mcnemar_exact,
    mean,
    mean_of_groups,
    paired_difference,
    standard_error,
    weighted_average,
)


def test_standard_error_of_a_share() -> None:
    """k of n right: the sample variance is p(1-p) n/(n-1), so the error is sqrt(p(1-p)/(n-1))."""
    scores = [1.0] * 35 + [0.0] * 165
    p, n = 35 / 200, 200
    error = standard_error(scores)
    assert error is not None and math.isclose(error, math.sqrt(p * (1 - p) / (n - 1)))
    assert mean([]) is None and standard_error([1.0]) is None


def test_mean_of_groups_weighs_tasks_equally() -> None:
    """A task with more samples must not count more; errors of independent means add in squares."""
    groups = [[1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    value, error = mean_of_groups(groups)
    first, second = standard_error(groups[0]), standard_error(groups[1])
    assert value == (0.5 + 0.75) / 2
    assert first is not None and second is not None and error is not None
    assert math.isclose(error, math.hypot(first, second) / 2)
    assert mean_of_groups([[1.0], [1.0, 0.0]]) == (0.75, None)
    assert mean_of_groups([[1.0], []]) == (None, None)


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (1, 8, 2 * (1 + 9) / 512), (4, 4, 1.0), (0, 2000, 2.0 ** (1 - 2000))],
)
def test_mcnemar_is_the_binomial_test(wins: int, losses: int, expected: float) -> None:
    """Two-sided p of the discordant pairs against one half; huge counts must not overflow."""
    assert mcnemar_exact(wins, losses) == pytest.approx(expected, abs=1e-300)
    assert mcnemar_exact(losses, wins) == mcnemar_exact(wins, losses)


def test_mcnemar_of_many_pairs_follows_the_normal_law() -> None:
    """4,000 discordant pairs two deviations apart: p near 0.0455; float binomials would overflow here."""
    half, deviation = 2000, math.sqrt(4000) / 2
    low = round(half - 1.96 * deviation)
    assert mcnemar_exact(low, 4000 - low) == pytest.approx(0.05, rel=0.05)


def test_bootstrap_interval_matches_the_normal_one() -> None:
    """For many samples the percentile interval is mean ± 1.96 standard errors of the paired differences."""
    rng = random.Random(3)
    first = [float(rng.random() < 0.6) for _ in range(800)]
    second = [x if rng.random() < 0.8 else 1.0 - x for x in first]
    found = paired_difference([first], [second], seed=1)
    gaps = np.array(second) - np.array(first)
    half = 1.96 * gaps.std(ddof=1) / math.sqrt(len(gaps))
    assert found.mean == pytest.approx(gaps.mean())
    assert found.low is not None and found.high is not None
    assert found.low == pytest.approx(gaps.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(gaps.mean() + half, abs=0.1 * half)
    assert found.wins - found.losses == round(float(gaps.sum()))
    assert found == paired_difference([first], [second], seed=1)


def test_paired_interval_is_narrower_than_an_unpaired_one() -> None:
    """Equal answers but for one sample: the interval must know that the samples are the same."""
    first = [1.0, 0.0] * 50
    second = [1.0, 0.0] * 49 + [1.0, 1.0]
    found = paired_difference([first], [second])
    assert found.mean == pytest.approx(0.01)
    assert found.low is not None and found.low >= 0.0
    assert found.high is not None and found.high <= 0.04
    assert (found.wins, found.losses, found.p_value) == (1, 0, 1.0)


def test_paired_difference_weighs_tasks_equally() -> None:
    """Strata of different size: the mean of the tasks' differences, resampled within tasks only."""
    found = paired_difference([[0.0] * 2, [1.0] * 100], [[1.0] * 2, [1.0] * 100])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="the same samples"):
        paired_difference([[1.0]], [[1.0, 0.0]])


@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 30), (2, 2)])
def test_few_samples_have_no_interval(sizes: tuple[int, ...]) -> None:
    """Samples that all differ by one would give an interval of no width: certainty from a single sample."""
    found = paired_difference([[1.0] * n for n in sizes], [[0.0] * n for n in sizes])
    assert (found.mean, found.low, found.high) == (-1.0, None, None)


def test_ruler_aggregates_give_the_published_ones() -> None:
    """RULER's first line (Gemini-1.5-Pro): wAvg 95.5 and 96.1, effective beyond 128K; paper 002, Table 3: 32K."""
    gemini = dict(zip((4, 8, 16, 32, 64, 128), (96.7, 95.8, 96.0, 95.9, 95.9, 94.4), strict=True))
    assert weighted_average(gemini, increasing=True) == pytest.approx(95.5, abs=0.05)
    assert weighted_average(gemini, increasing=False) == pytest.approx(96.1, abs=0.1)
    llama = dict(zip((4, 8, 16, 32, 64, 128), (93.13, 90.49, 89.27, 85.11, 82.51, 78.74), strict=True))
    assert effective_length(gemini) == 128
    assert effective_length(llama) == 16  # the paper prints 32K: its threshold is 85.0
    assert effective_length(llama, 85.0) == 32
    assert effective_length({4: 10.0}) is None and weighted_average({}, increasing=True) is None
