"""Captured steps with drafts, emulated: texts, caches and estimates are those of captured steps of one token."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.errors import BackendError, CaptureError, MemoryPlanError
from retrieval_attn.runner import full_attention
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import DecodeSteps, TokenChoice, forward, run
from retrieval_attn.runner.drafted_steps import CapturedDrafts
from retrieval_attn.runner.drafts import BLOCKS, BlockCosts, Drafter, Drafts
from retrieval_attn.runner.graph import decode_graph
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn.runner.graph.pool import BlockGraphs, GraphPool
from retrieval_attn.runner.graph.sequence_slot import GraphSlot
from retrieval_attn.runner.rows import can_draft
from tests.emulation.emulated import emulated
from tests.runner.graph_cases import DEVICE, FINER, MODELS, ROARGRAPH, idle_decoders
from tests.runner.test_drafts import Script, prompt_of, require_equal
from tests.tiny_models import Loaded, build_model, random_ids

pytestmark = pytest.mark.usefixtures("emulated_graphs", "small_graphs", "cheap_drafts")

BASE: dict[str, Any] = {"sink": 4, "window": 40, "retrieve": 16, "prefill_chunk": 512, "drafts": True}


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as many drafts as there are, whatever they cost on this machine."""
    monkeypatch.setattr(BlockCosts, "extra", lambda self, rows, drafts: 0.001 * drafts)
    monkeypatch.setattr(BlockCosts, "spent", lambda self, seconds: 0.0)


class Answered:
    """An answer behind a prompt. script: forced tokens; None: the model's greedy ones.

    tokens: of the answer. logits: that each forced token was chosen from. steps: None without drafts. how: see
    `Generated`.
    """

    def __init__(
        self,
        model: Any,
        read: RetrievalCache,
        ids: torch.Tensor,
        new: int,
        *,
        drafter: Drafter | None = None,
        script: list[int] | None = None,
        end: int | None = None,
    ) -> None:
        self.cache, self.logits, self.steps = read.fork(), list[torch.Tensor](), None
        device = model.device
        state = prompt_of(model, self.cache, torch.cat([ids, ids.new_tensor([[5]])], dim=1))

        def choose(sequences: torch.Tensor, found: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            assert script is not None
            self.logits.append(found.clone())
            return torch.tensor([script[len(self.logits) - 1]], device=device)

        criteria = StoppingCriteriaList([MaxLengthCriteria(state.sequences.shape[1] + new)])
        if end is not None:
            criteria.append(EosTokenCriteria([end]))
        if drafter is not None:
            assert can_draft(self.cache)
            self.steps = CapturedDrafts(model, self.cache, np.zeros(0, np.int32), new)
            self.steps.drafts = Drafts(drafter)
            self.steps.drafts.length.balance = 1e9
        choice = TokenChoice(criteria, None if script is None else choose)
        with using_retrieval(model, self.cache.config.prefill_chunk):
            found = run(model, self.cache, state, choice, steps=self.steps)
        self.how = found.how
        self.tokens = found.sequences[0, state.sequences.shape[1] :].tolist()

    @property
    def drafted(self) -> tuple[int, int]:
        """Drafts, and those of them that were accepted."""
        assert self.steps is not None
        return self.steps.drafts.length.drafted, self.steps.drafts.length.accepted


class Shared(NamedTuple):
    """A model of the type llama, a cache that has read 700 tokens `ids`, and the model's greedy tokens after them."""

    model: Any
    read: RetrievalCache
    ids: torch.Tensor
    tokens: list[int]


@pytest.fixture(scope="module")
def llama() -> Shared:
    """Tests fork the cache."""
    model = build_model("llama")
    read, ids = read_by(model, 700)
    with emulated():
        return Shared(model, read, ids, Answered(model, read, ids, 80).tokens)


def read_by(model: Any, tokens: int, **options: Any) -> tuple[RetrievalCache, torch.Tensor]:
    ids = random_ids(1, tokens, 0).to(model.device)
    cache = RetrievalCache(model, ra.Config(**{**BASE, **options}))
    prompt_of(model, cache, ids)
    return cache, ids


def furthest(one: Answered, other: Answered) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


def drafted_greedily(
    alone: Answered, model: Any, read: RetrievalCache, ids: torch.Tensor, options: dict[str, Any], right: bool
) -> Answered:
    """The tokens of `alone` again, by blocks: all drafts right, or one in four wrong."""
    drafted = Answered(model, read, ids, 90, drafter=Script(alone.tokens, None if right else random.Random(5)))
    assert drafted.tokens == alone.tokens
    proposed, accepted = drafted.drafted
    least = 30 if options.get("window") == 30 else 40  # after an eviction a plan comes first
    assert accepted == proposed > least if right else 10 < accepted < proposed
    return drafted


def greedy_answers(model: Any, options: dict[str, Any], right: bool) -> tuple[Answered, Answered]:
    """The model's own tokens, by steps launched ahead and by blocks."""
    read, ids = read_by(model, 900, **options)
    alone = Answered(model, read, ids, 90)
    return alone, drafted_greedily(alone, model, read, ids, options, right)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_as_without_drafts(name: str) -> None:
    """Right and wrong drafts over several evictions, forced tokens: logits, windows, host keys, indexes, clusters."""
    chance, model = random.Random(3), build_model(name)
    script = [chance.randrange(3, 90) for _ in range(70)]
    read, ids = read_by(model, 700)
    alone = Answered(model, read, ids, 70, script=script)
    drafted = Answered(model, read, ids, 70, script=script, drafter=Script(script, random.Random(5)))
    assert 10 < drafted.drafted[1] < drafted.drafted[0]
    assert drafted.how == alone.how == "graph" and furthest(drafted, alone) < 1e-4
    require_equal(drafted.cache, alone.cache, 1e-4)
    columns = torch.arange(alone.cache.get_seq_length(), alone.cache.get_seq_length() + 12)[None]
    with torch.no_grad(), using_retrieval(model, 512):  # what follows is the same, too
        later = [forward(model, one.cache, columns % 90, mask=None, position_ids=columns) for one in (drafted, alone)]
    assert float((later[0] - later[1]).abs().max()) < 1e-4 * float(later[1].abs().max())


OPTIONS: list[dict[str, Any]] = [
    ROARGRAPH,
    DEVICE,
    {**FINER, "retrieve": 4},
    {"index": "full"},
    {"retrieve": "auto"},
    {"tail": False},
    {"host_dtype": "int8"},
    {"window": 600},
    {"sink": 0, "window": 30},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_answers(options: dict[str, Any]) -> None:
    """The model's own tokens, by steps launched ahead and by blocks: all drafts right, then one in four wrong."""
    model = build_model("llama")
    read, ids = read_by(model, 900, **options)
    alone = Answered(model, read, ids, 90)
    for right in (True, False):
        drafted = drafted_greedily(alone, model, read, ids, options, right)
        most = 75 if not right else 60 if options.get("window") == 30 else 50
        assert drafted.steps is not None and drafted.steps.replays < most
        require_equal(drafted.cache, alone.cache, 1e-4)


def test_estimates_count_every_token(llama: Shared) -> None:
    """The tail of a block's tokens is tallied as that of single tokens is."""
    alone = Answered(*llama[:3], 60)
    drafted = Answered(*llama[:3], 60, drafter=Script(alone.tokens))
    found, wanted = drafted.cache.tail_shares(), alone.cache.tail_shares()
    assert found.keys() == wanted.keys() and found
    for number, tail in wanted.items():
        assert found[number].count == tail.count
        torch.testing.assert_close(found[number].means(), tail.means(), rtol=0, atol=1e-4)
    mine, others = drafted.cache.stats(), alone.cache.stats()
    assert mine.keys_scanned == others.keys_scanned > 0


def test_a_text_ends_inside_a_block(llama: Shared) -> None:
    """The end token, or the last token that is wanted, in the middle of right drafts: the cache lacks it alone."""
    model, read, ids, whole = llama
    ends = [place for place, token in enumerate(whole) if token not in whole[:place] and place > 8]
    assert len(ends) >= 4
    for place in ends[:4]:
        end, more = whole[place], [*whole[: place + 1], *([7] * 30)]
        found = Answered(model, read, ids, 60, drafter=Script(more), end=end)
        assert found.tokens == whole[: place + 1]
        assert found.cache.get_seq_length() == ids.shape[1] + 1 + place
        forced = Answered(model, read, ids, 60, drafter=Script(more), script=more, end=end)
        assert forced.tokens == found.tokens
        require_equal(forced.cache, found.cache)
    for new in (2, 3, 17, 18, 30):
        found = Answered(model, read, ids, new, drafter=Script(whole))
        assert found.tokens == whole[:new] and found.cache.get_seq_length() == ids.shape[1] + new


def test_blocks_end_with_the_window(
    llama: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A block never evicts. One that is longer than a window's room is refused."""
    model, read, ids, tokens = llama
    rooms, launch = list[tuple[int, int]](), GraphPool.launch_block

    def noted(self: GraphPool, cache: RetrievalCache, block: list[int], position: Any) -> torch.Tensor | None:
        rooms.append((len(block), self.block_room(cache)))
        return launch(self, cache, block, position)

    monkeypatch.setattr(GraphPool, "launch_block", noted)
    drafted = Answered(model, read, ids, 80, drafter=Script(tokens))
    assert drafted.tokens == tokens and all(count <= room for count, room in rooms)
    assert any(count == room for count, room in rooms) and {count for count, _ in rooms} <= set(BLOCKS)
    monkeypatch.setattr(GraphSlot, "block_room", 16)
    longer = Answered(model, read, ids, 80, drafter=Script(tokens))
    assert longer.drafted == (0, 0) and "cannot be captured" in caplog.text  # it would write behind the window


def test_wrong_drafts_that_are_counted_are_noticed(llama: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if a block's accepted drafts are not counted; without accepted drafts the text is right."""
    model, read, ids, _ = llama
    alone = Answered(model, read, ids, 60)
    with monkeypatch.context() as patch:
        patch.setattr(GraphPool, "commit_drafts", lambda self, cache, count: None)
        wrong = Answered(model, read, ids, 60, drafter=Script(alone.tokens, random.Random(5)))
        with pytest.raises(AssertionError):
            require_equal(wrong.cache, alone.cache)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedDrafts, "_accepted_logits", lambda self: None)
        patch.setattr(
            CapturedDrafts, "launch_next", lambda self: self._logits is None and DecodeSteps.launch_next(self)
        )
        wrong = Answered(model, read, ids, 60, drafter=Script([7] * 60))
        assert wrong.tokens == alone.tokens  # no draft is taken: still right


def test_a_failed_search_in_a_block(llama: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the caller, no token of the block counts, and the same graphs go on."""
    model, read, ids, tokens = llama
    confirm, failing = GraphPool.confirm, [True]

    def failed(self: GraphPool) -> float:
        if self.blocks.launched is not None and failing.pop():
            failing.append(False)
            self.undo()
            raise BackendError("layer 1: the search failed")
        return confirm(self)

    with monkeypatch.context() as patch:
        patch.setattr(GraphPool, "confirm", failed)
        with pytest.raises(BackendError, match="layer 1"):
            Answered(model, read, ids, 40, drafter=Script(tokens))
    drafted = Answered(model, read, ids, 40, drafter=Script(tokens))
    assert drafted.tokens == tokens[:40]


def test_graphs_are_captured_once(llama: Shared) -> None:
    """One graph for each number of tokens, kept with the pool for the next cache; a step without drafts has its own."""
    model, read, ids, tokens = llama
    Answered(model, read, ids, 80, drafter=Script(tokens))
    (pool,) = idle_pools(model)
    captures, sizes = pool.captures, set(pool.blocks.graphs)
    assert captures == 1 + len(sizes) and set() < sizes <= set(BLOCKS)
    again = Answered(model, read, ids, 80, drafter=Script(tokens))
    assert again.tokens == tokens and (pool.captures, set(pool.blocks.graphs)) == (captures, sizes)


def idle_pools(model: Any) -> list[GraphPool]:
    """Pools that a model keeps for its next cache."""
    return graph_pool._idle[model]


def test_blocks_are_captured_while_a_context_is_read(loaded: Loaded) -> None:
    """With drafts: all sizes, also in a pool that has the step of one token. No answer captures any."""
    for drafts in (False, True, True):
        context = ra.Context(*loaded, ra.Config(drafts=drafts, window=128, sink=16))
        context.read("A line that is read again and again.\n" * 60, progress=False)
        (pool,) = idle_pools(loaded[0])
        assert set(pool.blocks.graphs) == (set(BLOCKS) if drafts else set())
        assert pool.captures == 1 + len(pool.blocks.graphs)
        answer = context.ask("A line that is read again", max_new_tokens=60, ignore_eos=True)
        assert bool(answer.stats.accepted_tokens) == drafts
        assert pool.captures == 1 + len(pool.blocks.graphs)


def test_a_block_that_cannot_be_captured(
    llama: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no more drafts, said once; the text is the same, by steps of one token. The next one drafts again."""
    model, read, ids, tokens = llama

    def refused(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(BlockGraphs, "launch", refused)
        drafted = Answered(model, read, ids, 40, drafter=Script(tokens))
    assert drafted.tokens == tokens[:40] and drafted.drafted == (0, 0)
    assert caplog.text.count("no more drafts") == 1
    drafted = Answered(model, read, ids, 40, drafter=Script(tokens))
    assert drafted.tokens == tokens[:40] and drafted.drafted[1] > 0


def test_a_capture_that_failed_is_not_tried_again(llama: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer decodes without drafts from the start, by captured steps of one token."""
    model, read, ids, tokens = llama
    Answered(model, read, ids, 2)  # captures the step of one token
    tried, captured = list[int](), decode_graph.capture

    def failing(binding: Any, token: torch.Tensor, position: torch.Tensor) -> Any:
        tried.append(len(token))
        if len(token) > 1:
            raise CaptureError("no memory")
        return captured(binding, token, position)

    monkeypatch.setattr(decode_graph, "capture", failing)
    for _ in range(2):
        drafted = Answered(model, read, ids, 40, drafter=Script(tokens))
        assert drafted.tokens == tokens[:40] and drafted.drafted == (0, 0) and drafted.how == "graph"
    assert len(tried) == 1 and tried[0] in BLOCKS


def test_a_plan_that_fails_halfway_ends_drafts(
    llama: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Raise in the middle of a plan: the running step ends, and no block uses the incomplete plan."""
    model, read, ids, tokens = llama
    take = decode_graph.DecodeGraph.take

    def failing(self: Any, *args: Any) -> Any:
        for number, layer in enumerate(take(self, *args)):
            if self.tokens > 1 and self.is_captured and number == 1:
                raise MemoryPlanError("no memory")
            yield layer

    monkeypatch.setattr(decode_graph.DecodeGraph, "take", failing)
    Answered(model, read, ids, 40, drafter=Script(tokens))  # captures blocks, which plans
    drafted = Answered(model, read, ids, 40, drafter=Script(tokens))
    assert drafted.tokens == tokens[:40] and drafted.how == "graph" and "no memory" in caplog.text
    assert drafted.drafted[0] < 40


@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_answers_over_all_keys(host_dtype: str, needle_model_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys in pages on the device: a block's tokens are rows over the same pages."""
    monkeypatch.setattr(full_attention, "whole_device_bytes", lambda model: 8 << 30)
    monkeypatch.setattr(full_attention, "memory_speed", lambda model: 3.35e12)
    answers = []
    for drafts in (False, True):
        llm = ra.LLM(
            needle_model_path, device="cpu", drafts=drafts, window=128, sink=16, host_dtype=host_dtype,
            full_attention="always",
        )  # fmt: skip
        context = llm.read("A line that is read again and again.\n" * 60, progress=False)
        found = context.ask("A line that is read again", max_new_tokens=60, ignore_eos=True)
        assert found.stats.all_keys and found.stats.decoded == "graph"
        assert bool(found.stats.accepted_tokens) == drafts
        answers.append(found.tokens)
    assert answers[0] == answers[1]


def test_answers_of_contexts(loaded: Loaded) -> None:
    """Greedy, sampled and penalized answers have the tokens that they have without drafts; forks and stops too."""
    line = "def area(width, height): return width * height  # of a rectangle, in square metres\n"
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}, {"repetition_penalty": 1.1}]
    answers = []
    for drafts in (False, True):
        read = ra.Context(*loaded, ra.Config(drafts=drafts, window=128, sink=16)).read(line * 20, progress=False)
        captured = idle_decoders(loaded[0])
        assert captured
        for options in ways:
            context = read.fork()
            found = [context.ask(line * 2, max_new_tokens=40, ignore_eos=True, **options)]
            found.append(context.fork().ask("And now?", max_new_tokens=16, **options))
            found.append(context.ask(line, max_new_tokens=32, stop=("metres",), **options))
            assert all(one.stats.decoded == "graph" for one in found)
            assert any(one.stats.accepted_tokens if drafts else one.stats.drafted_tokens for one in found) == drafts
            answers.append([(one.tokens, one.text) for one in found])
    assert answers[: len(ways)] == answers[len(ways) :]


def test_texts_without_drafts_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without proposals every step but the first is launched before its token is read, as without `Config.drafts`."""
    model = build_model("llama")
    read, ids = read_by(model, 700, window=200)
    ahead, launch_ahead = list[bool](), GraphPool.launch_ahead

    def noted(self: GraphPool) -> bool:
        ahead.append(launch_ahead(self))
        return ahead[-1]

    monkeypatch.setattr(GraphPool, "launch_ahead", noted)
    alone = Answered(model, read, ids, 60)
    without = [*ahead]
    ahead.clear()
    drafted = Answered(model, read, ids, 60, drafter=Script([]))
    assert drafted.tokens == alone.tokens and ahead == without and sum(ahead) > 50
