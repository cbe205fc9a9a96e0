"""retrieve="auto": keys by head, measured when a text is read."""

from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.config import MEAN_RETRIEVE
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.index.device import PLANNED
from retrieval_attn.memory.device_room import chosen_index
from tests.runner.graph_cases import Decoded, enabled
from tests.tiny_models import QUESTION, Loaded, needle_text

CONFIG = ra.Config(sink=8, window=64, retrieve="auto", prefill_chunk=512)


def hosts_of(context: ra.Context) -> list[SequenceKV]:
    layers: Any = context.cache.layers
    return [host for layer in layers for host in layer.hosts]


def budgets_of(context: ra.Context) -> list[HeadBudgets | None]:
    return [host.budgets for host in hosts_of(context)]


@pytest.fixture(scope="module")
def context(loaded: Loaded) -> ra.Context:
    return ra.Context(*loaded, CONFIG).read(needle_text(10_000), progress=False)


def test_every_layer_shares_out_the_same_number_of_keys(context: ra.Context) -> None:
    heads = context.model.config.num_attention_heads
    found = budgets_of(context)
    assert len(found) == context.model.config.num_hidden_layers
    for budgets in found:
        assert budgets is not None and len(budgets.counts) == heads
        assert 0.9 * MEAN_RETRIEVE * heads <= sum(budgets.counts) <= MEAN_RETRIEVE * heads
    assert any(budgets is not None and len(set(budgets.counts)) > 1 for budgets in found)
    assert len(set(found)) > 1
    answer = context.ask(QUESTION, max_new_tokens=24, question_attention="retrieval")
    assert "7391846" in answer.text


def test_keys_by_head_cost_as_much(context: ra.Context, loaded: Loaded) -> None:
    """Bytes of attended rows; a flat index scans as many keys whatever the number is."""
    plain = ra.Context(*loaded, CONFIG.replace(retrieve=MEAN_RETRIEVE)).read(needle_text(10_000), progress=False)
    stats = [one.ask(QUESTION, max_new_tokens=4, question_attention="retrieval").stats for one in (context, plain)]
    assert stats[0].keys_scanned == stats[1].keys_scanned
    assert stats[0].host_bytes_read <= stats[1].host_bytes_read


def test_forks_share_budgets_and_small_extensions_keep_them(context: ra.Context) -> None:
    before, fork = budgets_of(context), context.fork()
    assert budgets_of(fork) == before
    fork.extend(" The sky is blue. " * 20)
    assert budgets_of(fork) == before
    fork.extend(" The special magic Turin number is: 1112223. The grass is green. " * 180)
    assert budgets_of(fork) != before, "the index was made anew, and budgets with it"
    assert budgets_of(context) == before


def test_rows_of_a_batch_choose_for_themselves(context: ra.Context) -> None:
    alone = context.ask(QUESTION, max_new_tokens=12)
    together = context.ask_many([QUESTION, "Which number?"], max_new_tokens=12)
    assert together[0].tokens == alone.tokens
    again = ra.Context(context.model, context.tokenizer, CONFIG).read(needle_text(10_000), progress=False)
    assert budgets_of(again) == budgets_of(context)


def test_a_text_that_was_too_short_to_measure() -> None:
    config = CONFIG.replace(sink=2, window=8)
    found, plain = (
        Decoded(enabled("llama"), False, config=config.replace(retrieve=retrieve), prompt=8, new=40)
        for retrieve in ("auto", MEAN_RETRIEVE)
    )
    assert found.difference(plain) == 0 and found.cache.batch.hosts(0)[0].budgets is None


@pytest.mark.usefixtures("emulated_graphs")
def test_a_captured_step_retrieves_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_attn.offload.build.allocated", lambda *_: HeadBudgets((2, 70, 9, 30, 1, 5)))
    config = CONFIG.replace(sink=2, window=8)
    model = enabled("llama")
    options: dict[str, Any] = {"config": config, "prompt": 500, "new": 12}
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5 and graphed.steps.replays == 12
    plain = Decoded(model, False, **{**options, "config": config.replace(retrieve=MEAN_RETRIEVE)})
    assert not torch.equal(torch.stack(eager.logits), torch.stack(plain.logits))


def test_without_a_tail_every_head_gets_as_many_keys(loaded: Loaded) -> None:
    """Keys that are left out are not estimated, so errors say nothing about another number."""
    read = [
        ra.Context(*loaded, CONFIG.replace(tail=False, retrieve=retrieve)).read(needle_text(3_000), progress=False)
        for retrieve in ("auto", MEAN_RETRIEVE)
    ]
    assert set(budgets_of(read[0])) == {None}
    tokens = [one.ask(QUESTION, max_new_tokens=8, question_attention="retrieval").tokens for one in read]
    assert tokens[0] == tokens[1]


def test_few_keys_are_not_shared(loaded: Loaded) -> None:
    """Numbers that attend to all of them leave no error, and the least one would be taken for all keys to come."""
    read = [ra.Context(*loaded, CONFIG).read(needle_text(tokens), progress=False) for tokens in (2_000, 4_000)]
    assert set(budgets_of(read[0])) == {None} and None not in budgets_of(read[1])


def test_a_sketch_shares_keys(loaded: Loaded) -> None:
    """A GPU codes its keys, but it is searched on the host."""
    assert None not in budgets_of(
        ra.Context(*loaded, CONFIG.replace(index="sketch")).read(needle_text(3_000), progress=False)
    )


def test_codes_on_a_device_retrieve_as_many_keys_for_every_head(loaded: Loaded) -> None:
    assert ra.Config().retrieve == "auto"
    coded = [
        chosen_index(loaded[0].config, CONFIG.replace(retrieve=retrieve), 1 << 16, 1 << 40)
        for retrieve in ("auto", MEAN_RETRIEVE)
    ]
    assert coded[0].index == PLANNED and coded[0].index_options == coded[1].index_options
    context = ra.Context(*loaded, CONFIG.replace(index="device")).read(needle_text(3_000), progress=False)
    assert set(budgets_of(context)) == {None}


def test_a_kind_that_is_searched_in_python_gets_its_keys_per_head(loaded: Loaded) -> None:
    """It searches all keys here, so the answer is that of a flat index."""
    import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf)

    found = []
    for index, options in (("flat", {}), ("ivf", {"centroids": 4, "nprobe": 4})):
        context = ra.Context(*loaded, CONFIG.replace(index=index, index_options=options))
        context.read(needle_text(6_000), progress=False)
        assert set(context.cache.index_kinds()) == {index}
        found.append(context.ask("What is the number?", max_new_tokens=8).tokens)
    assert found[0] == found[1]
