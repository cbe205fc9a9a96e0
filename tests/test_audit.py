"""Audits: heads drawn for each token, compared with exact attention, and a bound for those that were not drawn."""

from typing import Any

import numpy as np
import pytest

import retrieval_attn as ra
from retrieval_attn.answer import Audit
from retrieval_attn.attention.audit import HeadAudit, audited, upper_bound
from retrieval_attn.attention.instruments import audit
from retrieval_attn.attention.retrieval import RetrievalLayer
from tests.tiny_models import QUESTION, Loaded, needle_text

CONFIG = ra.Config(sink=8, window=64, spill=16, retrieve=20, prefill_chunk=512)


class Everyone(HeadAudit):
    """Every head is drawn: the mean that the bound is for."""

    def draw(self, layer: int, position: int, q_heads: int) -> list[int]:
        return list(range(q_heads))


def ask(loaded: Loaded, append: Any = "retrieval", **changes: Any) -> Audit:
    context = ra.Context(*loaded, CONFIG.replace(**changes)).read(needle_text(6_000), progress=False)
    audit(context.cache)
    found = context.ask(QUESTION, max_new_tokens=24, question_attention=append).stats.audit
    assert found is not None and found.samples > 100
    return found


def test_exact_attention_has_no_error(loaded: Loaded) -> None:
    found = ask(loaded, retrieve="all")
    assert found.mean_error < 1e-5 < found.upper_bound < 0.1


def test_the_estimate_is_nearer_than_leaving_out(loaded: Loaded) -> None:
    near, far = ask(loaded, tail=True), ask(loaded, tail=False)
    assert 0 < near.mean_error < 0.7 * far.mean_error


def test_the_bound_covers_the_mean_over_all_heads(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ask(loaded)
    fork = RetrievalLayer.fork

    def everyone(layer: RetrievalLayer, *args: Any) -> RetrievalLayer:
        other = fork(layer, *args)
        other.audit = Everyone(1)
        return other

    monkeypatch.setattr(RetrievalLayer, "fork", everyone)
    whole = ask(loaded)
    assert whole.samples > 4 * drawn.samples
    assert abs(whole.mean_error - drawn.mean_error) < 0.05
    assert whole.mean_error <= drawn.upper_bound < 0.6


def test_rows_of_a_batch_are_drawn_together(loaded: Loaded) -> None:
    """Two equal rows have the error of one, and are one sample of each token and layer."""
    context = ra.Context(*loaded, CONFIG).read(needle_text(3_000), progress=False)
    audit(context.cache)
    alone = context.ask(QUESTION, max_new_tokens=4).stats.audit
    together = context.ask_many([QUESTION, QUESTION], max_new_tokens=4)[0].stats.audit
    assert alone is not None and together is not None and together.samples == alone.samples
    assert together.mean_error == pytest.approx(alone.mean_error, rel=1e-3)


def test_draws_are_even_and_depend_on_layer_and_position_alone() -> None:
    first, second = HeadAudit(2), HeadAudit(2)
    drawn = np.array([first.draw(layer, position, 8) for layer in range(4) for position in range(500)])
    assert drawn.tolist()[700] == second.draw(1, 200, 8)
    counts = np.stack([np.bincount(column, minlength=8) for column in drawn.T])
    assert counts.min() > 200 and counts.max() < 300  # of 250, in either draw
    assert abs(float((drawn[:, 0] == drawn[:, 1]).mean()) - 1 / 8) < 0.03


@pytest.mark.parametrize("rare", [0.5, 0.02])
def test_the_bound_holds_for_skewed_errors(rare: float) -> None:
    """Errors that are 0 but for few: the mean of 300 is above the truth as often as below, its bound hardly ever."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        errors = HeadAudit(1)
        errors.add(np.where(rng.random(300) < rare, 0.9, 0.0))
        found = audited([None, errors])
        assert found is not None and found.samples == 300
        missed += found.upper_bound < rare * 0.9
    assert missed <= 20


def test_few_samples_bound_nothing() -> None:
    assert audited([]) is None and audited([None, HeadAudit(1)]) is None
    assert upper_bound(1, 0.0, 0.0) == 1.0 == upper_bound(5, 0.5, 0.2)
    large = HeadAudit(1)
    large.add(np.array([7.0, 0.0]))
    found = audited([large])
    assert found is not None and found.mean_error == 0.5
