"""Hybrid models decoded by a graph: their states are advanced once by every token that counts, and by no other.

Emulated here, real on a GPU (`cuda`). What they are compared with is eager decoding of the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.memory.device import GRAPH_STATES
from retrieval_attn.runner.decode import DecodeSteps, PromptState, TokenChoice, forward, run
from retrieval_attn.runner.graph.decode_graph import ALONE, DecodeGraph
from retrieval_attn.runner.graph.pool import forget
from retrieval_attn.runner.graph.states import StepStates
from tests.emulation import emulated as emulation
from tests.emulation.runtime import EmulatedRuntime
from tests.gpu.test_polling import Careless
from tests.model.test_hybrid import CONFIGS, new_model
from tests.runner.graph_cases import CONFIG, DEVICE_CASES, NEW, PROMPT, ROARGRAPH, Decoded, broken_search, decoder_of
from tests.tiny_models import random_ids

TOLERANCE = 1e-5
GPU_TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "batch padded": {"batch": 2, "padded": 5},
    "shared": {"repeats": 3},
    "grows into retrieval": {"prompt": 14, "new": 40},
    "roargraph": {"config": CONFIG.replace(**ROARGRAPH), "prompt": 200},
    "codes in two halves": {**DEVICE_CASES["device"], "batch": 2},
}
emulated = pytest.mark.usefixtures("emulated_graphs", "small_graphs")


def enabled(name: str, **changes: Any) -> Any:
    """A new model that retrieves, with weights so large that its states move the logits."""
    return ra.enable(new_model(name, initializer_range=0.2, **changes), CONFIG)


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    """A family."""
    return str(request.param)


def compare(model: Any, tolerance: float, **case: Any) -> Decoded:
    """Graph and eager decoding are equal; returns the former."""
    eager, graphed = Decoded(model, False, **case), Decoded(model, True, **case)
    scale = float(torch.stack(eager.logits).abs().max())
    assert graphed.difference(eager) <= tolerance * max(1.0, scale)
    assert graphed.steps.replays == case.get("new", NEW)
    return graphed


@emulated
def test_replays_equal_eager_decoding(name: str) -> None:
    """Across a spill; one capture serves the next cache, too."""
    model = enabled(name)
    first = compare(model, TOLERANCE)
    second = compare(model, TOLERANCE, prompt=PROMPT + 7)
    assert second.decoder is first.decoder and second.decoder.captures == 1
    memory = first.decoder.states
    states = sum(layer.nbytes for layer in first.cache.layers if isinstance(layer, StateLayer))
    assert 1 + ALONE.undo_steps == GRAPH_STATES
    assert GRAPH_STATES * states <= memory.nbytes <= GRAPH_STATES * states + 8192  # each state rounded up


@emulated
@pytest.mark.parametrize("case", CASES)
def test_batches_and_options_equal_eager_decoding(case: str) -> None:
    """Qwen3-Next: rows, padding, two graphs, kinds of index."""
    compare(enabled("qwen3_next"), TOLERANCE, **CASES[case])


def eagerly(model: Any, cache: Any, token: int) -> Tensor:
    """Logits after one more token, by an ordinary forward."""
    place = torch.tensor([[cache.get_seq_length()]], device=model.device)
    with torch.no_grad():
        return forward(model, cache, torch.tensor([[token]], device=model.device), mask=None, position_ids=place)


def differs(one: Tensor, other: Tensor) -> float:
    """Largest difference."""
    return float((one - other).abs().max())


def thrown_away(model: Any) -> float:
    """Steps that go ahead, one that is thrown away, forks meanwhile; the largest difference to eager forwards."""
    decoded, plain = Decoded(model, True, new=2), Decoded(model, False, new=2)
    steps, worst, device = DecodeSteps(model, decoded.cache, True), 0.0, model.device
    start = decoded.cache.get_seq_length()

    token, forks = 5, []
    for count in range(12):
        at = torch.tensor([start + count], device=device)
        logits = steps.step(torch.tensor([token], device=device), at, None).clone()
        assert steps.chosen is not None
        chosen = int(steps.chosen)
        went = steps.launch_next()
        if count == 4:  # neither has happened yet: the fork does not know of them
            early = decoded.cache.fork()
            worst = max(worst, differs(eagerly(model, early, 9), eagerly(model, plain.cache.fork(), 9)))
        if count == 7:  # an interrupt here: both are thrown away, and the first is made again
            steps.discard()
            logits = steps.step(torch.tensor([token], device=device), at, None).clone()
            went = False
        steps.confirm()
        worst = max(worst, differs(logits, eagerly(model, plain.cache, token)))
        if count == 5:  # the next has been launched already
            forks = [decoded.cache.fork(), plain.cache.fork()]
        if went:
            steps.discard()  # a stop string, say
        token = 3 if count % 3 else chosen
    steps.close()
    worst = max(worst, differs(eagerly(model, decoded.cache, 4), eagerly(model, plain.cache, 4)))
    return max(worst, differs(eagerly(model, forks[0], 6), eagerly(model, forks[1], 6)))


@emulated
@torch.no_grad()
def test_steps_that_are_thrown_away_leave_no_trace(name: str) -> None:
    """One that went ahead; two at once; forks between a launch and its token."""
    assert thrown_away(enabled(name)) <= 10 * TOLERANCE


@emulated
@torch.no_grad()
def test_rows_that_change_between_steps(name: str) -> None:
    """Beams take each other's place in the buffers; more rows than the graph has decode eagerly."""
    model = enabled(name)
    seen = []
    for graph in ("auto", False):
        cache = Decoded(model, False, batch=2, new=1).cache
        steps = DecodeSteps(model, cache, graph)

        def step(tokens: list[int], cache: Any = cache, steps: DecodeSteps = steps) -> Tensor:
            place = torch.full((len(tokens),), cache.get_seq_length())
            logits = steps.step(torch.tensor(tokens), place, None).clone()
            steps.confirm()
            return logits

        out = [step([5, 6]), step([6, 7])]
        cache.reorder_cache(torch.tensor([1, 0]))
        out += [step([7, 8]), step([8, 9])]
        assert steps.replays == (4 if graph else 0)
        cache.batch_repeat_interleave(2)
        out += [step([7, 8, 9, 10]), step([11, 12, 13, 14])]
        steps.close()
        assert steps.replays == (4 if graph else 0) and ("shapes" in steps.reason) == bool(graph)
        seen.append(out)
    assert all(differs(one, other) <= TOLERANCE for one, other in zip(*seen, strict=True))


@emulated
@torch.no_grad()
@pytest.mark.parametrize("how", ["reset", "crop"])
def test_a_cache_that_forgets_all_between_steps(how: str) -> None:
    """It begins anew, eagerly: there are no windows and no states that could be bound."""
    model, firsts = enabled("qwen3_next"), []
    for graph in ("auto", False):
        cache = Decoded(model, False, new=1).cache
        steps = DecodeSteps(model, cache, graph)
        steps.step(torch.tensor([5]), torch.tensor([PROMPT + 1]), None)
        steps.confirm()
        if how == "reset":
            cache.reset()
        else:
            cache.crop(-cache.get_seq_length())
        firsts.append([steps.step(torch.tensor([5 + i]), torch.tensor([i]), None).clone() for i in range(3)])
        steps.close()
        assert ("cache is empty" in steps.reason) == bool(graph)
    assert all(differs(one, other) <= TOLERANCE for one, other in zip(*firsts, strict=True))


def turns(model: Any, graph: bool, interrupted: int | None = None) -> tuple[list[list[int]], Tensor]:
    """Three texts on one cache, with tokens of a user between, and logits after them.

    The second text ends at the first even id, or by Ctrl-C at its token number `interrupted`.
    """
    cache, texts = ra.RetrievalCache(model, CONFIG), []
    ids = random_ids(1, PROMPT).to(model.device)
    for turn in range(3):
        known, tokens = cache.get_seq_length(), ids.shape[1]
        place = torch.arange(known, tokens, device=model.device)[None]
        with torch.no_grad():
            logits = forward(model, cache, ids[:, known:], mask=None, position_ids=place)
        criteria = StoppingCriteriaList([MaxLengthCriteria(tokens + 9)])
        if turn == 1 and interrupted is None:
            criteria.append(EosTokenCriteria(list(range(2, model.config.vocab_size, 2))))
        seen: list[int] = []

        def on_token(token: list[int], seen: list[int] = seen, last: int | None = interrupted if turn == 1 else None):  # type: ignore[no-untyped-def]
            seen.extend(token)
            if len(seen) == last:
                raise KeyboardInterrupt

        try:
            done = run(
                model,
                cache,
                PromptState(ids, logits, place[:, -1]),
                TokenChoice(criteria),
                on_token=on_token,
                graph=graph,
            )
            assert done.how == ("graph" if graph and len(seen) > 1 else "eager")
        except KeyboardInterrupt:
            assert cache.get_seq_length() == tokens + len(seen) - 1
        texts.append(seen)
        mine = random_ids(1, 4, seed=turn).to(model.device)
        ids = torch.cat([ids, torch.tensor([seen], device=model.device), mine], dim=1)
    return texts, eagerly(model, cache, 7)


@emulated
@pytest.mark.parametrize("interrupted", [None, 4], ids=["stop", "interrupt"])
def test_turns_equal_eager_ones(name: str, interrupted: int | None) -> None:
    """The loop with its lookahead: texts, and what the cache says afterwards."""
    model = enabled(name)
    (texts, final), (expected, wanted) = turns(model, True, interrupted), turns(model, False, interrupted)
    assert texts == expected and len(texts[2]) == 9
    assert differs(final, wanted) <= 10 * TOLERANCE


@emulated
def test_a_failed_search_costs_its_token() -> None:
    """And its step of the state."""
    broken_search(enabled("qwen3_next"), True)


@torch.no_grad()
@pytest.mark.parametrize("how", ["stops half-way", "is not answered"])
def test_a_step_ahead_that_fails_leaves_the_one_before(how: str, fresh_decoders: None) -> None:
    """Which still counts, with its states: emulated."""
    runtime = EmulatedRuntime(CallTable if how == "stops half-way" else Careless)
    with emulation.emulated(runtime):
        model = enabled("qwen3_next")
        decoded, plain = Decoded(model, True, new=2), Decoded(model, False, new=2)
        steps, start = DecodeSteps(model, decoded.cache, True), decoded.cache.get_seq_length()
        logits = steps.step(torch.tensor([5]), torch.tensor([start]), None).clone()
        assert differs(logits, eagerly(model, plain.cache, 5)) <= TOLERANCE
        steps.confirm()
        steps.step(torch.tensor([6]), torch.tensor([start + 1]), None)
        (captured,) = decoder_of(steps).graphs.values()
        replay: Any = captured.replay
        work, nodes = replay.work, replay.work.__self__.nodes
        if how == "stops half-way":
            replay.work = torch.no_grad()(lambda: [node() for node in nodes[: len(nodes) // 2]])
            with pytest.raises(BackendError, match="the device finished without a request"):
                steps.launch_next()
            replay.work = work
            steps.confirm()
        else:
            runtime.patience, replay.server.mistake = 0.3, "skip"
            assert steps.launch_next()
            replay.server.mistake = ""
            steps.confirm()
            with pytest.raises(BackendError, match="layer 3: the device gave up waiting"):
                steps.confirm()
        assert decoded.cache.get_seq_length() == start + 2
        eagerly(model, plain.cache, 6)
        for count in range(2, 5):
            logits = steps.step(torch.tensor([7]), torch.tensor([start + count]), None).clone()
            steps.confirm()
            assert differs(logits, eagerly(model, plain.cache, 7)) <= TOLERANCE
        steps.close()


def fed(model: Any, graph: bool) -> Tensor:
    """Logits after each of twelve given tokens."""
    cache = ra.RetrievalCache(model, CONFIG, check=False)
    steps, logits = DecodeSteps(model, cache, graph), []
    with torch.no_grad():
        place = torch.arange(PROMPT, device=model.device)[None]
        forward(model, cache, random_ids(1, PROMPT).to(model.device), mask=None, position_ids=place)
        for token in range(12):
            at = torch.tensor([PROMPT + token], device=model.device)
            logits.append(steps.step(torch.full_like(at, 3 + token), at, None).clone())
            logits[-1].tolist()
            steps.confirm()
    steps.close()
    return torch.stack(logits)


_undo, _confirm = StepStates.undo, DecodeGraph.confirm


def _forgets_the_last_trial(memory: StepStates, keep: int = 0) -> None:
    """Every capture begins with two trials; what only the first of them did to a state, it would notice itself."""
    undone = memory.__dict__["undone"] = memory.__dict__.get("undone", 0) + 1
    if undone <= 2:
        _undo(memory, keep)
    else:
        memory._launched.fill_(memory.confirmed + keep)


def _undoes_too_much(graph: DecodeGraph) -> None:
    _confirm(graph)
    graph.decoder.states.confirmed -= 1
    graph.decoder.states.undo()


BREAKS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "advanced twice": (StepStates, "undo", _forgets_the_last_trial),
    "not advanced": (DecodeGraph, "confirm", _undoes_too_much),
}


@emulated
@pytest.mark.parametrize("broken", BREAKS)
def test_the_comparison_has_teeth(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that a step advances twice, or not at all, moves the logits."""
    model = enabled(name)
    expected = fed(model, False)
    monkeypatch.setattr(*BREAKS[broken])
    assert differs(fed(model, True), expected) > 1000 * TOLERANCE


def test_a_layer_that_makes_its_state_anew_decodes_eagerly(
    emulated_graphs: None, needle_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would write where the layer no longer looks. The answer says so, and is right."""
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    model = new_model("qwen3_next", vocab_size=len(tokenizer))

    def assigned(layer: StateLayer, states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        layer.recurrent_states[state_idx] = states.clone()
        layer.is_recurrent_states_initialized[state_idx] = True
        return states

    # a trial that was given up leaves the state off by a thousandth: tokens are those of one text, not of any
    monkeypatch.setattr("tests.runner.test_hybrid_graph.CONFIG", CONFIG.replace(tail=False))
    expected = answers(model, tokenizer, False)
    monkeypatch.setattr(StateLayer, "update_recurrent_state", assigned)
    got = answers(model, tokenizer, "auto")
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert "layer 0 allocates a new tensor for its recurrent_states" in got[0].stats.decoded
    with pytest.raises(CaptureError, match="layer 0 allocates a new tensor for its recurrent_states"):
        answers(model, tokenizer, True)


def answers(model: Any, tokenizer: Any, graph: Any) -> list[Any]:
    """Questions, alone and several at once, before and after the context has grown."""
    context = ra.Context(model, tokenizer, CONFIG.replace(graph=graph))
    context.read("Some words of a text. " * 30, progress=False)
    got = [context.ask("What is it?", max_new_tokens=8)]
    got += context.ask_many(["And then?", "Or not at all, as it seems?"], max_new_tokens=6)
    context.extend("More of it, and more. " * 5, progress=False)
    return [*got, context.ask("What is it?", max_new_tokens=8), context.ask("And?", max_new_tokens=8)]


@emulated
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_contexts_answer_the_same(name: str, needle_model_path: Path) -> None:
    """Forks of one context take turns in one decoder."""
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    model = new_model(name, vocab_size=len(tokenizer), initializer_range=0.2)
    expected, got = answers(model, tokenizer, False), answers(model, tokenizer, True)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert {answer.stats.decoded for answer in got} == {"graph"}


GPU_SHAPES: dict[str, dict[str, Any]] = {
    "64": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128},
    "128": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128},
}


@pytest.fixture
def _float32_is_float32(fresh_decoders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.cuda
@pytest.mark.usefixtures("_float32_is_float32")
@pytest.mark.parametrize("head_dim", GPU_SHAPES)
def test_a_real_graph_equals_eager_decoding(name: str, head_dim: str) -> None:
    """Four query heads per key-value head; a batch; steps that are thrown away; three turns; an interrupt."""
    model = enabled(name, **GPU_SHAPES[head_dim]).cuda()
    compare(model, GPU_TOLERANCE)
    compare(model, GPU_TOLERANCE, batch=2)
    with torch.no_grad():
        assert thrown_away(model) <= 10 * GPU_TOLERANCE
    for interrupted in (None, 4):
        (texts, final), (expected, wanted) = turns(model, True, interrupted), turns(model, False, interrupted)
        assert texts == expected and differs(final, wanted) <= 10 * GPU_TOLERANCE


@pytest.mark.cuda
@pytest.mark.usefixtures("_float32_is_float32")
@pytest.mark.parametrize("broken", BREAKS)
def test_the_comparison_on_a_gpu_has_teeth(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for real graphs."""
    model = enabled(name, **GPU_SHAPES["64"]).cuda()
    expected = fed(model, False)
    assert differs(fed(model, True), expected) <= 10 * GPU_TOLERANCE
    forget(model)
    monkeypatch.setattr(*BREAKS[broken])
    assert differs(fed(model, True), expected) > 10 * 10 * GPU_TOLERANCE


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_auto_takes_a_graph(name: str, dtype: torch.dtype) -> None:
    decoded = Decoded(enabled(name, **GPU_SHAPES["128"]).to("cuda", dtype), "auto", new=2)
    assert not decoded.steps.reason and decoded.steps.replays == 2
