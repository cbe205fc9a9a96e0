"""`bench serve`: every way answers a workload's requests alike, and a row that does not is named."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from eval.tests.test_bench_session import SMALL
from retrieval_attn.cli import build_parser, main
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.call import Call
from retrieval_attn_eval.bench.serve.command import run
from retrieval_attn_eval.bench.serve.cuts import cuts
from retrieval_attn_eval.bench.serve.drive import WAYS, Drive, Served
from retrieval_attn_eval.bench.serve.report import markdown, plots
from retrieval_attn_eval.bench.serve.row import Bounds, Row, row_of
from retrieval_attn_eval.bench.serve.tree_room import tree_bytes
from retrieval_attn_eval.bench.serve.workload import Ids, Workload, calls_of, lines_of
from retrieval_attn_eval.bench.session.subject import Subject
from retrieval_attn_eval.load.line import Block, read_trace

pytestmark = pytest.mark.usefixtures("one_thread")

WORKLOAD = Workload(
    kind="clients", requests=5, length=80, question=8, tokens=4, scale=0.01, rate=0.0, speed=10.0, clients=2, seed=3
)
BOUNDS = Bounds(2.0, 0.1)


def drawn(workload: Workload, ids: Ids) -> list[Call]:
    """Calls of a workload without a trace."""
    return calls_of(workload, lines_of(workload, []), ids)


def numbers() -> Any:
    """Texts that all differ."""
    counter = iter(range(1 << 20))
    return lambda tokens: [next(counter) for _ in range(tokens)]


def line(milliseconds: float, tokens: int, answer: int, *names: int) -> str:
    fields = {"timestamp": milliseconds, "input_length": tokens, "output_length": answer, "hash_ids": names}
    return json.dumps(fields)


TRACE = [
    line(1000, 1100, 400, 1, 2, 3),
    line(1100, 1536, 300, 1, 2, 4),
    line(1050, 1100, 300, 1, 2, 3),  # the first one again
    line(1200, 200, 300, 9),
]


def test_trace_blocks_become_parts(tmp_path: Path) -> None:
    """Requests share whole parts: what begins alike is cut alike, and the last part is a request's own."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(TRACE) + "\n\n")
    lines = read_trace(path, 10, block_tokens=64)
    assert [one.seconds for one in lines] == pytest.approx([0, 0.05, 0.1, 0.2])
    assert lines[0].blocks == (Block(1, 64), Block(2, 64), Block(3, 9)), "76 of 512 tokens, where a block has 64"
    traced = replace(WORKLOAD, kind="trace")
    calls = calls_of(traced, lines_of(traced, lines), numbers())
    first, again, other, alone = (call.request.parts for call in calls)
    assert first == again and first[0] == other[0] and len(first[0]) == 128 and first[1] != other[1]
    assert [len(part) for part in other] == [128, 64] and [len(part) for part in alone] == [25]
    assert [call.request.max_tokens for call in calls] == [4, 3, 3, 3]
    assert [call.arrival for call in calls] == pytest.approx([0, 0.005, 0.01, 0.02])
    assert len(read_trace(path, 2)) == 2


def test_cuts_where_prompts_part() -> None:
    a, b, c, d = (Block(name, 512) for name in range(4))
    assert cuts([(a, b, c), (a, b, d)]) == [[2, 3], [2, 3]]
    assert cuts([(a, b), (a, b, c)]) == [[1, 2], [1, 2, 3]], "the shorter one shares all but its own last part"
    assert cuts([(a,), (a,)]) == [[1], [1]]
    assert cuts([(a, b, c), (d,)]) == [[3], [1]], "nothing is shared: one part"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[1]", line(0, 600, 1, 1), line(0, 0, 1), line(0, 1, 0, 1), '{"timestamp": 1}']
)
def test_bad_traces_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputDataError, match="line 1|at least one request"):
        read_trace(path, 10)
    with pytest.raises(InputDataError, match="readable"):
        read_trace(tmp_path / "none", 10)


def test_workloads() -> None:
    clients = drawn(WORKLOAD, numbers())
    assert [[len(part) for part in call.request.parts] for call in clients] == [[72, 8]] * 5
    assert len({call.request.parts[0] for call in clients}) == 5 and {call.arrival for call in clients} == {0.0}
    document = drawn(replace(WORKLOAD, kind="document"), numbers())
    assert len({call.request.parts[0] for call in document}) == 1
    assert len({call.request.parts[1] for call in document}) == 5
    mixed_workload = replace(WORKLOAD, kind="mixed", requests=200, rate=4.0, scale=0.5)
    mixed = drawn(mixed_workload, numbers())
    assert [call.arrival for call in mixed] == sorted(call.arrival for call in mixed)
    assert 35 < mixed[-1].arrival < 70, "200 arrivals at 4 a second"
    tokens = [call.request.max_tokens for call in mixed]
    assert min(tokens) >= 50 and max(tokens) <= 512 == mixed_workload.longest_answer and max(tokens) > 400
    assert all(20 <= call.request.prompt_tokens <= 80 for call in mixed)
    assert drawn(mixed_workload, numbers()) == mixed, "seeded"


@pytest.fixture(scope="module")
def llm() -> Iterator[Served]:
    subject = Subject(SMALL)
    yield Served(subject.model, subject.tokenizer, SMALL.config)


def served(drive: Drive, way: str, calls: Sequence[Call]) -> tuple[list[Answered], float | None, float]:
    """What `Drive.serve` returns where all calls are sent."""
    found, filled, seconds = drive.serve(way, calls)
    return [one for one in found if one is not None], filled, seconds


def document_calls(llm: Served) -> list[Call]:
    """Five questions on one document, the answers of many lengths."""
    vocabulary = llm.model.get_input_embeddings().weight.shape[0]
    ids = numbers()
    calls = drawn(
        replace(WORKLOAD, kind="document", length=200),
        lambda tokens: [1 + one % (vocabulary - 1) for one in ids(tokens)],
    )
    return [
        Call(replace(call.request, max_tokens=3 + 6 * (number % 3)), call.arrival) for number, call in enumerate(calls)
    ]


@pytest.mark.slow
def test_every_way_answers_alike(llm: Served) -> None:
    calls = document_calls(llm)
    drive = Drive(llm, 2, read_first=False, row_seconds=100)
    drive.warm(calls)
    found = {way: served(drive, way, calls) for way in WAYS}
    expected = [one.tokens for one in found["one"][0]]
    assert [len(tokens) for tokens in expected] == [3, 9, 15, 3, 9]
    rows = {way: row_of(way, answers, BOUNDS, expected, filled) for way, (answers, filled, _) in found.items()}
    assert {way: (row.status, row.note) for way, row in rows.items()} == dict.fromkeys(WAYS, ("ok", ""))
    assert all(one.times == tuple(sorted(one.times)) for row in rows.values() for one in row.answers)
    assert all(len(one.times) == len(one.tokens) for row in rows.values() for one in row.answers)
    share = 4 * 200 / (5 * 208)
    assert rows["engine"].cached == rows["one"].cached == pytest.approx(share), "four of five found the document"
    assert rows["tree-off"].cached == 0
    assert max(filled or 0 for _, filled, _ in found.values()) <= 1
    assert all(seconds > 0 for _, _, seconds in found.values())
    answers = found["one"][0]
    ends = [one.times[-1] for one in answers]
    assert all(end <= later.times[0] for end, later in zip(ends, answers[1:], strict=False)), "after each other"
    batches = found["static"][0]
    assert max(one.times[-1] for one in batches[:2]) <= min(one.times[0] for one in batches[2:4])


def test_what_is_read_first_is_not_read_again(llm: Served) -> None:
    calls = document_calls(llm)
    answers, _, _ = served(Drive(llm, 2, read_first=True, row_seconds=100), "engine", calls)
    assert [one.cached_tokens for one in answers] == [200] * 5


def test_texts_decide_the_trees_room(llm: Served) -> None:
    """What a tree holds of all texts fits what arithmetic says of them, which is no more than a few windows above."""
    vocabulary = llm.model.get_input_embeddings().weight.shape[0]
    chance = random.Random(0)
    calls = drawn(replace(WORKLOAD, length=700), lambda n: [chance.randrange(1, vocabulary) for _ in range(n)])
    room = tree_bytes(calls, llm.model, llm.config)
    drive = Drive(llm, 2, read_first=True, row_seconds=100)
    with drive._engine("engine", calls) as engine:
        drive._read(engine, calls)
        held = engine.stats["shared"]
    assert held.prefix_entries_resident == 5 and sum(room) / 3 < held.nbytes <= sum(room)
    assert sum(tree_bytes(calls[:1], llm.model, llm.config)) == sum(room) // 5
    small = Drive(llm, 2, read_first=True, row_seconds=100, shared=(held.nbytes // 2, None))
    answers, _, _ = served(small, "engine", calls)
    assert re.match(r"its tree gave up [3-9] texts", small.gave_up) and all(not one.problem for one in answers)


def test_codes_that_a_gpu_may_keep_have_room(llm: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index "auto" keeps codes on a GPU: a tree without room for them gave texts up."""
    calls = [Call(ra.Request(((5,) * 40_000, (6,)), max_tokens=1), 0.0)]
    config = ra.Config()
    host = tree_bytes(calls, llm.model, config)
    monkeypatch.setattr("retrieval_attn_eval.bench.serve.tree_room.on_gpu", lambda model: True)
    beside = tree_bytes(calls, llm.model, config)
    codes = ra.plan(llm.model, context=40_000, gpu_memory=1 << 50, config=config.replace(index="device"))
    held = sum(item.bytes for item in codes.device if item.name in ("codes of keys", "clusters of coded keys"))
    assert beside.device - host.device == held > 0


def test_late_rows_end(llm: Served) -> None:
    calls = document_calls(llm)
    last = calls[-1].request
    room = llm.model.config.max_position_embeddings - last.prompt_tokens
    calls = [*calls[:-1], Call(replace(last, max_tokens=room, stop_ids=frozenset()), 0.0)]
    with pytest.raises(TimeoutError, match="--timeout"):
        Drive(llm, 2, read_first=False, row_seconds=0.5).serve("engine", calls)


def test_no_request_is_sent_after_some_seconds(llm: Served) -> None:
    """Those that were sent are answered; a client sends its next one after its last answer."""
    calls = [call._replace(session=f"client-{number % 2}") for number, call in enumerate(document_calls(llm))]
    found, _, _ = Drive(llm, 2, read_first=False, row_seconds=100, send_seconds=1e-9).serve("engine", calls)
    assert [one is None for one in found] == [number > 1 for number in range(len(calls))]
    assert all(one is None or (one.tokens and not one.problem) for one in found)


def test_rows() -> None:
    """Times are of the tokens, bounds of one request each; a wrong answer fails its row."""
    fast = Answered(0.0, (1.0, 1.05, 1.1), (5, 6, 7), 10, 5)
    slow = Answered(1.0, (4.0, 4.05), (5, 6), 30, 0)
    row = row_of("engine", [fast, slow], BOUNDS, [(5, 6, 7), (5, 6)], 0.75)
    assert (row.status, row.tokens, row.seconds) == ("ok", 5, pytest.approx(4.05))
    assert row.rate == pytest.approx(5 / 4.05) and row.good == 0.5 and row.cached == 5 / 40
    assert row.first == pytest.approx((2.0, 2.98)) and row.gap == pytest.approx((0.05, 0.05))
    jerky = replace(fast, times=(1.0, 1.0, 1.21))
    assert not jerky.is_good(2.0, 0.1) and jerky.is_good(2.0, 0.106) and not jerky.is_good(0.9, 0.2)
    wrong = row_of("engine", [fast, slow], BOUNDS, [(5, 6, 7), (5, 9)])
    assert wrong.status == "failed" and "answers 1 are not" in wrong.note and wrong.rate is None
    broken = row_of("engine", [fast, replace(slow, problem="CacheError: gone")], BOUNDS, None)
    assert broken.status == "failed" and "request 1: CacheError" in broken.note


def test_report() -> None:
    fast = Answered(0.0, (1.0, 1.05, 1.1), (5, 6, 7), 10, 5)
    one = row_of("one", [replace(fast, times=(1.0, 2.0, 3.0))], BOUNDS, None)
    rows = [
        one,
        replace(row_of("engine", [fast], BOUNDS, None, 0.5), cpu_seconds=0.5),
        Row("static", "failed", "StoreError: gone"),
    ]
    report: dict[str, Any] = {"command": ["bench"], "commit": "abc", "model": "tiny", "config": {}, "slots": 2}
    report |= {"machine": {"cpu": "some", "cores": 2, "memory_gib": 24}, "facts": {}, "simplifications": ["small"]}
    report |= {"versions": dict.fromkeys(("python", "torch", "transformers", "numba"), "1"), "read_first": True}
    report |= {"workload": WORKLOAD.to_dict(), "bounds": {"first_seconds": 2.0, "token_seconds": 0.1}}
    report |= {"prompts": {"requests": 1, "least": 10, "most": 10, "answers": 3, "last_arrival": 0.0}}
    text = markdown(rows, report)
    assert "| one after the other | 1 | 1.00 |  | 3 |" in text
    assert "| engine | 2.73 | 2.73 |  | 1.1 | 0.5 | 1 | 1 | 50 | 50 | 100% | 50.0% | 50% |" in text
    assert "| static batches | failed |" in text and "- static batches: StoreError: gone" in text
    firsts, gaps = plots(rows, "tiny")
    assert set(firsts.lines) == set(gaps.lines) == {"one after the other", "engine"}
    assert gaps.lines["engine"][-1] == (pytest.approx(0.05), 1.0)
    json.dumps([row.to_dict() for row in rows])


def arguments(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "serve", "--device", "cpu", "--no-plot", *flags])


def test_refusals_come_before_anything_is_measured(tmp_path: Path) -> None:
    out = ("--output-dir", str(tmp_path / "out"))
    for flags, error in (
        (("--n", "0"), ConfigError),
        (("--max-num-seqs", "0"), ConfigError),
        (("--scale", "nan"), ConfigError),
        (("--rate", "inf"), ConfigError),
        (("--rate", "nan"), ConfigError),
        (("--systems", "magic"), ConfigError),
        (("--workload", "trace"), ConfigError),
        (("--length", "32"), ConfigError),
        (("--length", "1m"), ContextLengthError),
        (("--prefix-cache-memory", "much"), ConfigError),
        (("--prefix-cache-gpu-memory", "much"), ConfigError),
        (("--layers", "1"), ConfigError),
        (("--shape", "tiny", "--random-ids", "--layers", "3"), ConfigError),
    ):
        with pytest.raises(error):
            run(arguments(*flags, *out))
    assert not (tmp_path / "out").exists()


def test_fewer_layers_are_said(tmp_path: Path) -> None:
    flags = ["bench", "serve", "--shape", "tiny", "--layers", "1", "--random-ids", "--device", "cpu", "--no-plot"]
    flags += ["--n", "2", "--length", "80", "--tokens", "2", "--systems", "engine", "--index", "flat"]
    assert main([*flags, "--prefix-cache-memory", "1MiB", "--output-dir", str(tmp_path / "one")]) == 0
    report = json.loads((tmp_path / "one" / "serve.json").read_text())
    assert report["model"] == "random:tiny, 1 of 2 layers" and report["facts"]["layers"] == 1
    assert "random weights of the shape tiny, 1 of 2 layers" in report["simplifications"]
    assert report["prefix_cache_bytes"] == "1MiB"


@pytest.mark.slow
def test_command_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model: all rows of the engine, as they come; prompts share their beginning."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(TRACE))
    flags = ["bench", "serve", "--workload", str(path), "--shape", "tiny", "--random-ids"]
    flags += ["--device", "cpu", "--index", "flat", "--threads", "1", "--scale", "0.02", "--block", "64"]
    assert main([*flags, "--max-num-seqs", "2", "--output-dir", str(tmp_path / "one")]) == 0
    report = json.loads((tmp_path / "one" / "serve.json").read_text())
    assert report["finished"] and (tmp_path / "one" / "serve.png").stat().st_size > 10_000
    rows = {row["way"]: row for row in report["rows"]}
    assert {way: row["status"] for way, row in rows.items()} == dict.fromkeys((*WAYS, "transformers"), "ok")
    assert rows["engine"]["rate"] > 0 and rows["engine"]["cpu_seconds"] > 0
    assert rows["engine"]["tokens"] == 8 + 6 + 6 + 6 and len(rows["engine"]["answers"]) == 4
    assert (
        rows["engine"]["cached"] == pytest.approx(2 * 128 / (137 + 137 + 192 + 25)) and rows["tree-off"]["cached"] == 0
    )
    assert "| engine, tree off |" in capsys.readouterr().out
    assert ra.Config.from_dict(report["config"]).index == "flat"
