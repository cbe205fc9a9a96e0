"""The decode step as one graph, emulated: the same logits as eagerly, across spills, batches, forks and errors."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrieval_attn as ra
import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf)
from retrieval_attn.attention.source import mean_share
from retrieval_attn.errors import CaptureError, ConfigError, ContextLengthError
from retrieval_attn.runner.decode import DecodeSteps, forward
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn.runner.graph import slot as graph_slot
from tests.runner.graph_cases import (
    CASES,
    CONFIG,
    DEVICE_CASES,
    MODELS,
    NEW,
    PROMPT,
    Decoded,
    broken_search,
    enabled,
    greedily,
    idle_decoders,
)
from tests.tiny_models import QUESTION, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("emulated_graphs", "small_graphs")


@pytest.mark.parametrize("name", MODELS)
def test_replays_equal_eager_decoding(name: str) -> None:
    """Soft-cap, sliding layers, learned sinks, experts; spills cross. Everything but the first pass is a replay."""
    model = enabled(name)
    eager, graphed = Decoded(model, False), Decoded(model, True)
    assert graphed.difference(eager) <= 1e-5
    assert graphed.decoder.captures == 1 and graphed.decoder.replays == graphed.steps.replays == NEW
    assert graphed.cache.get_seq_length() == eager.cache.get_seq_length() == PROMPT + NEW
    mine, others = graphed.cache.stats(), eager.cache.stats()
    assert (mine.keys_scanned, mine.bytes_read) == (others.keys_scanned, others.bytes_read)
    assert name == "mistral_sliding" or mine.host_seconds > 0


@pytest.mark.parametrize(
    ("name", "options"), [("gpt_oss", {}), ("llama", {"repeats": 3}), ("llama", {"config": CONFIG.replace(tail=False)})]
)
def test_replays_tally_what_eager_decoding_estimates(name: str, options: dict[str, Any]) -> None:
    """Learned sinks; rows on one path, then apart. A capture's trials do not count; a cache that left keeps its own."""
    model = enabled(name)
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    found = graphed.cache.tail_shares()
    for again in (found, graphed.cache.tail_shares()):
        for number, tail in eager.cache.tail_shares().items():
            assert again[number].count == tail.count == (0 if "config" in options else NEW * options.get("repeats", 1))
            torch.testing.assert_close(again[number].means(), tail.means(), rtol=0, atol=1e-5)
    Decoded(model, True, **options)  # another cache takes the decoder
    share = mean_share(graphed.cache.tail_shares())
    assert share == mean_share(found) and (share is None) == ("config" in options)


@pytest.mark.parametrize(("batch", "turns"), [(1, 1), (2, 2), (3, 2)])
def test_rows_with_codes_on_the_device_take_turns(batch: int, turns: int) -> None:
    """The host works on the first rows while the device searches the codes of the others: two calls per layer."""
    model = enabled("llama")
    case = {**DEVICE_CASES["device"], "batch": batch, "new": 3}
    eager, graphed = Decoded(model, False, **case), Decoded(model, True, **case)
    assert graphed.difference(eager) <= 1e-5
    runtime, steps = graphed.decoder.runtime, graphed.steps
    before = runtime.calls
    Decoded(model, True, **case)
    assert runtime.calls - before == turns * len(graphed.cache.layers) * steps.replays
    mine, others = graphed.cache.stats(), eager.cache.stats()
    assert mine.host_seconds > 0 and mine.keys_scanned == others.keys_scanned > 0


@pytest.mark.parametrize("case", CASES)
def test_batches_and_options_equal_eager_decoding(case: str) -> None:
    """Rows on one path are searched together until a spill parts them; a short prompt begins without a host part."""
    model, options = enabled("llama"), CASES[case]
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert graphed.steps.replays == options.get("new", NEW)
    assert graphed.decoder.captures == (2 if "grows" in case else 1)


def test_sliding_windows_slide_past_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma-2's sliding layers drop what no query sees when their buffer is full, between two replays."""
    monkeypatch.setattr(graph_slot, "SLIDING_ROOM", 5)
    model = enabled("gemma2")
    eager, graphed = Decoded(model, False, prompt=300), Decoded(model, True, prompt=300)
    assert graphed.difference(eager) <= 1e-5 and graphed.decoder.captures == 1
    assert graphed.decoder.slots[0].key.shape[2] == graphed.cache.layers[0].keep + 5  # type: ignore[union-attr]


def test_the_next_cache_reuses_the_graph() -> None:
    """Contexts, questions and forks take turns in one decoder; a cache keeps its tokens when it leaves."""
    model = enabled("llama")
    first = Decoded(model, True)
    second = Decoded(model, True, prompt=PROMPT + 7)
    assert second.decoder is first.decoder and second.decoder.captures == 1
    assert second.difference(Decoded(model, False, prompt=PROMPT + 7)) <= 1e-5
    # the first cache goes on where it stopped, from its own window, as one does that never was in a graph
    forks = [Decoded(model, False).cache.fork(), first.cache.fork()]
    logits = []
    for fork, graph in zip(forks, (False, True), strict=True):
        steps = DecodeSteps(model, fork, graph)
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
    for graph in (False, True):
        decoded = Decoded(model, graph, new=3)
        steps = DecodeSteps(model, decoded.cache, graph)
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


def test_generate_takes_the_switch_from_the_options() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    out = [greedily(model, random_ids(1, PROMPT), graph) for graph in (False, True)]
    assert torch.equal(out[0], out[1])
    (decoder,) = idle_decoders(model)
    assert decoder.replays == out[0].shape[1] - PROMPT - 1
    with pytest.raises(ConfigError, match='graph must be "auto", True or False, got 3'):
        ra.Config(graph=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='drafts must be "auto", True or False, got 3'):
        ra.Config(drafts=3)  # type: ignore[arg-type]


@torch.no_grad()
def test_an_error_of_a_search_names_its_layer() -> None:
    """It surfaces after the replay; the cache keeps what was confirmed and goes on."""
    broken_search(enabled("llama"), True)


def test_a_step_goes_ahead_of_the_one_before() -> None:
    """With what the device chose; full windows stop it."""
    model = enabled("llama")
    decoded = Decoded(model, True, new=2)
    expected = Decoded(model, False, new=2)
    before = decoded.cache.get_seq_length()
    steps = DecodeSteps(model, decoded.cache, True)
    seen, chosen, went = [], [], [False]
    with torch.no_grad():
        token, logits = torch.tensor([5]), torch.empty(0)
        for i in range(15):
            if not went[-1]:
                logits = steps.step(token, torch.tensor([before + i]), None)
            assert steps.chosen is not None
            seen.append(logits.clone())
            token = steps.chosen.clone()
            went.append(steps.launch_next())
            steps.confirm()
            chosen.append(int(token))
            assert decoded.cache.get_seq_length() == before + i + 1
        assert 11 <= sum(went) < 15 and went[-1], went  # full twice
        steps.close()
        assert decoded.cache.get_seq_length() == before + 15  # what went ahead last did not happen
        for i, fed in enumerate([5, *chosen[:-1]]):
            place = torch.tensor([[before + i]])
            plain = forward(model, expected.cache, torch.tensor([[fed]]), mask=None, position_ids=place)
            assert (seen[i] - plain).abs().max() <= 1e-5
            assert chosen[i] == int(plain.argmax())


def test_contexts_answer_the_same(needle_model_path: Path) -> None:
    """Questions to a context: forks of one cache, one after the other through one decoder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    answers = []
    for graph in (False, True):
        context = ra.Context(loaded.eval(), tokenizer, CONFIG.replace(graph=graph))
        context.read("The special magic Bergen number is: 7391846. " + "The grass is green. " * 30, progress=False)
        asked = [context.ask(QUESTION, max_new_tokens=8) for _ in range(2)]
        answers.append([answer.tokens for answer in asked])
    assert answers[0] == answers[1]
    (decoder,) = idle_decoders(loaded)
    assert decoder.captures == 1 and decoder.replays > 0


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("phi3", {}, "longrope"),
        ("llama", {"retrieve": "all"}, "reference mode"),
        ("llama", {"index": "ivf"}, "no compiled search"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    name: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Demanded, it is an error; else one log line and the same answers."""
    model = enabled(name)
    config = CONFIG.replace(**options)
    with pytest.raises(CaptureError, match=reason):
        Decoded(model, True, config=config, new=2)
    with caplog.at_level(logging.WARNING, "retrieval_attn"):
        auto = [Decoded(model, "auto", config=config, new=2) for _ in range(2)]
    assert auto[0].difference(Decoded(model, False, config=config, new=2)) <= 1e-5
    said = [record.getMessage() for record in caplog.records if "decoding eagerly" in record.getMessage()]
    assert len(said) == 1 and reason in said[0]


class Counting(torch.nn.Module):
    """Reads a value of its input on the CPU; or adds the number of cached tokens."""

    def __init__(self, inner: Any, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads, self.cache = inner, reads, None

    def watch(self, model: Any) -> None:
        """Note the cache of every forward."""
        forward = model.forward

        @functools.wraps(forward)
        def noted(*given: Any, **options: Any) -> Any:
            self.cache = options["past_key_values"]
            return forward(*given, **options)

        model.forward = noted

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden)
        if self.reads:
            return out + (0.0 if float(out[0, 0, 0]) > 0 else 1.0)
        return out + (0.0 if self.cache is None else 0.1 * self.cache.get_seq_length())


@pytest.mark.parametrize("reads, reason", [(True, "_local_scalar_dense"), (False, "number of cached tokens")])
def test_steps_that_look_at_numbers_on_the_cpu_are_found(reads: bool, reason: str) -> None:
    """A synchronisation ends the capture; a count that Python put into the step would be frozen without a word."""
    model = enabled("llama")
    counting = model.model.layers[1].mlp = Counting(model.model.layers[1].mlp, reads)
    with pytest.raises(CaptureError, match=reason):
        decoded_with(model, counting)
    with pytest.raises(CaptureError, match=reason):  # remembered: no second capture
        decoded_with(model, counting)


def decoded_with(model: Any, counting: Counting) -> None:
    cache = ra.RetrievalCache(model, CONFIG, check=False)
    with torch.no_grad():
        place = torch.arange(PROMPT)[None]
        forward(model, cache, random_ids(1, PROMPT), mask=None, position_ids=place)
        counting.watch(model)
        steps = DecodeSteps(model, cache, True)
        steps.step(torch.tensor([5]), torch.tensor([PROMPT]), None)


def test_hooks_and_moved_weights_are_not_missed() -> None:
    """A forward hook would not be called by a replay; new weights would not be read by one."""
    model = enabled("llama")
    first = Decoded(model, True, new=2)
    model.model.norm.weight.data = model.model.norm.weight.data * 1.5
    second = Decoded(model, True, new=2)
    assert second.decoder is not first.decoder
    assert second.difference(Decoded(model, False, new=2)) <= 1e-5
    handle = model.model.norm.register_forward_hook(lambda module, args, out: None)
    with pytest.raises(CaptureError, match="model.norm has a forward hook"):
        Decoded(model, True, new=2)
    handle.remove()


def test_positions_end_where_the_model_ends() -> None:
    """A replay passes the model's last position no more than a forward does."""
    model = enabled("llama")
    decoded = Decoded(model, True, new=1)
    decoded.cache.max_positions = decoded.cache.get_seq_length() + 1
    steps = DecodeSteps(model, decoded.cache, True)
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
    decoded = Decoded(model, True, **{**case, "new": 2})
    layer: Any = decoded.cache.layers[0]
    held = [weakref.ref(layer.hosts[0].segments[0].keys)]
    coded: Any = decoded.cache.coded_indexes
    held += [weakref.ref(index.codes.device.codes) for index in coded]
    assert len(held) > 1 or not case
    decoder = weakref.ref(decoded.decoder)
    del decoded, layer, coded
    gc.collect()
    assert [one() for one in held] == [None] * len(held) and decoder() is not None
    del model
    gc.collect()  # the model, and with it the entry that held the decoder,
    gc.collect()  # which is a cycle of its own
    assert decoder() is None


def test_a_dropped_pool_frees_its_windows_at_once() -> None:
    """Pages of full attention and windows that grow need the room before Python looks for cycles."""
    model = enabled("llama")
    decoded = Decoded(model, True, prompt=14, new=3)
    buffers = weakref.ref(decoded.decoder.slots[0].key)
    del decoded
    gc.collect()
    gc.disable()
    try:
        assert buffers() is not None
        graph_pool.forget(model)
        assert buffers() is None
    finally:
        gc.enable()
