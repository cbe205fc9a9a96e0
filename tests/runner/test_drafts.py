"""Drafts by lookup: proposals, their cost, and steps that verify them and leave a cache as without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.index.formats import Format
from retrieval_attn.runner import drafted_steps
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import PromptState, TokenChoice, forward, run
from retrieval_attn.runner.drafted_steps import DraftedSteps
from retrieval_attn.runner.drafts import (
    DRAFT_SIZES,
    LOAN,
    LONGEST_MATCH,
    NGRAM,
    RESUMED,
    BlockCosts,
    Draft,
    Drafter,
    DraftLength,
    Drafts,
    LookupDrafter,
)
from retrieval_attn.runner.rows import can_draft, tokens_before_spill
from tests.tiny_models import CONFIGS, Loaded, build_model, random_ids

BASE: dict[str, Any] = {"sink": 4, "window": 40, "retrieve": 16, "prefill_chunk": 512}


# -- proposals ------------------------------------------------------------------------------------------


def longest_match(ids: Sequence[int]) -> int:
    """Tokens of the longest suffix that occurs before, as far as it is compared."""
    best = 0
    for place in range(len(ids) - 1):
        count = 0
        while count <= place and count < LONGEST_MATCH and ids[place - count] == ids[-1 - count]:
            count += 1
        best = max(best, count)
    return best


@pytest.mark.parametrize("vocabulary", [3, 12, 400])
def test_what_followed_the_longest_match_is_proposed(vocabulary: int) -> None:
    chance = random.Random(vocabulary)
    ids = [chance.randrange(vocabulary) for _ in range(900)]
    drafter, found = LookupDrafter(ids[:700]), 0
    for end in range(700, 900):
        draft, known = drafter.propose(15), ids[:end]
        least = longest_match(known)
        if vocabulary > 3 and least >= NGRAM:  # else there are more occurrences than are compared
            assert draft.certainty == least
        assert (not draft.tokens) == (draft.certainty == 0)
        found += bool(draft.tokens)
        if draft.tokens:
            count, repeated = min(least, draft.certainty), [*known, *draft.tokens]
            suffix = known[-count:] if vocabulary > 3 else known[-1:]  # else it often is next to a long match before
            places = [n for n in range(len(suffix), end) if known[n - len(suffix) : n] == suffix]
            assert any(repeated[n : n + 15] == draft.tokens for n in places)
        drafter.extend(ids[end : end + 1])
    assert found or vocabulary == 400


def test_a_text_of_many_tokens_is_extended() -> None:
    """Memory grows; a passage of the first tokens is found behind 100,000 others, and a period goes on."""
    chance = random.Random(0)
    ids = [chance.randrange(4000) for _ in range(100_000)]
    drafter = LookupDrafter(ids)
    assert drafter.propose(15).certainty < 4
    for token in ids[500:540]:
        drafter.extend([token])
    assert drafter.propose(15) == Draft(ids[540:555], LONGEST_MATCH)
    drafter.extend(np.array([7, 8, 9] * 12))
    assert drafter.propose(7) == Draft([7, 8, 9, 7, 8, 9, 7], LONGEST_MATCH)
    assert drafter.propose(0) == LookupDrafter().propose(15) == LookupDrafter([1, 2]).propose(15) == Draft([], 0)


def test_a_copy_goes_on_where_it_was() -> None:
    """Of equal matches the one next to the last source: behind an edit, a quotation goes on in the same passage."""
    common, first, second = [1, 2, 3], list(range(10, 30)), list(range(40, 60))
    text = [*first, *common, 90, 91, 92, *second, *common, 70, 71, 72, 5]
    drafter = LookupDrafter([*text, *first[:10]])
    assert drafter.propose(3).tokens == first[10:13]
    drafter.extend([*first[10:], 88, *common])  # an edit before what both passages have
    assert drafter.propose(3).tokens == [90, 91, 92]
    assert LookupDrafter([*text, *first, 88, *common]).propose(3).tokens == [70, 71, 72]
    drafter = LookupDrafter([*text, *first[:10]])
    drafter.propose(15)
    drafter.extend([66, 67, first[12]])  # two tokens are other ones, and one is enough
    assert drafter.propose(3) == Draft(first[13:16], 1)
    drafter.extend([first[13]])
    assert drafter.propose(3) == Draft(first[14:17], 2 * RESUMED)
    drafter.extend([5])  # occurs before, but not there
    assert drafter.propose(3) == Draft([], 0)


def test_the_cost_of_drafts_is_measured() -> None:
    costs, chance = BlockCosts(), random.Random(1)
    assert costs.extra(1, 4) == pytest.approx(0.6)
    for step in range(200):
        tokens = (1, 1, 4, 8, 16)[step % 5]
        late = 40.0 if step % 31 == 0 else 1.0
        costs.note(tokens, late * (0.010 + 0.001 * tokens) * chance.uniform(0.98, 1.1))
    assert costs.extra(1, 1) == pytest.approx(1 / 11, rel=0.5)
    assert costs.extra(4, 3) == pytest.approx(3 / 14, rel=0.5)
    for _ in range(300):
        costs.note(1, 0.01)
    assert 0.05 < costs.extra(1, 1) < 0.3  # long without a block: back to what is usual


@pytest.mark.parametrize("cost", [0.03, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
def test_poor_drafts_cost_little(cost: float, rate: float) -> None:
    """Every token has a match; of its drafts few or none are right. The time in vain is bounded."""
    length, chance, spent, saved = DraftLength(), random.Random(cost), 0.0, 0
    for tokens in range(1, 3000):
        length.note_token()
        draft = Draft([0] * 15, chance.choice([3, 5, 9, 20, 32]))
        count = length.choose(draft, 15, lambda drafts: cost * drafts)
        if count:
            right = 0
            while right < count and chance.random() < rate:
                right += 1
            length.note(draft.certainty, count, right, cost * count)
            spent, saved = spent + cost * count, saved + right
        assert spent - saved <= LOAN + 0.015 * tokens


def test_right_drafts_get_longer() -> None:
    length, counts = DraftLength(), []
    for _ in range(30):
        length.note_token()
        counts.append(length.choose(Draft([0] * 15, 32), 15, lambda drafts: 0.2 * drafts))
        if counts[-1]:
            length.note(32, counts[-1], counts[-1], 0.2 * counts[-1])
    assert counts[-1] == 15 and set(counts) <= {0, *DRAFT_SIZES}
    length.note_token()
    assert length.choose(Draft([0] * 15, 32), 9, lambda drafts: 0.2 * drafts) == 7


# -- steps ----------------------------------------------------------------------------------------------


class Script(Drafter):
    """Proposes the next tokens of a script, some of them wrong."""

    def __init__(self, tokens: list[int], chance: random.Random | None = None) -> None:
        self.tokens, self.place, self._chance = tokens, 0, chance

    def extend(self, ids: Any) -> None:
        self.place += len(ids)

    def propose(self, most: int) -> Draft:
        chance, tokens = self._chance, self.tokens[self.place : self.place + most]
        if chance is not None:
            tokens = [one if chance.random() < 0.75 else (one + 1) % 90 for one in tokens]
        return Draft(tokens, 32)


def prompt_of(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> PromptState:
    start = cache.get_seq_length()
    places = torch.arange(start, ids.shape[1], device=ids.device)[None]
    with torch.no_grad(), using_retrieval(model, cache.config.prefill_chunk):
        logits = forward(model, cache, ids[:, start:], mask=None, position_ids=places)
    return PromptState(ids, logits, places[:, -1])


class PlainCosts(BlockCosts):
    """Each draft takes a tenth of a step, however busy the machine is."""

    def extra(self, rows: int, drafts: int) -> float:
        return 0.1 * drafts


class Replay:
    """Answers of a script after a prompt, with drafts and without. logits: that each token was chosen from."""

    def __init__(self, model: Any, ids: torch.Tensor, script: list[int], **options: Any) -> None:
        self.model, self.ids, self.script = model, ids, script
        self.cache = RetrievalCache(model, ra.Config(**{**BASE, **options}))
        prompt_of(model, self.cache, ids)

    def run(self, drafter: Drafter | None) -> tuple[RetrievalCache, list[Any], Any]:
        """Return the cache, the logits of each token, and the drafts."""
        cache, logits = self.cache.fork(), list[torch.Tensor]()
        state = prompt_of(self.model, cache, torch.cat([self.ids, torch.tensor([[5]])], dim=1))

        def choose(sequences: torch.Tensor, found: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            logits.append(found.clone())
            return torch.tensor([self.script[len(logits) - 1]])

        criteria = StoppingCriteriaList([MaxLengthCriteria(state.sequences.shape[1] + len(self.script))])
        steps = None
        if drafter is not None:
            assert can_draft(cache)
            steps = DraftedSteps(self.model, cache, np.zeros(0, np.int32), len(self.script))
            steps.drafts = Drafts(drafter)
            steps.drafts.length.balance = 1e9
            steps._costs = PlainCosts()
        with using_retrieval(self.model, cache.config.prefill_chunk):
            run(self.model, cache, state, TokenChoice(criteria, choose), steps=steps, graph=False)
        return cache, logits, steps and steps.drafts


def state_of(cache: RetrievalCache) -> list[Any]:
    """Lengths, places, and index ends of all layers; then their keys and values."""
    cache.quiet()
    books: list[Any] = [cache.batch.columns, [len(one.token_ids) for one in cache.batch.sequences]]
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer):
            held = layer.held
            assert held is not None
            books += [held.columns, held.tail_start, held.host_columns, held.window.tail_len, held.ranges]
            for host in held.hosts:
                books += [len(host), [(one.segment.indexed, one.length) for one in host.spans]]
                books += [None if host.clusters is None else (host.clusters.start, host.clusters.stop)]
    return books


def numbers_of(cache: RetrievalCache) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    layers: Any = cache.layers
    for layer in layers:
        keep = layer.sliding_window - 1 if layer.is_sliding else layer.window.tail_len
        found += [part[:, :, -keep:].cpu().numpy() for part in layer.window.tail()]
        if isinstance(layer, RetrievalLayer):
            for host in layer.hosts:
                found += host.read(0, len(host)) if host.fmt is not Format.INT8 else ()
                if host.clusters is not None:
                    found += [np.asarray(part) for part in host.clusters._sums]
    return found


def require_equal(one: RetrievalCache, other: RetrievalCache, tolerance: float = 1e-5) -> None:
    assert state_of(one) == state_of(other)
    for mine, yours in zip(numbers_of(one), numbers_of(other), strict=True):
        np.testing.assert_allclose(mine, yours, rtol=0, atol=tolerance * max(1.0, np.abs(yours).max(initial=0.0)))


# "yi" is "llama" with another base of its positions
SERVED = [name for name, (_, changes) in CONFIGS.items() if "longrope" not in str(changes) and name != "yi"]


@pytest.fixture(params=SERVED)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build_model(request.param)


def test_every_model_is_as_without_drafts(model: Any) -> None:
    """Right and wrong drafts, over several evictions of the window: logits, windows, host keys, indexes, clusters."""
    chance = random.Random(3)
    script = [chance.randrange(3, 90) for _ in range(70)]
    replay = Replay(model, random_ids(1, 700, 0), script)
    if not can_draft(replay.cache):
        pytest.skip("its texts have no drafts")
    alone, wanted, _ = replay.run(None)
    drafted, logits, drafts = replay.run(Script(script, random.Random(5)))
    assert 10 < drafts.length.accepted < drafts.length.drafted
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, wanted, strict=True))
    assert worst < 1e-4, worst
    require_equal(drafted, alone, 1e-4)
    columns = torch.arange(alone.get_seq_length(), alone.get_seq_length() + 12)[None]
    with torch.no_grad(), using_retrieval(model, 512):  # what follows is the same, too
        later = [forward(model, one, columns % 90, mask=None, position_ids=columns) for one in (drafted, alone)]
    assert float((later[0] - later[1]).abs().max()) < 1e-4 * float(later[1].abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {"index": "sketch"},
        {"index": "roargraph"},
        {"index": "full"},
        {"retrieve": "auto"},
        {"retrieve": "all"},
        {"tail": False},
        {"host_dtype": "int8"},
        {"window": 600},
        {"sink": 0, "window": 30},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    chance, model = random.Random(7), build_model("llama")
    script = [chance.randrange(3, 90) for _ in range(60)]
    replay = Replay(model, random_ids(1, 900, 1), script, **options)
    alone, wanted, _ = replay.run(None)
    drafted, logits, drafts = replay.run(Script(script, random.Random(5)))
    assert 10 < drafts.length.accepted < drafts.length.drafted
    # an int8 key of the host may round the other way, and a search name another key
    assert sum(float((a - b).abs().max() / b.abs().max()) > 1e-5 for a, b in zip(logits, wanted, strict=True)) <= 2
    require_equal(drafted, alone, 1e-4)


def test_a_block_that_evicts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if blocks may be as long as a window's room and more, and if wrong drafts stay."""
    chance, model = random.Random(3), build_model("llama")
    script = [chance.randrange(3, 90) for _ in range(70)]
    replay = Replay(model, random_ids(1, 700, 0), script)
    alone, _, _ = replay.run(None)
    with monkeypatch.context() as patch:
        patch.setattr(drafted_steps, "tokens_before_spill", lambda _: 16)
        drafted, _, _ = replay.run(Script(script, random.Random(5)))
        with pytest.raises(AssertionError):
            require_equal(drafted, alone)
    with monkeypatch.context() as patch:
        patch.setattr(RetrievalCache, "crop", lambda *_: None)
        drafted, _, _ = replay.run(Script(script, random.Random(5)))
        with pytest.raises(AssertionError):
            require_equal(drafted, alone)


def test_the_last_positions_of_a_model() -> None:
    """Drafts do not pass the model's last position."""
    model = build_model("llama", max_position_embeddings=300)
    replay = Replay(model, random_ids(1, 260, 0), [9] * 39)
    cache, logits, drafts = replay.run(Script([9] * 60))
    assert cache.get_seq_length() == 299 and len(logits) == 39 and drafts.length.accepted > 20
    assert tokens_before_spill(cache) == 0


# -- answers --------------------------------------------------------------------------------------------


def test_answers_of_contexts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled and penalized answers have the tokens that they have without drafts; forks and stops too."""
    # fixed costs: with measured ones a loaded machine turns drafts off
    monkeypatch.setattr(BlockCosts, "extra", lambda self, rows, drafts: 0.1 * drafts)
    monkeypatch.setattr(BlockCosts, "spent", lambda self, seconds: 0.0)
    line = "def area(width, height): return width * height  # of a rectangle, in square metres\n"
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}, {"repetition_penalty": 1.1}]
    answers = []
    for drafts in (False, True):
        read = ra.Context(*loaded, ra.Config(drafts=drafts, window=128, sink=16)).read(line * 20, progress=False)
        for options in ways:
            context = read.fork()
            found = [context.ask(line * 2, max_new_tokens=40, ignore_eos=True, **options)]
            found.append(context.fork().ask("And now?", max_new_tokens=16, **options))
            found.append(context.ask(line, max_new_tokens=32, stop=("metres",), **options))
            assert any(one.stats.accepted_tokens if drafts else one.stats.drafted_tokens for one in found) == drafts
            answers.append([(one.tokens, one.text) for one in found])
    assert answers[: len(ways)] == answers[len(ways) :]
