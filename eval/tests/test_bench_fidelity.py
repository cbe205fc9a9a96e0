"""`bench fidelity`: the reference is full attention, the measure sees what is broken, and more keys are closer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from eval.tests.shared import parsed
from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn_eval.bench.fidelity import command
from retrieval_attn_eval.bench.fidelity.feed import (
    Fed,
    _feed_captured,
    _feed_fork,
    _fork,
    feed_full,
    feed_index,
    feed_policies,
    read,
)
from retrieval_attn_eval.bench.fidelity.measure import plan_of, with_room
from retrieval_attn_eval.bench.fidelity.report import _cells, plots
from retrieval_attn_eval.bench.fidelity.row import Row, judged, row_of
from retrieval_attn_eval.bench.fidelity.scores import (
    Floats,
    divergence,
    entropy,
    log_probabilities,
    mean_with_interval,
    same_likeliest,
)
from retrieval_attn_eval.bench.fidelity.texts import FedText, make_text, parse_texts
from retrieval_attn_eval.models import BUNDLED_MODEL, load_model

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = ra.Config(sink=16, window=64, index="flat", threads=1, tail=False)
TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    """Every test leaves it as it was."""
    return load_model(str(BUNDLED_MODEL), "cpu", "float32")


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> FedText:
    return make_text("prose", 1500, TOKENS, tokenizer, 0)


@pytest.fixture(scope="module")
def reference(model: Any, text: FedText) -> Floats:
    return log_probabilities(feed_full(model, text).logits)


def kl(reference: Floats, fed: Fed) -> float:
    return float(divergence(reference, log_probabilities(fed.logits)).mean())


def test_scores_of_known_distributions() -> None:
    """By hand: KL((1/2, 1/2) || (3/4, 1/4)) = ln 2 - ln 3 / 2; a token that cannot come adds nothing."""
    one, other = np.log([[0.5, 0.5]]), np.log([[0.75, 0.25]])
    assert divergence(one, other) == pytest.approx([np.log(2) - np.log(3) / 2], abs=1e-15)
    assert divergence(other, other) == [0] and entropy(one) == pytest.approx([np.log(2)])
    never = log_probabilities([[0.0, -np.inf]])
    assert divergence(never, one) == pytest.approx([np.log(2)]) and entropy(never) == [0]
    assert divergence(one, never) == [np.inf]
    shifted = log_probabilities(np.array([[1e4, 1e4 + 1, 3.0]], np.float32))
    assert np.exp(shifted).sum() == pytest.approx(1, abs=1e-15)
    assert same_likeliest(np.array([[0, 1], [1, 0]]), np.array([[0, 2], [0, 1]])) == 0.5
    mean = mean_with_interval([0.0, 1.0] * 50)
    assert mean.value == 0.5 and mean.low is not None and mean.high is not None
    assert mean.low == pytest.approx(0.4, abs=0.03) and mean.high == pytest.approx(0.6, abs=0.03)
    assert mean_with_interval([2.0]).low is None
    unlike = mean_with_interval([[0.0] * 50, [1.0] * 50])  # two texts: tokens drawn from both alike would be too sure
    assert (unlike.value, unlike.low, unlike.high) == (0.5, 0.0, 1.0)
    assert mean_with_interval([[0.0, 1.0] * 50]) == mean
    with pytest.raises(ValueError, match="one shape"):
        divergence(one, np.log([[0.2, 0.3, 0.5]]))


def test_full_attention_is_one_forward_of_the_unmodified_model(model: Any, text: FedText, reference: Floats) -> None:
    """Token by token over a cache gives what one forward over all ids gives: positions are right."""
    with torch.no_grad():
        whole = model(torch.from_numpy(text.ids)[None]).logits[0, text.context :]
    assert divergence(log_probabilities(whole.numpy()), reference).max() < 1e-10
    again = log_probabilities(feed_full(model, text).logits)
    assert (divergence(reference, again) == 0).all() and same_likeliest(reference, again) == 1


def test_more_keys_are_closer_and_all_are_exact(model: Any, text: FedText, reference: Floats) -> None:
    """Budgets are forks of one reading: each is what a reading of its own gives."""
    fed = list(feed_index(model, CONFIG, text, [5, 50, 400, "all"], mass_heads=2))
    few, some, many, everything = (kl(reference, one) for one in fed)
    assert few > 1.5 * some > 3 * many > 0 and everything < 1e-10
    masses = [one.captured for one in fed if one.captured is not None]
    assert len(masses) == 4 and masses == sorted(masses) and masses[-1] == pytest.approx(1, abs=1e-5)
    attended = [one.attended for one in fed if one.attended is not None]
    assert attended[1] == pytest.approx(16 + 64 + 50, abs=TOKENS) and attended[3] > text.context
    alone = next(feed_index(model, CONFIG, text, [50], mass_heads=0))
    assert torch.equal(alone.logits, fed[1].logits) and alone.captured is None


@contextmanager
def zeroed_head(model: Any, layer: int) -> Iterator[None]:
    """Keys of the first key-value head of a layer are zero."""

    def cut(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(out[..., :64]), out[..., 64:]], dim=-1)

    handle = model.model.layers[layer].self_attn.k_proj.register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()


def test_what_is_broken_is_seen(model: Any, text: FedText, reference: Floats) -> None:
    """One head's keys zeroed with everything retrieved; a window that is cut with the same number of keys."""
    with zeroed_head(model, 2):
        broken = next(feed_index(model, CONFIG, text, ["all"], mass_heads=0))
    assert kl(reference, broken) > 1e-4
    usual = next(feed_index(model, CONFIG, text, [20], mass_heads=0))
    cut = next(feed_index(model, CONFIG.replace(window=8), text, [20], mass_heads=0))
    assert kl(reference, cut) > 1.2 * kl(reference, usual)


def test_published_methods_with_room_for_everything_are_full_attention(
    model: Any, tokenizer: Any, text: FedText, reference: Floats
) -> None:
    """They get teacher-forced tokens through the same contract; with less room they differ."""
    names = ["streaming_llm", "snapkv", "pyramidkv", "quest", "infinigen", "magicpig"]
    fed = list(feed_policies(model, tokenizer, names, CONFIG, text, ["all", 40]))
    whole = {name: kl(reference, one) for name, one in fed if one.budget == "all"}
    assert list(whole) == names and whole.pop("quest") < 1e-7  # whole pages: one of 95 is left out
    assert max(whole.values()) < 1e-10
    assert all(kl(reference, one) > 1e-6 for _, one in fed if one.budget == 40)
    attended = {name: one.attended for name, one in fed if one.budget == 40}
    assert attended["streaming_llm"] == 16 + 64 + 40
    (_, refused), (_, served) = feed_policies(model, tokenizer, ["infllm"], CONFIG, text, [5, 400])
    assert "larger budget" in refused.refused and kl(reference, served) > 1e-6


def head_error(fed: Fed) -> float:
    return float(torch.cat(list(fed.head_errors)).mean())


def test_first_layers_head_errors_are_those_of_transformers_attention(model: Any, text: FedText) -> None:
    """The first layer's query is full attention's, so its error is known without this package's attention."""
    seen: list[torch.Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0][0, -1].reshape(8, 64)))
    one = FedText(text.name, text.length, text.ids[:1501], text.context)
    try:
        feed_full(model, one)
        exact = seen[-1]
        fed = next(feed_index(model, CONFIG, one, [20], mass_heads=0, head_error=True))
    finally:
        handle.remove()
    wanted = (seen[-1] - exact).norm(dim=1) / exact.norm(dim=1)
    assert len(fed.head_errors) == 5 and all(layer.shape == (8, 1) for layer in fed.head_errors)
    assert wanted.max() > 0.1 and torch.allclose(fed.head_errors[0][:, 0], wanted, rtol=1e-3, atol=1e-5)


def test_head_errors_fall_with_more_keys_and_count_where_they_are_made(model: Any, text: FedText) -> None:
    """Everything retrieved has none, even behind a layer whose keys are zero: that layer has stored them so."""
    fed = list(feed_index(model, CONFIG, text, [20, 400, "all"], mass_heads=0, head_error=True))
    few, many, everything = map(head_error, fed)
    assert few > 1.5 * many > 0.01 and everything < 1e-5
    plain = next(feed_index(model, CONFIG, text, [20], mass_heads=0))
    assert torch.equal(plain.logits, fed[0].logits) and plain.head_errors == ()
    with zeroed_head(model, 2):
        broken = next(feed_index(model, CONFIG, text, ["all"], mass_heads=0, head_error=True))
    assert head_error(broken) < 1e-5
    int8 = next(feed_index(model, CONFIG.replace(host_dtype="int8"), text, ["all"], mass_heads=0, head_error=True))
    assert head_error(int8) < 1e-2


def test_published_methods_have_head_errors(model: Any, tokenizer: Any, text: FedText) -> None:
    """With room for everything none; with less, those of what was left out, and the logits stay what they were."""
    names = ["streaming_llm", "snapkv", "pyramidkv", "quest", "infinigen", "magicpig", "infllm"]
    fed = [*feed_policies(model, tokenizer, names, CONFIG, text, ["all", 400], head_error=True)]
    whole = {name: head_error(one) for name, one in fed if one.budget == "all" and not one.refused}
    less = {name: head_error(one) for name, one in fed if one.budget == 400}
    assert whole.pop("quest") < 1e-2 and whole.pop("infllm", 0.0) < 1
    assert whole and max(whole.values()) < 1e-5
    assert set(less) == set(names) and min(less.values()) > 1e-2
    quest = next(one for name, one in fed if name == "quest" and one.budget == 400)
    assert (quest.head_errors[0] < 1e-5).all() and (quest.head_errors[1] < 1e-5).all()  # its dense layers
    ((_, plain),) = feed_policies(model, tokenizer, ["quest"], CONFIG, text, [400])
    assert torch.equal(plain.logits, quest.logits)


@pytest.mark.parametrize("kind", ["flat", "sketch", "device"])
def test_a_tail_is_nearer_and_one_reading_serves_both(model: Any, text: FedText, reference: Floats, kind: str) -> None:
    """Without a tail a fork of a reading with clusters is what a reading without them gives, to the bit."""
    config = CONFIG.replace(index=kind)
    fed = list(feed_index(model, config, text, [20, "all"], 2, head_error=True, tails=(False, True)))
    assert [(one.budget, one.tail) for one in fed] == [(20, False), ("all", False), (20, True)]
    plain, _, tail = fed
    assert 3 * kl(reference, tail) < kl(reference, plain) and 1.5 * head_error(tail) < head_error(plain)
    assert plain.captured is not None and tail.captured is not None and plain.estimated is None
    assert plain.attended is not None and tail.attended is not None
    more = 20 // 4 + 32 if kind == "device" else 0  # all that it names are attended to
    assert tail.attended == pytest.approx(plain.attended + more)
    assert tail.captured == pytest.approx(plain.captured, abs=0.02) or more and tail.captured > plain.captured
    assert tail.estimated is not None and abs(1 - tail.estimated - tail.captured) < 0.05  # all heads, and some of them
    alone = next(feed_index(model, config, text, [20], mass_heads=0))
    assert not alone.tail and torch.equal(alone.logits, plain.logits)
    own = next(feed_index(model, config.replace(tail=True), text, [20], mass_heads=0))
    assert own.tail and torch.equal(own.logits, tail.logits)


@pytest.mark.usefixtures("emulated_graphs")
def test_captured_steps_are_fed_the_same(model: Any, text: FedText, reference: Floats) -> None:
    """Those that read whole rows give what eager ones do; those whose codes tell weights something near.

    Both continue one reading. Of two readings the keys may differ in their last bits, as some processors' matrix
    products depend on where operands lie in memory; clusters of such keys differ, and logits with them by up to .005.
    """
    config = CONFIG.replace(index="device-auto", index_options={"int8_rows": True}, host_dtype="int8", tail=True)
    held, _ = read(model, config, torch.from_numpy(text.ids[None, : text.context].copy()))
    eager = _feed_fork(model, _fork(held, 20, True), text, None, None)
    every = _feed_captured(model, _fork(held, 20, True), text)
    nearer = config.replace(index_options={"int8_rows": True, "key_share": 0.25})
    some = next(feed_index(model, nearer, text, [20], 0, captured=True))
    torch.testing.assert_close(every.logits, eager.logits, rtol=0, atol=1e-4)
    assert float((some.logits - every.logits).abs().max()) > 1e-3
    assert 0 < kl(reference, every) < 0.01 and 0 < kl(reference, some) < 0.01


def test_every_method_gets_the_same_ids_at_the_same_positions(model: Any, tokenizer: Any, text: FedText) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["input_ids"][0].tolist(), kwargs["position_ids"][0].tolist()))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        feed_full(model, text)
        full, seen = seen, []
        list(feed_index(model, CONFIG, text, [5], mass_heads=0))
        own, seen = seen, []
        list(feed_policies(model, tokenizer, ["quest", "infllm"], CONFIG.replace(window=400), text, [100]))
    finally:
        handle.remove()
    assert full == own and full[0] == (text.ids[:1500].tolist(), list(range(1500)))
    assert full[1:] == [([int(text.ids[1500 + at])], [1500 + at]) for at in range(TOKENS)]
    assert sorted(seen) == sorted(full * 2)


@pytest.mark.parametrize("name", ["prose", "code", "json", "uuid", "ruler"])
def test_texts_are_exact_and_the_same_again(tokenizer: Any, name: str) -> None:
    made = make_text(name, 2048, 24, tokenizer, 3)
    assert len(made.forced) == 24 and len(made.ids) == made.context + 24
    assert made.context == 2048 if name != "ruler" else 1800 < made.context < 2048
    assert np.array_equal(made.ids, make_text(name, 2048, 24, tokenizer, 3).ids)
    assert not np.array_equal(made.ids[:200], make_text(name, 2048, 24, tokenizer, 4).ids[:200]) or name == "ruler"
    shown = tokenizer.decode(made.ids)
    assert {"prose": ". The ", "code": "def ", "json": '"sku": ', "uuid": "magic uuids for ", "ruler": " is: "}[
        name
    ] in shown
    if name == "ruler":  # the answer is what is fed last, and it stands in what was read
        answer = shown[-36:]
        assert answer.count("-") == 4 and answer in tokenizer.decode(made.ids[: made.context])


def test_an_extraction_feeds_its_true_json(tokenizer: Any) -> None:
    made, other = (make_text("extract", 4096, 40, tokenizer, 0, number) for number in range(2))
    read, fed = tokenizer.decode(made.ids[: made.context]), tokenizer.decode(made.forced)
    assert len(made.forced) == 40 and read.endswith("Answer: [") and fed.startswith('{"parcel": "')
    name, city = fed.split('"')[3], fed.split('"')[7]
    assert any(name in line and city in line for line in read.splitlines()[1:-2])
    assert not np.array_equal(made.ids, other.ids)
    with pytest.raises(InputDataError, match="give fewer --tokens"):
        make_text("extract", 4096, 4000, tokenizer, 0)


def test_a_file_is_a_text_and_a_short_one_says_so(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("A line about tea.\n" * 200)
    assert parse_texts(f"{file}, prose") == (str(file), "prose")
    assert len(make_text(str(file), 500, 24, tokenizer, 0).ids) == 524
    second = make_text(str(file), 500, 24, tokenizer, 0, 1)
    assert np.array_equal(second.ids, make_text(str(file), 1048, 0, tokenizer, 0).ids[524:])
    with pytest.raises(InputDataError, match=r"needed after 2172 of other samples"):
        make_text(str(file), 700, 24, tokenizer, 0, 3)
    with pytest.raises(InputDataError, match=r"5000 to read and 24 to feed are needed; give shorter --lengths"):
        make_text(str(file), 5000, 24, tokenizer, 0)


def test_command_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "1100", "--texts", "json", "--methods", "flat,device,streaming_llm,infllm"]
    flags += ["--retrieve", "5,200", "--sink", "16", "--window", "64", "--tokens", "3", "--threads", "1"]
    flags += ["--n", "2"]
    folder = tmp_path / "out"
    assert main(["bench", "fidelity", "--device", "cpu", *flags, "--output-dir", str(folder)]) == 0
    report = json.loads((folder / "fidelity.json").read_text())
    assert report["finished"] and 0 <= report["floor"] < 1e-10 and not report["problems"]
    assert {"commit", "machine", "versions", "command", "config", "seed"} <= set(report)
    assert len(report["rows"]) == (4 + 2) * 2 and all(row["budget"] != "all" for row in report["rows"])
    assert {"flat", "flat + tail", "device + tail"} <= {row["method"] for row in report["rows"]}
    one = report["rows"][0]
    assert np.mean(one["head_errors"]) == pytest.approx(one["head_error"]) and np.shape(one["head_errors"]) == (5, 8)
    assert (
        one["texts"] == 2 and len(one["kl_per_token"]) == 6 and np.mean(one["kl_per_token"]) == pytest.approx(one["kl"])
    )
    shown = capsys.readouterr().out
    assert shown.startswith((folder / "fidelity.md").read_text()) and "### json" in shown
    assert "2 texts, of each 1,100 tokens read, 3 fed" in shown and " of 6 |" in shown
    assert "infllm, retrieve 5: infllm: budget=85 has no room" in shown
    assert (folder / "fidelity.png").stat().st_size > 10_000


def test_a_row_is_the_mean_over_its_texts(model: Any, tokenizer: Any) -> None:
    """Two texts of one length, each measured alone; what was refused on one has no mean."""
    texts = [make_text("json", 700, 4, tokenizer, 0, number) for number in range(2)]
    assert not np.array_equal(texts[0].ids, texts[1].ids)
    assert np.array_equal(texts[1].ids, make_text("json", 700, 4, tokenizer, 1).ids)
    runs = []
    for text in texts:
        reference = log_probabilities(feed_full(model, text).logits)
        fed = next(feed_index(model, CONFIG, text, [20], mass_heads=1, head_error=True, tails=[True]))
        runs.append(judged(text, "flat", fed, reference))
    one, other, both = row_of(runs[:1], 0), row_of(runs[1:], 0), row_of(runs, 0)
    assert (one.texts, both.texts, both.tokens, len(both.kl_per_token)) == (1, 2, 4, 8)
    for name in ("kl", "same", "captured", "estimated", "head_error", "entropy", "attended"):
        assert getattr(both, name) == pytest.approx((getattr(one, name) + getattr(other, name)) / 2), name
    assert one.kl != other.kl and np.shape(both.head_errors) == (5, 8)
    refused = row_of([runs[0], judged(texts[1], "flat", Fed(20, torch.empty(0), refused="why"), reference)], 0)
    assert refused.refused == "why" and refused.kl is None


def test_a_plot_pairs_a_kind_with_and_without_a_tail() -> None:
    """A panel per text and length, a line per method; a share is no number of keys."""
    rows = [
        Row("code", 8192, 1, 8192, 24, name, budget, 1.0, kl=kl)
        for name, kl in (("flat", 0.2), ("flat + tail", 0.01), ("quest", 0.1))
        for budget in (20, 100, 0.5)
    ]
    panel, other = plots([*rows, Row("json", 8192, 1, 8192, 24, "flat", 20, 1.0, kl=0.3)])
    assert panel.title == "code, 8,192 tokens" and panel.log_x and panel.log_y and other.title.startswith("json")
    assert panel.lines["flat + tail"] == [(20, 0.01), (100, 0.01)] and set(panel.lines) > {"flat", "quest"}
    assert panel.dashed == {"flat + tail": "flat"} and not other.dashed


def test_a_row_with_a_tail_says_what_it_is_worth() -> None:
    """Beside the row of the same method, budget and length without; p99 is of the tokens, not of a mean."""
    rows = [
        Row("code", length, 1, length, 24, name, 100, 1.0, kl=kl, low=kl, high=kl, kl_p99=9 * kl, same=1.0)
        for length, name, kl in [
            (4096, "flat", 0.5),
            (8192, "flat", 0.03),
            (8192, "flat + tail", 0.002),
            (8192, "sketch + tail", 0.001),
        ]
    ]
    told = {row.method: _cells(row, rows) for row in rows if row.length == 8192}
    assert [told[name][6:8] for name in told] == [["0.27", ""], ["0.018", "15.0"], ["0.009", ""]]


def test_wrong_logits_are_problems(tokenizer: Any) -> None:
    """Everything retrieved that is not full attention, and what is no number, end the command with 1."""
    plan = plan_of(parsed(command, "--methods", "flat", "--retrieve", "20"))
    report: dict[str, Any] = {"dtype": "float32", "floor": None, "problems": []}

    def check(budget: Any, value: float) -> None:
        command._check(Row("prose", 8192, 1, 8192, 24, "flat", budget, 1.0, kl=value), plan, report)

    check("all", 1e-12)
    check(20, 0.5)
    assert report["floor"] == 1e-12 and not report["problems"]
    check("all", 1e-5)
    check(20, float("nan"))
    assert len(report["problems"]) == 2 and "1.0e-05" in report["problems"][0] and "nan" in report["problems"][1]


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--texts", "poetry"], ConfigError, "choose from prose, code, json, uuid, ruler, extract"),
        (["--methods", "flat,magic"], ConfigError, "or a method: streaming_llm"),
        (["--retrieve", "many"], ConfigError, "write 100, all or auto"),
        (["--retrieve", "0"], ConfigError, "retrieve"),
        (["--lengths", "512"], ConfigError, "nothing is left to retrieve"),
        (["--lengths", "256k"], ContextLengthError, "the model has 131072"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(flags: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan_of(parsed(command, *flags))
    assert main(["bench", "fidelity", "--device", "cpu", *flags]) == 2


def test_decoding_has_room_at_the_end_of_the_positions() -> None:
    """A length at a model's limit becomes a little shorter; other lengths stay."""
    assert with_room([600, 4096], 131072, 8) == [600, 4096]
    assert with_room([4096, 131072], 131072, 16) == [4096, 130944]
    assert with_room([131070, 131072], 131072, 16) == [130944]
    assert with_room([64], 64, 16) == [56]
    with pytest.raises(ContextLengthError, match="needed as many positions"):
        with_room([128], 64, 16)
