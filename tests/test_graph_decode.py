"""The decode step as one graph, emulated: the same logits as eagerly, across spills, batches, forks and errors."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.config import GraphMode
from retrieval_attn.cpu.serve import Server
from retrieval_attn.engine import graph as graph_decode
from retrieval_attn.engine import graph_layer as graph_layers
from retrieval_attn.engine.decode import PromptState, Steps, TokenChoice, forward, positions, run
from retrieval_attn.engine.graph import GraphDecoder
from retrieval_attn.errors import BackendError, CaptureError, ConfigError, ContextLengthError
from retrieval_attn.gpu.capture.emulate import EmulatedRuntime
from retrieval_attn.gpu.capture.exchange import VARIABLE, Hop
from tests.tiny_models import random_ids, tiny_model

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "spill": 8, "retrieve": 12, "index": "flat"}
CONFIG = ra.Config(**SMALL)
# so few keys that even a small retrieve is needed for a graph to be searched at all
ROARGRAPH: dict[str, Any] = {
    "index": "roargraph",
    "index_options": {"exact_below": 0},
    "train_queries": 64,
    "retrieve": 2,
}
DEVICE: dict[str, Any] = {"index": "device", "train_queries": 64, "retrieve": 2, "index_options": {"key_bytes": 64}}
DEVICE_CASES: dict[str, dict[str, Any]] = {
    "device": {"config": CONFIG.replace(**DEVICE), "prompt": 200},
    "device padded": {"config": CONFIG.replace(**DEVICE), "prompt": 200, "batch": 2, "padded": 5},
    "device one short": {"config": CONFIG.replace(**DEVICE), "prompt": 200, "batch": 2, "padded": 190, "new": 30},
    "device shared": {"config": CONFIG.replace(**DEVICE), "prompt": 400, "repeats": 2},
}
PROMPT, NEW = 60, 12  # spills after 8 tokens


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test continues another's decoders, or takes the exchange from its environment."""
    graph_decode._decoders.clear()
    graph_decode._failed.clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    yield


@pytest.fixture(params=["push", "node"])
def hop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hop]:
    """The test runs once with each exchange."""
    monkeypatch.setenv(VARIABLE, request.param)
    yield request.param


def enabled(name: str) -> Any:
    """A copy of the model that retrieves."""
    return ra.enable(copy.deepcopy(tiny_model(name)), CONFIG)


def padded_mask(batch: int, tokens: int, padded: int) -> Tensor:
    """Row i begins with padded * i padded columns."""
    return torch.arange(tokens)[None] >= padded * torch.arange(batch)[:, None]


class Decoded:
    """Logits of the prompt's last token and of `new` tokens after it, chosen greedily; and what decoded them."""

    def __init__(
        self,
        model: Any,
        graph: GraphMode,
        *,
        config: ra.Config = CONFIG,
        batch: int = 1,
        repeats: int = 1,
        padded: int = 0,
        prompt: int = PROMPT,
        new: int = NEW,
    ) -> None:
        self.cache = ra.RetrievalCache(model, config, check=False)
        device = model.device
        mask = padded_mask(batch, prompt, padded).to(device) if padded else None
        place = positions(torch.ones(batch, prompt, device=device) if mask is None else mask)
        with torch.no_grad():
            logits = forward(model, self.cache, random_ids(batch, prompt).to(device), mask=mask, position_ids=place)
        self.cache.batch_repeat_interleave(repeats)
        logits, position = logits.repeat_interleave(repeats, 0), place[:, -1].repeat_interleave(repeats)
        # rows that share a path must not stay equal
        logits = logits + 3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device)
        mask = None if mask is None else mask.repeat_interleave(repeats, 0)
        self.logits = [logits]
        self.steps = Steps(model, self.cache, graph)
        try:
            self._decode(new, position, mask)
        finally:
            self.decoder: Any = self.steps._decoder
            self.steps.close()

    @torch.no_grad()
    def _decode(self, new: int, position: Tensor, mask: Tensor | None) -> None:
        for _ in range(new):
            position = position + 1
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self.steps.step(self.logits[-1].argmax(-1), position, mask)
            self.logits.append(logits.clone())
            self.logits[-1].tolist()  # waits for the device
            self.steps.confirm()

    def difference(self, other: Decoded) -> float:
        """Largest difference of logits; the tokens must be the same."""
        mine, others = torch.stack(self.logits), torch.stack(other.logits)
        assert torch.equal(mine.argmax(-1), others.argmax(-1))
        return float((mine - others).abs().max())


@pytest.mark.parametrize("name", ["llama31", "qwen3", "gemma2", "gemma3", "mistral_sliding", "gpt_oss", "qwen3_moe"])
def test_replays_equal_eager_decoding(name: str, hop: Hop) -> None:
    """Soft-cap, sliding layers, learned sinks, experts; spills cross. Everything but the first pass is a replay."""
    model = enabled(name)
    eager, graphed = Decoded(model, False), Decoded(model, "emulate")
    assert graphed.difference(eager) <= 1e-5
    assert graphed.decoder.captures == 1 and graphed.decoder.replays == graphed.steps.replays == NEW
    assert graphed.decoder.runtime.hop == hop
    assert graphed.cache.get_seq_length() == eager.cache.get_seq_length() == PROMPT + NEW
    mine, others = graphed.cache.stats(), eager.cache.stats()
    assert (mine.keys_scanned, mine.bytes_read) == (others.keys_scanned, others.bytes_read)
    assert name == "mistral_sliding" or mine.host_seconds > 0


@pytest.mark.parametrize(("batch", "turns"), [(1, 1), (2, 2), (3, 2)])
def test_rows_with_codes_on_the_device_take_turns(batch: int, turns: int, hop: Hop) -> None:
    """The host works on the first rows while the device searches the codes of the others: two calls per layer."""
    model = enabled("llama")
    case = {**DEVICE_CASES["device"], "batch": batch, "new": 3}
    eager, graphed = Decoded(model, False, **case), Decoded(model, "emulate", **case)
    assert graphed.difference(eager) <= 1e-5
    runtime, steps = graphed.decoder.runtime, graphed.steps
    before = runtime.calls
    Decoded(model, "emulate", **case)
    assert runtime.calls - before == turns * len(graphed.cache.layers) * steps.replays
    mine, others = graphed.cache.stats(), eager.cache.stats()
    assert mine.host_seconds > 0 and mine.keys_scanned == others.keys_scanned > 0


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"batch": 2, "padded": 5},
        {"repeats": 3},
        {"batch": 2, "repeats": 2, "padded": 5},
        {"config": CONFIG.replace(retrieve=0.2)},
        {"config": CONFIG.replace(window=1, spill=1, sink=0), "new": 5},
        {"prompt": 14, "new": 24},
        {"batch": 2, "padded": 5, "prompt": 14, "new": 14},
        {"config": CONFIG.replace(**ROARGRAPH), "prompt": 200},
        *DEVICE_CASES.values(),
    ],
    ids=[
        "batch",
        "padded",
        "shared",
        "shared padded",
        "share",
        "spill always",
        "grows into retrieval",
        "padded window",
        "roargraph",
        *DEVICE_CASES,
    ],
)
def test_batches_and_options_equal_eager_decoding(options: dict[str, Any], hop: Hop) -> None:
    """Rows on one path are searched together until a spill parts them; a short prompt begins without a host part."""
    model = enabled("llama")
    eager, graphed = Decoded(model, False, **options), Decoded(model, "emulate", **options)
    assert graphed.difference(eager) <= 1e-5
    assert graphed.steps.replays == options.get("new", NEW)
    assert graphed.decoder.captures == (2 if options.get("prompt") == 14 else 1)


def test_sliding_windows_slide_past_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma-2's sliding layers drop what no query sees when their buffer is full, between two replays."""
    monkeypatch.setattr(graph_layers, "SLIDING_ROOM", 5)
    model = enabled("gemma2")
    eager, graphed = Decoded(model, False, prompt=300), Decoded(model, "emulate", prompt=300)
    assert graphed.difference(eager) <= 1e-5 and graphed.decoder.captures == 1
    assert graphed.decoder._slots[0]._key.shape[2] == graphed.cache.layers[0].keep + 5  # type: ignore[union-attr]


def test_the_next_cache_reuses_the_graph(hop: Hop) -> None:
    """Contexts, questions and forks take turns in one decoder; a cache keeps its tokens when it leaves."""
    model = enabled("llama")
    first = Decoded(model, "emulate")
    second = Decoded(model, "emulate", prompt=PROMPT + 7)
    assert second.decoder is first.decoder and second.decoder.captures == 1
    assert second.difference(Decoded(model, False, prompt=PROMPT + 7)) <= 1e-5
    # the first cache goes on where it stopped, from its own window, as one does that never was in a graph
    forks = [Decoded(model, False).cache.fork(), first.cache.fork()]
    logits = []
    for fork, graph in zip(forks, (False, "emulate"), strict=True):
        steps = Steps(model, fork, graph)  # type: ignore[arg-type]
        with torch.no_grad():
            for token in (5, 6):
                logits.append(steps.step(torch.tensor([token]), torch.tensor([fork.get_seq_length()]), None).clone())
                steps.confirm()
        steps.close()
    assert (logits[0] - logits[2]).abs().max() <= 1e-5 and (logits[1] - logits[3]).abs().max() <= 1e-5
    assert first.decoder.captures == 1


def test_a_cache_changed_between_steps_is_taken_anew() -> None:
    """Crops, forks and eager forwards while a graph is bound: both see the same tokens."""
    model = enabled("llama")
    results = []
    for graph in (False, "emulate"):
        decoded = Decoded(model, graph, new=3)
        steps = Steps(model, decoded.cache, graph)
        seen = []
        with torch.no_grad():
            for token in range(5, 11):
                if token == 7:
                    decoded.cache.crop(-1)
                if token == 8:
                    fork = decoded.cache.fork()
                    assert fork.get_seq_length() == decoded.cache.get_seq_length()
                place = torch.tensor([decoded.cache.get_seq_length()])
                if token == 9:
                    ids = torch.tensor([[token]])
                    seen.append(forward(model, decoded.cache, ids, mask=None, position_ids=place[None]))
                    continue
                seen.append(steps.step(torch.tensor([token]), place, None).clone())
                steps.confirm()
        steps.close()
        place = torch.tensor([[fork.get_seq_length()]])
        seen.append(forward(model, fork, torch.tensor([[3]]), mask=None, position_ids=place))
        results.append(torch.stack(seen))
    assert (results[0] - results[1]).abs().max() <= 1e-5


def read(model: Any, cache: Any, ids: Tensor, new: int) -> tuple[PromptState, StoppingCriteriaList]:
    """Read ids (batch, tokens) without padding: what `run` continues, and what ends it after `new` tokens."""
    batch, count = ids.shape
    place = torch.arange(count)[None].expand(batch, -1)
    with torch.no_grad():
        logits = forward(model, cache, ids, mask=None, position_ids=place)
    return PromptState(ids, logits, place[:, -1]), StoppingCriteriaList([MaxLengthCriteria(count + new)])


def generated(model: Any, graph: GraphMode, **options: Any) -> Any:
    """The whole token loop, with its scores."""
    cache = ra.RetrievalCache(model, CONFIG)
    prompt, criteria = read(model, cache, random_ids(2, PROMPT), 12)
    tokens: list[list[int]] = []
    choice = TokenChoice(criteria, do_sample=True, keep_scores=True, keep_logits=True, **options)
    result = run(model, cache, prompt, choice, on_token=tokens.append, graph=graph)
    assert torch.tensor(tokens).T.tolist() == result.sequences[:, PROMPT:].tolist()
    return result


def test_the_token_loop_is_the_same() -> None:
    """Sampling with a seed, a processor that writes to the scores it is given, kept scores and logits."""

    def flatten(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.div_(2.0)

    model = enabled("llama")
    for options in ({}, {"processors": LogitsProcessorList([flatten])}):
        pairs = []
        for graph in (False, "emulate"):
            generator = torch.Generator().manual_seed(3)
            pairs.append(generated(model, graph, generator=generator, **options))
        eager, graphed = pairs
        assert torch.equal(eager.sequences, graphed.sequences)
        for name in ("scores", "logits"):
            mine, others = torch.stack(getattr(graphed, name)), torch.stack(getattr(eager, name))
            assert (mine - others).abs().max() <= 1e-5


def test_generate_takes_the_switch_from_the_options() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    out = [greedily(model, random_ids(1, PROMPT), graph) for graph in (False, "emulate")]
    assert torch.equal(out[0], out[1])
    (decoder,) = graph_decode._decoders[model]
    assert decoder.replays == out[0].shape[1] - PROMPT - 1
    with pytest.raises(ConfigError, match='graph must be "auto", True, False or "emulate", got 3'):
        ra.Config(graph=3)  # type: ignore[arg-type]


def broken_search(model: Any, graph: GraphMode) -> None:
    """A graph whose index names tokens that are not there: an error of that search, then repaired, then equal."""
    decoded = Decoded(model, graph, config=CONFIG.replace(**ROARGRAPH), prompt=200, new=1)
    host: Any = decoded.cache.layers[1]
    found = host.hosts[0].segments[0].indexes[1].search_arguments()[0].graph
    ids, before = found.ids.copy(), decoded.cache.get_seq_length()
    token, place = torch.tensor([5], device=model.device), torch.tensor([before], device=model.device)
    expected = decoded.cache.fork()
    steps = Steps(model, decoded.cache, graph)
    found.ids[:] = -5
    steps.step(token, place, None).tolist()
    with pytest.raises(BackendError, match="layer 1, sequence 0, key-value head 1, query . of its group: its index"):
        steps.confirm()
    assert decoded.cache.get_seq_length() == before
    found.ids[:] = ids
    again = steps.step(token, place, None).clone()
    again.tolist()
    steps.confirm()
    steps.close()
    assert decoded.decoder.captures == 1 and decoded.cache.get_seq_length() == before + 1
    wanted = forward(model, expected, token[None], mask=None, position_ids=place[None])
    assert (again - wanted).abs().max() <= 2e-5


@torch.no_grad()
def test_an_error_of_a_search_names_its_layer(hop: Hop) -> None:
    """It surfaces after the replay; the cache keeps what was confirmed and goes on."""
    broken_search(enabled("llama"), "emulate")


def test_a_step_goes_ahead_of_the_one_before(hop: Hop) -> None:
    """With what the device chose; where the host's part is over when a replay returns; full windows stop it."""
    model = enabled("llama")
    decoded = Decoded(model, "emulate", new=2)
    expected = Decoded(model, False, new=2)
    before = decoded.cache.get_seq_length()
    steps = Steps(model, decoded.cache, "emulate")
    seen, chosen, went = [], [], [False]
    with torch.no_grad():
        token, logits = torch.tensor([5]), torch.empty(0)
        for i in range(15):
            if not went[-1]:
                logits = steps.step(token, torch.tensor([before + i]), None)
            assert steps.chosen is not None
            seen.append(logits.clone())
            token = steps.chosen.clone()
            went.append(steps.ahead())
            steps.confirm()
            chosen.append(int(token))
            assert decoded.cache.get_seq_length() == before + i + 1
        assert sum(went) == 0 if hop == "node" else 11 <= sum(went) < 15 and went[-1], went  # full twice
        steps.close()
        assert decoded.cache.get_seq_length() == before + 15  # what went ahead last did not happen
        for i, fed in enumerate([5, *chosen[:-1]]):
            place = torch.tensor([[before + i]])
            plain = forward(model, expected.cache, torch.tensor([[fed]]), mask=None, position_ids=place)
            assert (seen[i] - plain).abs().max() <= 1e-5
            assert chosen[i] == int(plain.argmax())


@pytest.mark.parametrize("new", [1, 2, 3, 7, 24])
def test_the_follower_chooses_as_the_loop_does(hop: Hop, new: int) -> None:
    """Lengths and ends of text, one row and several; a row that ends before the others gets padding."""
    model = enabled("llama")
    for batch in (1, 3):
        ids = random_ids(batch, 90)
        plain = texts(model, ids, new, graph=False)
        assert texts(model, ids, new, graph="emulate") == plain
        for row in range(batch):
            end = plain[0][row][new // 2]  # the token that this row ends with now
            shorter = texts(model, ids, new, graph=False, end=end)
            assert texts(model, ids, new, graph="emulate", end=end) == shorter
            assert len(shorter[1]) < new or new < 3 or batch > 1


def texts(model: Any, ids: torch.Tensor, new: int, graph: Any, end: int | None = None) -> tuple[Any, ...]:
    """New ids of every row, what `on_token` was told, and the cache's length."""
    cache = ra.RetrievalCache(model, CONFIG)
    count = ids.shape[1]
    prompt, criteria = read(model, cache, ids, new)
    if end is not None:
        criteria.append(EosTokenCriteria(end))
    told: list[list[int]] = []
    done = run(model, cache, prompt, TokenChoice(criteria, pad_id=7), on_token=told.append, graph=graph)
    assert done.new_tokens == len(told) == done.sequences.shape[1] - count
    return done.sequences[:, count:].tolist(), told, cache.get_seq_length()


@pytest.mark.parametrize("samples", [False, True], ids=["follower", "loop"])
@pytest.mark.parametrize("graph", [False, "emulate"], ids=["eager", "graph"])
def test_a_loop_that_is_cancelled_ends_at_once(graph: GraphMode, samples: bool) -> None:
    """The token at hand is the last, the cache holds one column less than the ids; what continues it is the same."""
    model = enabled("llama")
    cancelled = threading.Event()
    results = []
    for stop in (None, 5):
        cache = ra.RetrievalCache(model, CONFIG)
        prompt, criteria = read(model, cache, random_ids(2, PROMPT), 12)
        seen: list[list[int]] = []

        def on_token(token: list[int], seen: list[list[int]] = seen, stop: int | None = stop) -> None:
            seen.append(token)
            if len(seen) == stop:
                cancelled.set()

        choice = TokenChoice(criteria, do_sample=samples, generator=torch.Generator().manual_seed(3))
        done = run(model, cache, prompt, choice, on_token=on_token, cancelled=cancelled, graph=graph)
        assert done.new_tokens == len(seen) == done.sequences.shape[1] - PROMPT == (stop or 12)
        assert cache.get_seq_length() == PROMPT + len(seen) - 1
        assert all(layer.graph is None for layer in cache.layers)  # type: ignore[union-attr]
        assert done.how == ("eager" if graph is False else "graph")
        results.append(done.sequences)
    whole, ids = results
    place = torch.full((2,), PROMPT + 4)
    with torch.no_grad():
        logits = forward(model, cache, ids[:, -1:], mask=None, position_ids=place[:, None])
    rest = run(model, cache, PromptState(ids, logits, place), choice, graph=graph)
    assert torch.equal(rest.sequences, whole)


def test_an_error_ahead_comes_after_the_token_before() -> None:
    """A search that fails in a step that went ahead: the token before is told and stays, the error names the layer."""
    model = enabled("llama")
    told: list[list[int]] = []
    results = []
    for broken in (False, True):
        cache = ra.RetrievalCache(model, CONFIG.replace(**ROARGRAPH))
        ids = random_ids(1, 200)
        prompt, criteria = read(model, cache, ids, 8)
        layer: Any = cache.layers[1]
        layer.finish_index()
        found = layer.hosts[0].segments[0].indexes[1].search_arguments()[0].graph
        told.clear()

        def on_token(token: list[int], broken: bool = broken, found: Any = found) -> None:
            told.append(token)
            if broken and len(told) == 4:
                found.ids[:] = -5

        if broken:
            with pytest.raises(BackendError, match="layer 1, sequence 0, key-value head 1"):
                run(model, cache, prompt, TokenChoice(criteria), on_token=on_token, graph="emulate")
        else:
            run(model, cache, prompt, TokenChoice(criteria), on_token=on_token, graph="emulate")
        results.append((list(told), cache.get_seq_length()))
    (right, full), (until, length) = results
    assert len(right) == 8 and full == 207
    assert until == right[: len(until)] and 4 <= len(until) < 8 and length == 200 + len(until) - 1


def test_an_interrupt_in_a_replay_loses_only_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt where the CPU waits: the loop ends, the cache holds what was confirmed, the next run works."""
    model = enabled("llama")
    cache = ra.RetrievalCache(model, CONFIG)
    ids = random_ids(1, PROMPT)
    prompt, criteria = read(model, cache, ids, 12)
    count = [0]
    confirm = GraphDecoder.confirm

    def interrupted(decoder: GraphDecoder) -> None:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        confirm(decoder)

    monkeypatch.setattr(GraphDecoder, "confirm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, cache, prompt, TokenChoice(criteria), graph="emulate")
    assert cache.get_seq_length() == PROMPT + 3
    assert all(layer.graph is None for layer in cache.layers)  # type: ignore[union-attr]
    monkeypatch.undo()
    cache.crop(-3)
    assert torch.equal(
        run(model, cache, prompt, TokenChoice(criteria), graph="emulate").sequences, greedily(model, ids, False)
    )


def greedily(model: Any, ids: Tensor, graph: GraphMode) -> Tensor:
    """Twelve tokens by transformers' generate and our loop, from a new cache."""
    cache = ra.RetrievalCache(model, CONFIG.replace(graph=graph))
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    out: Tensor = model.generate(ids, custom_generate=ra.generate, past_key_values=cache, **options)
    return out


def test_contexts_answer_the_same(needle_model_path: Path) -> None:
    """Questions to a context: forks of one cache, one after the other through one decoder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    answers = []
    for graph in (False, "emulate"):
        context = ra.Context(loaded.eval(), tokenizer, CONFIG.replace(graph=graph))
        context.read("The special magic Bergen number is: 7391846. " + "The grass is green. " * 30, progress=False)
        asked = [context.ask("What is the special magic Bergen number?", max_new_tokens=8) for _ in range(2)]
        answers.append([answer.tokens for answer in asked])
    assert answers[0] == answers[1]
    (decoder,) = graph_decode._decoders[loaded]
    assert decoder.captures == 1 and decoder.replays > 0


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("phi3", {}, "longrope"),
        ("llama", {"retrieve": "all"}, "reference mode"),
        ("llama", {"mass_heads": 1}, "mass_heads"),
        ("llama", {"index": "ivf"}, "no compiled search"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    name: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Demanded, it is an error; else one log line and the same answers."""
    model = enabled(name)
    config = CONFIG.replace(**options)
    with pytest.raises(CaptureError, match=reason):
        Decoded(model, "emulate", config=config, new=2)
    runtime = EmulatedRuntime(Server)
    monkeypatch.setattr(graph_decode, "runtime_for", lambda model, emulate: runtime)
    with caplog.at_level(logging.WARNING, "retrieval_attn"):
        auto = [Decoded(model, "auto", config=config, new=2) for _ in range(2)]
    assert auto[0].difference(Decoded(model, False, config=config, new=2)) <= 1e-5
    said = [record.getMessage() for record in caplog.records if "decoding eagerly" in record.getMessage()]
    assert len(said) == 1 and reason in said[0]


class _Counting(torch.nn.Module):
    """Reads a value of its input on the CPU; or adds the number of cached tokens."""

    def __init__(self, inner: Any, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads, self.cache = inner, reads, None

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden)
        if self.reads:
            return out + (0.0 if float(out[0, 0, 0]) > 0 else 1.0)
        return out + (0.0 if self.cache is None else 0.1 * self.cache.get_seq_length())


@pytest.mark.parametrize("reads, reason", [(True, "_local_scalar_dense"), (False, "number of cached tokens")])
def test_steps_that_look_at_numbers_on_the_cpu_are_found(reads: bool, reason: str) -> None:
    """A synchronisation ends the capture; a count that Python put into the step would be frozen without a word."""
    model = enabled("llama")
    counting = model.model.layers[1].mlp = _Counting(model.model.layers[1].mlp, reads)
    with pytest.raises(CaptureError, match=reason):
        decoded_with(model, counting)
    with pytest.raises(CaptureError, match=reason):  # remembered: no second capture
        decoded_with(model, counting)


def decoded_with(model: Any, counting: _Counting) -> None:
    cache = ra.RetrievalCache(model, CONFIG, check=False)
    with torch.no_grad():
        place = torch.arange(PROMPT)[None]
        forward(model, cache, random_ids(1, PROMPT), mask=None, position_ids=place)
        counting.cache = cache  # type: ignore[assignment]
        steps = Steps(model, cache, "emulate")
        steps.step(torch.tensor([5]), torch.tensor([PROMPT]), None)


def test_hooks_and_moved_weights_are_not_missed() -> None:
    """A forward hook would not be called by a replay; new weights would not be read by one."""
    model = enabled("llama")
    first = Decoded(model, "emulate", new=2)
    model.model.norm.weight.data = model.model.norm.weight.data * 1.5
    second = Decoded(model, "emulate", new=2)
    assert second.decoder is not first.decoder
    assert second.difference(Decoded(model, False, new=2)) <= 1e-5
    handle = model.model.norm.register_forward_hook(lambda module, args, out: None)
    with pytest.raises(CaptureError, match="model.norm has a forward hook"):
        Decoded(model, "emulate", new=2)
    handle.remove()


def test_positions_end_where_the_model_ends() -> None:
    """A replay passes the model's last position no more than a forward does."""
    model = enabled("llama")
    decoded = Decoded(model, "emulate", new=1)
    decoded.cache.max_positions = decoded.cache.get_seq_length() + 1
    steps = Steps(model, decoded.cache, "emulate")
    with torch.no_grad():
        place = torch.tensor([decoded.cache.get_seq_length()])
        steps.step(torch.tensor([5]), place, None)
        steps.confirm()
        with pytest.raises(ContextLengthError):
            steps.step(torch.tensor([5]), place + 1, None)
    steps.close()


@pytest.mark.parametrize("case", [{}, DEVICE_CASES["device"]], ids=["flat", "device"])
def test_a_waiting_decoder_holds_no_context_and_dies_with_its_model(case: dict[str, Any]) -> None:
    model = enabled("llama")
    decoded = Decoded(model, "emulate", **{**case, "new": 2})
    layer: Any = decoded.cache.layers[0]
    held = [weakref.ref(layer.hosts[0].segments[0].keys)]
    held += [weakref.ref(index.codes.device.codes) for index in layer.coded_indexes.values()]
    assert len(held) > 1 or not case
    decoder = weakref.ref(decoded.decoder)
    del decoded, layer
    gc.collect()
    assert [one() for one in held] == [None] * len(held) and decoder() is not None
    del model
    gc.collect()  # the model, and with it the entry that held the decoder,
    gc.collect()  # which is a cycle of its own
    assert decoder() is None
