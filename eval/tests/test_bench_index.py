"""The benchmark's figures are right where they can be known, and a wrong index is never given a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eval.tests.shared import parsed
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError
from retrieval_attn.index import FlatIndex, SearchResult
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.testing import Training
from retrieval_attn_eval.bench import command as bench
from retrieval_attn_eval.bench import index as bench_index
from retrieval_attn_eval.bench import variants as bench_variants
from retrieval_attn_eval.bench.heads import Head, Source, from_recording
from retrieval_attn_eval.bench.index import measure
from retrieval_attn_eval.bench.measure import Oracle, Point, WrongAnswer, measure_head, points_of
from retrieval_attn_eval.bench.report import mean, plots, summary, table, worst_decile
from retrieval_attn_eval.bench.variants import VARIANTS, HnswlibIndex, HnswlibOptions, Variant, choose, lists_of
from retrieval_attn_eval.recording.files import HeadRecording, Recording
from retrieval_attn_eval.runs import RunFolderError

DIM = 16


def small_head(n: int = 700, seed: int = 0) -> Head:
    rng = np.random.default_rng(seed)
    draw: Any = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    keys = from_float32(draw(n, DIM), Format.BFLOAT16)
    return Head("small", Format.BFLOAT16, keys, draw(2, 50, DIM), draw(2, 50, DIM), draw(2, 6, DIM), 0.5)


class Altered(FlatIndex):
    """A flat index whose answers are changed on their way out."""

    kind = "altered"
    change: Any = staticmethod(lambda ids, scores: (ids, scores))

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        found = super().search(queries, k, limit=limit)
        ids, scores = type(self).change(found.ids.copy(), found.scores.copy())
        return SearchResult(ids, scores, found.keys_scanned)


def run_altered(monkeypatch: pytest.MonkeyPatch, change: Any, name: str = "flat") -> Point:
    monkeypatch.setattr(Variant, "build", lambda self, head, lists: Altered(head.keys, head.fmt))
    monkeypatch.setattr(Altered, "change", staticmethod(change))
    point = Point(name, None, 700)
    measure_head(Variant(name, "flat"), Oracle(small_head(), 10), {None: point}, lists=None, tokens=1, threads=1)
    return point


def swap(ids: Any, scores: Any) -> Any:
    ids[:, [0, 5]] = ids[:, [5, 0]]
    return ids, scores


def repeat(ids: Any, scores: Any) -> Any:
    ids[:, 3], scores[:, 3] = ids[:, 2], scores[:, 2]
    return ids, scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "inner products"),
        (repeat, "twice"),
        (lambda ids, scores: (ids[:, ::-1], scores[:, ::-1]), "ordered"),
        (lambda ids, scores: (ids[:, :9], scores[:, :9]), "needed 10"),
        (lambda ids, scores: (np.where(ids == ids[0, 0], -1, ids), scores), "needed 10"),
        (lambda ids, scores: (ids, scores * 1.01), "inner products"),
        (lambda ids, scores: (ids, scores * np.nan), "inner products|ordered"),
    ],
)
def test_wrong_answers_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch, change: Any, message: str) -> None:
    """Swapped, repeated, unordered, missing or wrongly scored keys: no times for such an index."""
    with pytest.raises(WrongAnswer, match=message):
        run_altered(monkeypatch, change)


def worse(ids: Any, scores: Any) -> Any:
    """The best 8 and two keys far down the list, correctly scored."""
    head = small_head()
    if len(ids) != 12:  # a timed search of one token
        return ids, scores
    exact = head.decode.reshape(-1, DIM).astype(np.float64) @ head.plain_keys().T.astype(np.float64)
    low = np.argsort(-exact, axis=1)[:, [300, 400]]
    ids[:, 8:] = low
    scores[:, 8:] = np.take_along_axis(exact, low, axis=1)
    return ids, scores


def test_recall_and_mass_are_what_was_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 of 10 right: recall .8, and the mass of the best 8 against the best 10. An exact kind may not do that."""
    point = run_altered(monkeypatch, worse, name="other")
    assert point.recall == pytest.approx([0.8, 0.8])
    head = small_head()
    logits = 0.5 * head.decode.astype(np.float64) @ head.plain_keys().T.astype(np.float64)
    weights = -np.sort(-np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True), axis=2)
    wanted = (weights[..., :8].sum(2) / weights[..., :10].sum(2)).mean(1)
    np.testing.assert_allclose(point.mass, wanted, rtol=1e-6)
    far = weights[..., [300, 400]].sum(2).mean(1)
    np.testing.assert_allclose(point.captured, weights[..., :8].sum(2).mean(1) + far, rtol=1e-6)
    assert len(point.warm_us) == len(point.cold_us) == 1 and point.scanned == [1.0, 1.0]
    with pytest.raises(WrongAnswer, match="found 0.8"):
        run_altered(monkeypatch, worse, name="flat")


def test_every_variant_that_is_here_can_be_measured() -> None:
    """All registered kinds on one small head: exact ones find everything, wider settings find more."""
    head = small_head()
    oracle, lists = Oracle(head, 20), lists_of(head)
    assert lists.shape == (2, 50, bench_variants.LIST_K)
    measured = set()
    for variant in VARIANTS.values():
        if variant.missing() is not None:
            continue
        points = points_of(variant, len(head.keys))
        measure_head(variant, oracle, points, lists=lists, tokens=1, threads=1)
        recalls = [mean(point.recall) for point in points.values()]
        assert recalls[-1] >= recalls[0] and recalls[-1] > 0.5, (variant.name, recalls)
        if variant.name.startswith("flat"):
            assert recalls == [1.0]
        measured.add(variant.name)
    assert {"flat", "ivf", "hnsw", "roargraph"} <= measured


@pytest.mark.skipif(VARIANTS["hnswlib"].missing() is not None, reason="hnswlib is not installed")
def test_hnswlib_is_searched_by_inner_product() -> None:
    """Its graph is built by L2 and loaded again: a wide beam must find the exact best inner products."""
    head = small_head()
    index = HnswlibIndex.build(head.keys, head.fmt, HnswlibOptions(ef_search=700), Training())
    found = index.search(head.decode[0], 10)
    oracle = Oracle(head, 10, head.decode[:1])
    oracle.check(found, "hnswlib")
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found.ids, oracle.best[0], strict=True)]) > 9.5
    assert len(index) == 700 and index.memory.host > 700 * DIM * 4


def test_names_of_variants() -> None:
    """Unknown names are refused, absent kinds are said."""
    with pytest.raises(ConfigError, match="faltt"):
        choose("flat,faltt")
    chosen, _ = choose("roargraph,flat,flat")
    assert [variant.name for variant in chosen] == ["roargraph", "flat"]
    known = dict(VARIANTS)
    try:
        VARIANTS["absent"] = Variant("absent", "no_such_kind")
        chosen, notes = choose("flat,absent")
        assert [variant.name for variant in chosen] == ["flat"] and "no_such_kind" in notes[0]
        with pytest.raises(ConfigError, match="none can be measured"):
            choose("absent")
    finally:
        VARIANTS.clear()
        VARIANTS.update(known)


def test_sources(tmp_path: Path) -> None:
    """Synthetic heads differ by number; a recording loses sinks, window and surplus training queries."""
    source = Source("synthetic:hard", 30, 32, 0, tmp_path)
    source.check()
    heads = list(source.heads(300, 2))
    assert [head.name for head in heads] == ["hard0", "hard1"] and heads[0].keys.shape == (300, 32)
    assert not np.array_equal(heads[0].keys, heads[1].keys) and heads[0].train.shape == (4, 30, 32)
    with pytest.raises(ConfigError, match="synthetic:easy"):
        Source("synthetic:easy", 30, 32, 0, tmp_path).check()
    one = recorded(900)
    head = from_recording(one, 12)
    np.testing.assert_array_equal(head.keys, one.keys[128:-512])
    assert head.train.shape == head.own.shape == (2, 12, DIM) and head.group == 2
    with pytest.raises(InputDataError, match="640"):
        from_recording(recorded(640), 12)
    Recording((one, one)).save(tmp_path / "made")
    loaded = list(Source(str(tmp_path / "made"), 20, 0, 0, tmp_path).heads(0, 1))
    assert len(loaded) == 1 and loaded[0].train.shape == (2, 20, DIM)


def recorded(n: int) -> HeadRecording:
    rng = np.random.default_rng(n)
    keys = from_float32(rng.standard_normal((n, DIM), dtype=np.float32), Format.BFLOAT16)
    train = rng.standard_normal((2, 40, DIM), dtype=np.float32)
    places = np.arange(40, dtype=np.int64)
    return HeadRecording(
        layer=0, kv_head=n % 2, fmt=Format.BFLOAT16, scale=0.25, keys=keys, values=keys,
        train=train, train_rotated=train, train_positions=places, train_targets=places + n,
        decode=train[:, :5], decode_positions=np.arange(n, n + 5, dtype=np.int64),
    )  # fmt: skip


def test_summary_and_table() -> None:
    """Means, worst deciles and medians; the first setting of a kind that reaches .95 is marked."""
    costs = ([64.0, 64.0], [5.0, 7.0], [10.0, 30.0], [4.0, 6.0], [9.0, 9.0], [2.0], [40.0])  # bytes read to index bytes
    points = [
        Point("a", 1, 10, [0.9, 0.9], [1, 1], [0.5, 0.7], [0.1, 0.3], *costs),
        Point("a", 2, 10, [0.96, 0.98], [1, 1], [0.5, 0.7], [0.2, 0.4], *costs),
        Point("a", 3, 10, [0.99, 0.99], [1, 1], [0.5, 0.7], [float("nan")] * 2, [1, 1], [], [], [], [], [2], [40]),
    ]
    row = summary(points[0])
    assert row["recall"] == pytest.approx(0.9) and row["scanned"] == pytest.approx(0.2)
    assert row["cold_us"] == 20 and row["warm_cpu_us"] == 5 and row["bytes_per_key"] == 4
    assert summary(points[2])["scanned"] is None and summary(points[2])["warm_us"] is None
    lines = table(points).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["a 1", "a 2 *", "a 3"]
    assert worst_decile([0.0] + [1.0] * 9) < 1 and mean([]) != mean([])
    names = [name for name, _ in plots(points, "t")]
    assert names == ["recall_scanned.png", "latency_recall.png", "build_length.png"]


def command(*flags: str) -> int:
    return bench.run(parsed(bench, *flags))


SMALL = ("--source", "synthetic:mid", "--n", "1")


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_index, "HEAD_DIM", 32)
    monkeypatch.setattr(bench_index, "TRAIN_QUERIES", 128)


def test_the_command_writes_table_json_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lengths of one small synthetic head, all files there, numbers consistent with the table."""
    flags = (
        "index",
        *SMALL,
        "--lengths",
        "600,1200",
        "--methods",
        "flat,ivf,roargraph",
        "--tokens",
        "2",
        "--retrieve",
        "30",
    )
    where = ("--output-dir", str(tmp_path / "out"))
    assert command(*flags, *where, "--dry-run") == 0
    assert "600, 1,200" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert command(*flags, *where) == 0
    out = capsys.readouterr().out
    assert "| 1,200 | flat * | 1.000 |" in out
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    flat = [row for row in report["points"] if row["variant"] == "flat"]
    assert [row["keys"] for row in flat] == [600, 1200] and all(row["recall"] == 1 for row in flat)
    assert all(row["query_heads"] == 4 and row["warm_us"] > 0 for row in report["points"])
    for name in ("recall_scanned.png", "latency_recall.png", "build_length.png"):
        assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "out" / "bench.md").read_text().count("|") > 50
    with pytest.raises(RunFolderError):
        command(*flags, *where)


def test_recordings_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model is recorded on the fly; the second run finds the recording."""
    source = Source("bundled", 32, 0, 0, tmp_path)
    points = measure(source, 900, choose("flat")[0], 2, 20, tokens=1, threads=1, progress=False)
    assert points[0].recall == [1.0] * 8
    monkeypatch.setattr(Recording, "save", None)
    again = measure(source, 900, choose("flat")[0], 2, 20, tokens=1, threads=1, progress=False)
    assert again[0].captured == points[0].captured


def test_recordings_stay_in_the_folder_of_the_results(tmp_path: Path) -> None:
    """The command writes nothing beside --output-dir."""
    flags = ("index", "--lengths", "700", "--methods", "flat", "--n", "1", "--retrieve", "5", "--tokens", "1")
    out = tmp_path / "out"
    assert command(*flags, "--no-plot", "--output-dir", str(out)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and len(list((out / "recordings").iterdir())) == 1


def test_wrong_answers_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, a line on stderr, no table, no files."""
    monkeypatch.setattr(Variant, "build", lambda self, head, lists: Altered(head.keys, head.fmt))
    monkeypatch.setattr(Altered, "change", staticmethod(swap))
    assert command("index", *SMALL, "--lengths", "600", "--methods", "flat", "--output-dir", str(tmp_path / "out")) == 1
    captured = capsys.readouterr()
    assert "inner products" in captured.err and "|" not in captured.out and not (tmp_path / "out").exists()


WRONG = (
    "--lengths 0", "--lengths a", "--methods nothing", "--threads 0", "--threads 4096", "--tokens 0", "--n 0",
    "--retrieve 0", "--source synthetic:soft",
)  # fmt: skip


@pytest.mark.parametrize("flags", WRONG)
def test_bad_flags(flags: str, tmp_path: Path) -> None:
    """Named before anything is recorded or built."""
    with pytest.raises(RetrievalAttentionError):
        command("index", *SMALL, *flags.split(), "--output-dir", str(tmp_path / "out"))
