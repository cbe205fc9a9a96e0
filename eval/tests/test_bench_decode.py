"""`bench decode` end to end on a CPU: every method is compared with its definition, and a wrong one gets no time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from eval.tests.shared import parsed
from retrieval_attn.cli import main
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ConfigError, ContextLengthError, MemoryPlanError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.memory.clusters import host_cluster_bytes
from retrieval_attn_eval.bench import decode as bench_decode
from retrieval_attn_eval.bench import keys as bench_keys
from retrieval_attn_eval.bench import method as bench_method
from retrieval_attn_eval.bench import quality as bench_quality
from retrieval_attn_eval.bench import synthetic
from retrieval_attn_eval.bench.baselines import FullGraph
from retrieval_attn_eval.bench.busy import busy_of
from retrieval_attn_eval.bench.keys import ReadSource, SyntheticSource, rotate
from retrieval_attn_eval.bench.method import Retrieval, forward_logits
from retrieval_attn_eval.bench.methods import make, parse
from retrieval_attn_eval.bench.model import Bench, lengths_of, with_room
from retrieval_attn_eval.bench.place import place
from retrieval_attn_eval.bench.random_model import random_model
from retrieval_attn_eval.bench.resident import ResidentLayer
from retrieval_attn_eval.bench.row import Row, Spread, same_tokens
from retrieval_attn_eval.bench.rows import measure
from retrieval_attn_eval.bench.source import attentions, blocks
from retrieval_attn_eval.runs import RunFolderError
from tests.emulation.emulated import emulated

SMALL = ["--shape", "tiny", "--device", "cpu", "--sink", "4", "--window", "16", "--retrieve", "8", "--train", "64"]


pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(folder: Path | str, *extra: str) -> argparse.Namespace:
    shown = ("--tokens", "2", "--lengths", "600", "--output-dir", str(folder))
    return parsed(bench_decode, *SMALL, *shown, *extra)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(arguments("unused", "--methods", "flat"))


@pytest.fixture(scope="module")
def source(bench: Bench) -> Any:
    return bench.source(600)


def test_command_compares_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All methods, batches of two contexts: table, JSON and PNG say the same, bytes are hand sums."""
    methods = "flat,roargraph:beam=40,static,full-resident,full-graph,full-eager,offloaded,quantized"
    folder = tmp_path / "out"
    extra = ["--tokens", "1", "--lengths", "600", "--batch", "2", "--methods", methods, "--output-dir", str(folder)]
    assert main(["bench", "decode", *SMALL, *extra]) == 0
    report = json.loads((folder / "decode.json").read_text())
    assert {"commit", "machine", "versions", "command", "config", "gpu_memory", "batch"} <= set(report)
    assert report["finished"]
    rows = {(row["context"], row["method"]): row for row in report["rows"]}
    assert len(rows) == 8
    for row in rows.values():
        if row["status"] != "ok":
            assert row["method"] in ("offloaded", "quantized") and row["note"] and row["ms"] is None
            continue
        assert row["ms"]["median"] > 0 and row["error"] <= 1e-4
        assert row["tokens_per_second"] == pytest.approx(2000 / row["ms"]["median"])
    exact = rows[600, "flat"]
    assert exact["recall"] == exact["mass"] == 1.0
    assert 0.05 < exact["captured"] < 1 and exact["scanned"] == pytest.approx(1.0)
    # 2 rows x 600 tokens x 2 layers x 2 heads x 16 numbers x 4 bytes, keys and values
    assert rows[600, "full-eager"]["device_touched"] == 2 * 600 * 512
    assert rows[600, "static"]["device_touched"] == 2 * 20 * 512
    assert rows[600, "flat"]["host_bytes"] == 2 * 600 * 512 + 2 * 2 * 2 * host_cluster_bytes(580, 16, 16, False)
    table = (folder / "decode.md").read_text()
    assert table in capsys.readouterr().out
    assert "| 600 | roargraph:beam=40 |" in table
    assert (folder / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_a_context_of_sinks_and_window_retrieves_nothing(bench: Bench) -> None:
    """Nothing lies between them: a time without recall."""
    row = measure(bench, bench.source(16), parse("flat")[0])
    assert row.status == "ok" and row.recall is None and "nothing to retrieve" in row.note


def louder(path: SequenceKV, keys: Any, values: Any, append: Any = SequenceKV.append) -> None:
    append(path, keys, np.asarray(1.1, values.dtype) * values)


def forgetful(layer: ResidentLayer, query: torch.Tensor, scale: float) -> torch.Tensor:
    return attend(query, *layer.context, scale=scale).out


def test_wrong_answers_have_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host values off by a tenth, and a baseline that forgets new tokens: status 1, no times but for the right one."""
    monkeypatch.setattr(SequenceKV, "append", louder)
    monkeypatch.setattr(ResidentLayer, "attend", forgetful)
    assert bench_decode.run(arguments(tmp_path / "out", "--methods", "flat,full-resident,full-eager")) == 1
    flat, resident, eager = json.loads((tmp_path / "out" / "decode.json").read_text())["rows"]
    for row in (flat, resident):
        assert row["status"] == "wrong" and row["ms"] is None and row["tokens_per_second"] is None
        assert "differ from its definition" in row["note"]
    assert eager["status"] == "ok"
    shown = capsys.readouterr().out
    assert "| 600 | flat | wrong |" in shown and "| 600 | full-resident | wrong |" in shown


def test_kept_logits_outlive_the_next_step(bench: Bench, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a graph, whose steps all write their logits into the same memory."""
    eager, memory = FullGraph._eager, torch.empty(1, bench.model.config.vocab_size)
    monkeypatch.setattr(FullGraph, "_eager", lambda self, *given: memory.copy_(eager(self, *given)))
    assert measure(bench, source, parse("full-graph")[0]).status == "ok"


def test_static_is_compared_with_its_definition(bench: Bench, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is one token short is seen."""
    (spec,) = parse("static")
    assert measure(bench, source, spec).status == "ok"
    bench.checked.clear()
    short = [(0, 4), (389, 404)]  # of 404 tokens that are checked
    monkeypatch.setattr(bench_method, "place", lambda model, cache, source, _: place(model, cache, source, short))
    row = measure(bench, source, spec)
    assert row.status == "wrong" and row.ms is None


def test_spread_is_median_and_percentiles() -> None:
    """Times in seconds become milliseconds; outliers stay out of the three numbers."""
    spread = Spread.of([0.001 * i for i in range(1, 12)])
    assert (spread.median, spread.low, spread.high) == pytest.approx((6.0, 2.0, 10.0))
    assert Spread.of([0.002]) == Spread(2.0, 2.0, 2.0)


def test_same_tokens_count_up_to_the_first_difference() -> None:
    """Against full attention of the same context; after the first other token the texts are different ones."""
    full = Row(600, 1, "full-eager", "ok", chosen=[1, 2, 3, 4])
    ours, elsewhere = Row(600, 1, "flat", "ok", chosen=[1, 2, 9, 4]), Row(700, 1, "flat", "ok", chosen=[1, 2])
    assert same_tokens(ours, [ours, full]) == 0.5 and same_tokens(elsewhere, [elsewhere, full]) is None
    assert same_tokens(full, [ours, full]) is None and same_tokens(Row(600, 1, "flat", "ok"), [full]) is None


def test_low_recall_has_no_speed(bench: Bench, source: Any) -> None:
    """A search of one of many lists answers what it finds, but finds too little."""
    row = measure(bench, source, parse("ivf:centroids=32:nprobe=1")[0])
    assert row.status == "wrong" and row.ms is None
    assert row.recall is not None and row.recall < 0.9 and "--min-recall" in row.note


def test_answers_that_are_not_of_the_keys_found_have_no_speed(
    bench: Bench, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index finds the right keys, the layer attends to others: right recall, still wrong."""
    search = bench_quality._search

    def shifted(*given: Any) -> Any:
        ids, scanned = search(*given)
        return np.where(ids >= 0, ids // 2 + 4, ids), scanned

    monkeypatch.setattr(bench_quality, "_search", shifted)
    row = measure(bench, source, parse("flat")[0])
    assert row.status == "wrong" and "attention over the keys it found" in row.note


def test_a_loop_that_drifts_has_no_speed(bench: Bench, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the timed loop are compared with ordinary forwards at the measured length."""
    decode = Retrieval.decode

    def drifting(self: Retrieval, *given: Any, **more: Any) -> Any:
        done = decode(self, *given, **more)
        if self.position == 600:
            done.logits = [1.5 * item for item in done.logits]
        return done

    monkeypatch.setattr(Retrieval, "decode", drifting)
    row = measure(bench, source, parse("flat")[0])
    assert row.status == "wrong" and "ordinary forward" in row.note


def test_what_does_not_fit_says_how_much_it_needs(bench: Bench, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by arithmetic: 2 x 600 tokens and room of 512 bytes each, and the weights."""
    monkeypatch.setattr(bench, "limit", bench.weight_bytes + 1000)
    row = measure(bench, source, parse("full-graph")[0])
    assert row.status == "does not fit" and row.ms is None
    assert "needs" in row.note and "given" in row.note


def test_placed_keys_decode_as_read_ones(bench: Bench) -> None:
    """A cache that was filled, and one that the model filled by reading, give the same logits."""
    ids = bench.ids(300)
    read = ReadSource(bench.model, ids, 128)
    found = []

    def placed(config: ra.Config) -> ra.RetrievalCache:
        return place(bench.model, ra.RetrievalCache(bench.model, config), read, [(0, 300)])

    for made in (read.retrieval, placed):
        method = make(parse("flat")[0], bench.model, bench.config)
        assert isinstance(method, Retrieval)
        # clusters come by the queries of a read, and placed keys have none
        method.hold(made(method.config.replace(tail=False)), 300)
        found.append(torch.stack(method.decode(3, keep=True).logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_the_model_asks_what_the_synthetic_head_asks(bench: Bench, source: Any) -> None:
    """The query that reaches attention at position 600 + i is synthetic query i, rotated by the model there."""
    method = make(parse("flat")[0], bench.model, bench.config)
    assert isinstance(method, Retrieval)
    method.prepare(source, 8)
    with source.feeding():
        asked = bench_quality._queries(method)
    (head, *_) = synthetic.synthetic_heads(
        600, 2, head_dim=16, group=2, train=64, decode=bench_keys.BANK, seed=0, theta=10000.0
    )
    place = 600 % bench_keys.BANK
    wanted = rotate(torch.from_numpy(head.decode[:, place : place + 1]), torch.tensor([-place]), 10000.0)
    np.testing.assert_allclose(asked[0][:2, :1], wanted.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keys", ["mid", "read"])
def test_published_methods_attend_to_their_budgets(keys: str) -> None:
    """2,048 tokens and what was generated, InfLLM more, Quest's first two layers all; on placed and on read keys."""
    bench = Bench(arguments("unused", "--methods", "snapkv", "--keys", keys))
    source = bench.source(9000)
    attended = {"snapkv": (2048, 2060), "pyramidkv": (2048, 2060), "streaming_llm": (2048, 2049)}
    attended |= {"infllm": (6000, 6500), "quest": (9000, 9010)}
    for name, (least, most) in attended.items():
        row = measure(bench, source, parse(name)[0])
        assert row.status == "ok" and row.ms is not None and row.error is not None, row
        assert row.device_touched is not None
        assert least <= row.device_touched / source.token_bytes < most


def test_hooks_are_gone_after_feeding(bench: Bench, source: Any) -> None:
    """The model's own queries come back."""
    with source.feeding():
        assert attentions(bench.model)[0].q_proj._forward_hooks
    assert not attentions(bench.model)[0].q_proj._forward_hooks and not bench.model._forward_pre_hooks


def test_layers_may_share_keys(bench: Bench) -> None:
    """One layer's keys for both: half the host memory, same loop."""
    shared = SyntheticSource(bench.model, 600, 1, distinct=1, train=64, level="mid", seed=0, threads=1)
    row = measure(bench, shared, parse("flat")[0])
    assert row.status == "ok" and row.recall == 1.0
    assert shared.about == "synthetic:mid, 1 layers' keys shared by 2 layers (other queries)"
    assert bench.source(600).about == "synthetic:mid, all 2 layers distinct"
    assert torch.equal(shared.block(0, 10, 20)[0], shared.block(1, 10, 20)[0])


def test_the_captured_step_is_measured_too(source: Any) -> None:
    """The loop that replays one graph, emulated: two contexts of other keys, checked and replayed by the same graph."""
    bench = Bench(arguments("unused"))
    for tokens in (600, 700):
        with emulated():
            row = measure(bench, bench.source(tokens), parse("flat")[0])
        assert (row.status, row.how, row.recall) == ("ok", "graph", 1.0), row.note


def test_rotation_is_the_synthetic_one() -> None:
    """Half-split pairs, as NumPy does it."""
    vectors = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    places = np.array([0, 1, 77, 600, 131071])
    got = rotate(torch.from_numpy(vectors), torch.from_numpy(places), 5e5).numpy()
    np.testing.assert_allclose(got, synthetic.rotate(vectors, places, 5e5), rtol=1e-4, atol=1e-4)


def test_spans_are_cut_at_fixed_blocks() -> None:
    """Values come from a generator per block of the context, whatever is asked for."""
    assert list(blocks([(0, 4), (8000, 20000)])) == [(0, 4), (8000, 8192), (8192, 16384), (16384, 20000)]


def test_busy_time_counts_overlap_once() -> None:
    """Two kernels and a copy that overlaps one of them, over two steps; microseconds in, milliseconds out."""
    busy = busy_of([("gemm", 0, 1000), ("Memcpy DtoH", 500, 1500), ("gemm", 3000, 4000)], 2)
    assert (busy.kernels, busy.copies, busy.any) == pytest.approx((1.0, 0.5, 1.25))


def test_lengths_are_written_as_people_write_them() -> None:
    """k and m are powers of two, as context lengths are."""
    assert lengths_of("4k,1m,100,4K") == [100, 4096, 1 << 20]


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        (["--lengths", "4q"], ConfigError, "--lengths"),
        (["--lengths", ""], ConfigError, "--lengths"),
        (["--methods", "flat,magic"], ConfigError, "magic"),
        (["--methods", "flat:beam=3"], ConfigError, "no option beam"),
        (["--methods", "static:beam=3"], ConfigError, "takes no options"),
        (["--methods", "roargraph:beam"], ConfigError, "name=value"),
        (["--methods", ","], ConfigError, "names none"),
        (["--tokens", "0"], ConfigError, "--tokens"),
        (["--batch", "0"], ConfigError, "--batch"),
        (["--distinct-layers", "0"], ConfigError, "--distinct-layers"),
        (["--keys", "soft"], ConfigError, "--keys"),
        (["--min-recall", "2"], ConfigError, "--min-recall"),
        (["--shape", "huge"], ConfigError, "llama-3-8b"),
        (["--gpu-memory", "24GiB"], MemoryPlanError, "cpu"),
        (["--lengths", "600,128k"], ContextLengthError, "--lengths 131072: needed as many positions"),
        # 2M tokens of 32 layers in float32: more than any machine of the tests has; refused before weights are made
        (["--shape", "llama-3-8b", "--lengths", "2000k"], MemoryPlanError, "all of 32 distinct layers needs .* GiB of"),
        (["--shape", "llama-3-8b", "--lengths", "2000k", "--distinct-layers", "31"], MemoryPlanError, "all of 31"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, extra: list[str], error: type[Exception], words: str) -> None:
    """Each with its own error, and no folder left behind."""
    with pytest.raises(error, match=words):
        bench_decode.run(arguments(tmp_path / "out", *extra))
    assert not (tmp_path / "out").exists()


def test_decoding_has_room_at_the_end_of_the_positions(bench: Bench) -> None:
    """A model's own limit, a published length, is a context a little shorter; the others stay as they are."""
    assert with_room([600, 4096], 131072, 8) == [600, 4096]
    assert with_room([4096, 131072], 131072, 16) == [4096, 130944]
    assert with_room([131070, 131072], 131072, 16) == [130944]
    assert with_room([64], 64, 16) == [56]
    limit = bench.model.config.max_position_embeddings
    found = bench.source(with_room([limit], limit, 2)[0])
    assert limit - 200 < found.tokens < limit


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    """A folder with something in it is refused before anything is measured."""
    (tmp_path / "old").write_text("x")
    with pytest.raises(RunFolderError):
        bench_decode.run(arguments(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_command_on_a_device(tmp_path: Path, dtype: str) -> None:
    """Every method under a cap, graphs where they are meant to be, and a share of waiting."""
    extra = ["--device", "cuda", "--dtype", dtype, "--gpu-memory", "4GiB", "--tokens", "8", "--lengths", "2k"]
    extra += ["--record"]
    folder = tmp_path / "out"
    methods = "flat,static,full-resident,full-graph,full-eager,offloaded"
    tail = ["--methods", methods, "--output-dir", str(folder)]
    assert main(["bench", "decode", *SMALL, *extra, *tail]) == 0
    report = json.loads((folder / "decode.json").read_text())
    for row in report["rows"]:
        assert row["status"] == "ok", row
        assert row["device_process"] <= 4 << 30
        assert row["gpu"] is None or 0 <= row["wait"] <= 1
    hows = {row["method"]: row["how"] for row in report["rows"]}
    assert hows["full-resident"] == hows["full-graph"] == "graph"
    assert hows["flat"] == hows["static"] == "graph"


@pytest.mark.cuda
def test_a_large_shape_keeps_its_rotary_frequencies() -> None:
    """bf16 weights made on the device; frequencies in bf16 would be wrong far from the start."""
    model = random_model("tiny", torch.bfloat16, 0, "cuda")
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    cache = None
    ids = torch.ones(1, 1, dtype=torch.long, device="cuda")
    assert forward_logits(model, cache, ids, ids).isfinite().all()
