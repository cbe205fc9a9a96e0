"""Exact answers: retrieval drafts, full attention verifies. The text, and the cache, are those of full attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.answer import Answer
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, retrieves
from retrieval_attn.attention.exact import UploadSource
from retrieval_attn.attention.host_attention import HostSource
from retrieval_attn.config import FULL_ATTENTION
from retrieval_attn.engine.engine import Engine
from retrieval_attn.errors import ConfigError
from retrieval_attn.model.loading import load_model
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import DecodeSteps, TokenChoice, run
from retrieval_attn.runner.drafted_steps import DraftedSteps
from retrieval_attn.runner.exact_steps import (
    BLOCK_SIZES,
    MEASURE_AFTER,
    BlockLength,
    ExactSteps,
    PassCosts,
    exact_steps,
    host_bytes,
)
from retrieval_attn.runner.rows import can_draft
from tests.runner.test_drafts import prompt_of, require_equal
from tests.tiny_models import CONFIGS, Loaded, build_model, random_ids

POOR: dict[str, Any] = {"sink": 4, "window": 48, "retrieve": 4, "tail": False}
"""Options with which retrieval is often wrong."""
ALL: dict[str, Any] = {**POOR, "retrieve": "all"}
WORDS = ("ship", "harbour", "ledger", "captain", "copper", "seven", "river", "barrel", "paid", "owes", "crew", "salt")


def text_of(seed: int, words: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"{chance.choice(WORDS)} {chance.randrange(1000)}." for _ in range(words))


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all sizes, whatever they cost."""
    chance = random.Random(4)
    monkeypatch.setattr(BlockLength, "choose", lambda self, most, seconds: chance.randrange(max(0, min(most, 40)) + 1))


def contexts(loaded: Loaded, seed: int, words: int, **options: Any) -> tuple[ra.Context, ra.Context]:
    """A context that retrieves few keys, and one that attends to all."""
    text = text_of(seed, words)
    few, every = ({**base, **options} for base in (POOR, ALL))
    return tuple(ra.Context(*loaded, ra.Config(**one)).read(text, progress=False) for one in (few, every))  # type: ignore[return-value]


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 20, "logit_bias": {5: -2.0}},
]


@pytest.mark.parametrize("seed", range(10))
def test_answers_are_those_of_full_attention(seed: int, loaded: Loaded) -> None:
    """Greedy and sampled answers to 60 questions behind texts of 300 to 2,000 tokens."""
    few, every = contexts(loaded, seed, 60 + 40 * seed)
    answers = list[tuple[Answer, Answer, Answer]]()
    for number in range(6):
        asked, ignore = f"Captain {number}, who owes what?" * (1 + number % 3), number % 2 == 0
        options = {**ASKED[(seed + number) % len(ASKED)], "max_new_tokens": 40, "ignore_eos": ignore}
        exact = few.ask(asked, full_attention="exact", **options)
        answers.append((exact, every.ask(asked, **options), few.ask(asked, **options)))
    assert [one.tokens for one, _, _ in answers] == [one.tokens for _, one, _ in answers]
    assert [one.text for one, _, _ in answers] == [one.text for _, one, _ in answers]
    assert any(plain.tokens != full.tokens for _, full, plain in answers)
    stats = [one.stats for one, _, _ in answers]
    assert sum(one.accepted_tokens for one in stats) < sum(one.drafted_tokens for one in stats)
    assert all(one.new_tokens - 1 == one.accepted_tokens + one.passes for one in stats)
    assert all(one.pass_bytes > 0 and one.tail_share is None for one in stats)


def test_wrong_acceptance_is_noticed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if drafts are verified with few keys, never compared, or not cropped."""
    few, every = contexts(loaded, 3, 400)
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    wanted = every.ask("Who owes what?", **options).tokens

    def exact() -> list[int]:
        return few.ask("Who owes what?", full_attention="exact", **options).tokens

    assert exact() == wanted != few.ask("Who owes what?", **options).tokens
    with monkeypatch.context() as patch:  # the verifying forward retrieves, too
        patch.setattr(UploadSource, "covers", classmethod(lambda cls, asked, tokens: tokens if asked.exact else None))
        patch.setattr(HostSource, "finish", retrieving(HostSource.finish))
        assert exact() != wanted
    with monkeypatch.context() as patch:  # each token is chosen from the logits of a draft
        patch.setattr(DraftedSteps, "step", trusting)
        assert exact() != wanted
    with monkeypatch.context() as patch:
        patch.setattr(RetrievalCache, "crop", lambda *_: None)
        assert exact() != wanted
    assert exact() == wanted


def retrieving(finish: Callable[..., Any]) -> Callable[..., Any]:
    def patched(source: HostSource) -> Any:
        batch = source.request.held.batch
        before, batch.attends_to_all = batch.attends_to_all, False
        try:
            return finish(source)
        finally:
            batch.attends_to_all = before

    return patched


def trusting(steps: ExactSteps, token: torch.Tensor, position: torch.Tensor, mask: None) -> torch.Tensor:
    """Accept every draft."""
    steps._cache.batch.attends_to_all = False
    return DecodeSteps.step(steps, token, position, mask)


def greedy_tokens(
    model: Any, cache: RetrievalCache, ids: torch.Tensor, *, exact: bool
) -> tuple[list[int], DecodeSteps | None]:
    """80 greedy tokens behind ids (1, 700), and the steps that verified them; exact: by `exact_steps`."""
    cache.batch.attends_to_all = exact
    state = prompt_of(model, cache, ids)
    criteria = StoppingCriteriaList([MaxLengthCriteria(780)])
    steps = exact_steps(model, cache, ids, 80, None) if exact else None
    with using_retrieval(model, 512):
        text = run(model, cache, state, TokenChoice(criteria), steps=steps, graph=False)
    return text.sequences[0, 700:].tolist(), steps


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_model(name: str) -> None:
    """Tokens and caches of all kinds of models, over several evictions of the window; hybrids without drafts."""
    model, ids = build_model(name), random_ids(1, 700, 0)
    found: list[tuple[RetrievalCache, list[int]]] = []
    drafts = True
    for options in (POOR, ALL):
        cache = RetrievalCache(model, ra.Config(**options, prefill_chunk=512))
        exact = options is POOR
        tokens, steps = greedy_tokens(model, cache, ids, exact=exact)
        found.append((cache, tokens))
        if exact:
            drafts = can_draft(cache)
            assert isinstance(steps, ExactSteps) == drafts
            assert not isinstance(steps, ExactSteps) or steps.drafts.length.drafted > 40 or not retrieves(cache)
    assert found[0][1] == found[1][1]
    if drafts:
        require_equal(found[0][0], found[1][0], 1e-4)


def test_the_cache_has_rows_of_full_attention(loaded: Loaded) -> None:
    """Windows, host keys and what follows an answer equal those of full attention, unlike those of retrieval."""
    text, caches, tokens = text_of(8, 500), list[RetrievalCache](), list[list[int]]()
    loop, sampling = AnswerLoop(*loaded), ra.Sampling(max_new_tokens=150, ignore_eos=True)
    ids = loop.tokenizer(text)["input_ids"]
    for options, exact in ((POOR, True), (ALL, False), (POOR, False)):
        cache = RetrievalCache(loaded[0], ra.Config(**options))
        loop.read_whole(cache, loop.batch([ids]))
        cache.batch.attends_to_all = exact
        more = ids + loop.tokenizer("And so on, captain: what was the cargo of the ship?")["input_ids"]
        tokens.append(loop.answer(cache, loop.batch([more]), sampling)[0].tokens)
        caches.append(cache)
    assert tokens[0] == tokens[1]
    require_equal(caches[0], caches[1], 1e-4)
    with pytest.raises(AssertionError):
        require_equal(caches[2], caches[1], 1e-4)
    asked = loop.batch([[*more, *tokens[0], 9, 8, 7]])
    assert loop.answer(caches[0], asked, sampling)[0].tokens == loop.answer(caches[1], asked, sampling)[0].tokens


def test_saved_extended_and_streamed_contexts(loaded: Loaded, tmp_path: Path) -> None:
    """Forks, saves and extensions answer exactly; so do stop strings, streams, batches and questions of few tokens."""
    few, every = contexts(loaded, 5, 300)
    few.save("ledger", store=tmp_path)
    opened = ra.Context(*loaded).open("ledger", store=tmp_path, full_attention="exact")
    assert opened.config.full_attention == "exact" and opened.config.retrieve == 4
    asked: Any = [{"role": "user", "content": "Who owes?"}, {"role": "assistant", "content": "All of us do."},
                  {"role": "user", "content": "And what for?"}]  # fmt: skip
    for one in (opened, opened.fork().extend(text_of(6, 40))):
        full = every if one is opened else every.fork().extend(text_of(6, 40))
        long: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
        assert one.ask(asked, **long).tokens == full.ask(asked, **long).tokens
        assert one.ask("x", raw=True, **long).tokens == full.ask("x", raw=True, **long).tokens
        with one.stream("Go on", **long) as stream:
            assert "".join(stream) == full.ask("Go on", **long).text
        whole = full.ask("Go on", **long).text
        stop = (whole[len(whole) // 2 :][:3],)
        answer = one.ask("Go on", stop=stop, **long)
        assert answer.text == full.ask("Go on", stop=stop, **long).text and answer.finish_reason == "stop"
        questions = ["Who?", "What is the cargo of the ship?", "Salt or rope, and how much of it was paid?"]
        together = one.ask_many(questions, temperature=0.7, seed=5, max_new_tokens=30)
        alone = [full.ask(question, temperature=0.7, seed=5, max_new_tokens=30) for question in questions]
        assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
        assert any(answer.stats.drafted_tokens for answer in together)


def test_forgotten_tokens_and_rounded_keys(loaded: Loaded) -> None:
    """An exact answer attends to no forgotten token; int8 keys are full attention's over the same int8 keys."""
    for options in ({}, {"host_dtype": "int8"}):
        few, every = contexts(loaded, 6, 300, **options)
        for one in (few, every) if not options else ():
            one.forget(4, 300)
        long: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
        answer, wanted = few.ask("Who owes what?", full_attention="exact", **long), every.ask("Who owes what?", **long)
        assert answer.tokens == wanted.tokens and answer.stats.drafted_tokens > 0


def test_prompts_without_a_context(needle_model_path: Path) -> None:
    """`LLM.generate` with one prompt and with several, which are a batch: each token is a pass."""
    answers = []
    for options in ({**POOR, "full_attention": "exact"}, ALL):
        llm = ra.LLM(needle_model_path, device="cpu", config=ra.Config(**options))
        prompts = [text_of(2, 70), text_of(3, 66), text_of(4, 300)]
        made = llm.generate(prompts, max_new_tokens=70, progress=False, ignore_eos=True)
        answers.append([one.tokens for one in made])
    assert answers[0] == answers[1]


def test_lookups_come_first(loaded: Loaded) -> None:
    """With `Config.drafts` an answer that quotes has drafts without retrieval, and is the same."""
    line = "def area(width, height): return width * height  # of a rectangle, in square metres\n"
    found = []
    for options in ({**POOR, "drafts": True}, ALL):
        context = ra.Context(*loaded, ra.Config(**options)).read(line * 40, progress=False)
        mode: Any = "exact" if "drafts" in options else None
        found.append(context.ask(line * 2, max_new_tokens=60, ignore_eos=True, full_attention=mode))
    assert found[0].tokens == found[1].tokens
    assert found[0].stats.accepted_tokens > 20


def test_short_texts_and_other_modes(loaded: Loaded) -> None:
    """A text in the window has no drafts; each answer may choose its mode."""
    context = ra.Context(*loaded, ra.Config(full_attention="exact")).read(text_of(1, 40), progress=False)
    answer = context.ask("Who?", max_new_tokens=20, ignore_eos=True)
    assert answer.stats.drafted_tokens == 0 and answer.stats.agreement is None
    few, _ = contexts(loaded, 2, 200, full_attention="exact")
    plain = few.ask("Who?", max_new_tokens=20, ignore_eos=True, full_attention="never")
    assert plain.stats.passes == 0 and few.ask("Who?", max_new_tokens=20, ignore_eos=True).stats.passes > 0


def test_refusals(loaded: Loaded) -> None:
    with pytest.raises(ConfigError, match="full_attention must be one of auto, always, never, exact"):
        ra.Config(full_attention="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="full_attention"):
        ra.Sampling(full_attention="yes")  # type: ignore[arg-type]
    few, _ = contexts(loaded, 2, 200)
    with pytest.raises(ConfigError, match="drop question_attention"):
        few.ask("Who?", question_attention="retrieval", full_attention="exact")
    assert "exact" in FULL_ATTENTION


def test_an_engine_refuses(needle_model_path: Path) -> None:
    llm = ra.LLM(needle_model_path, device="cpu", full_attention="exact")
    with pytest.raises(ConfigError, match="is for Context.ask"):
        Engine(llm)


# -- lengths of blocks ----------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float, Callable[[int], float]], int]]:
    monkeypatch.undo()

    def choose(draft: float, chance: float, seconds: Callable[[int], float]) -> int:
        length, rolls, costs = BlockLength(), random.Random(1), PassCosts()
        assert length.choose(99, costs) == 3 and length.choose(2, costs) == 0
        length.note_seconds(draft)
        costs.note(4, seconds(4))
        assert length.choose(99, costs) == 0  # until a token's own pass is measured
        for _ in range(200):
            count, right = length.choose(99, costs), 0
            costs.note(1 + count, seconds(1 + count))
            while right < count and rolls.random() < chance:
                right += 1
            length.note(right, right < count)
        counts = [length.choose(99, costs) for _ in range(MEASURE_AFTER + 2)]
        assert any(counts)  # the time of drafts is measured again
        return counts[-1] or max(counts, key=counts.count)

    yield choose


def test_blocks_are_as_long_as_pays(chosen: Callable[..., int]) -> None:
    """A pass over a bus costs 38 drafts: long blocks. One that costs a draft: none."""
    assert chosen(0.009, 0.995, lambda tokens: 0.34) == BLOCK_SIZES[-1]
    assert chosen(0.009, 0.6, lambda tokens: 0.34) in (3, 7)
    assert chosen(0.01, 0.99, lambda tokens: 0.01 * tokens) == 0
    assert chosen(0.01, 0.99, lambda tokens: 0.05 + 0.001 * tokens) in (15, 31)


def test_bytes_of_a_pass(loaded: Loaded) -> None:
    few, _ = contexts(loaded, 1, 400)
    tokens = few.num_tokens - 4 - 48
    assert host_bytes(few.cache) == 5 * tokens * 2 * 2 * 64 * 4


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_on_a_gpu(name: str) -> None:
    """Keys that stay on the host are uploaded layer by layer for each pass; drafts are captured steps."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, ids = build_model(name).cuda(), random_ids(1, 700, 0).cuda()
    found, steps = list[list[int]](), None
    for options in (POOR, ALL):
        cache = RetrievalCache(model, ra.Config(**options, prefill_chunk=512, index="sketch"))
        exact = options is POOR
        tokens, steps = greedy_tokens(model, cache, ids, exact=exact)
        found.append(tokens)
        assert steps is None or (isinstance(steps, ExactSteps) and steps.drafts.length.drafted > 40)
    assert found[0] == found[1]


@pytest.mark.cuda
def test_answers_on_a_gpu(needle_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes on the device draft, and all keys do not fit: none is brought there for the answer."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr("retrieval_attn.runner.full_attention._missing_bytes", lambda *_, **__: 1 << 30)
    model: Any = load_model(needle_model_path, device="cuda", dtype="float32")
    llm = ra.LLM(needle_model_path, device="cuda", dtype="float32", retrieve=4, window=64, sink=4)
    context = llm.read(text_of(5, 900), progress=False)
    full = ra.Context(llm.model, llm.tokenizer, ra.Config(retrieve="all", window=64, sink=4, graph=False))
    full.read(text_of(5, 900), progress=False)
    for options in ({}, {"temperature": 0.8, "seed": 4}):
        long: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": True, **options}
        exact = context.ask("Who owes what to the captain, and why?", full_attention="exact", **long)
        assert exact.tokens == full.ask("Who owes what to the captain, and why?", **long).tokens
        assert exact.stats.drafted_tokens and exact.stats.passes and exact.stats.all_keys is None
    del model
