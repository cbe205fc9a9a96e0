"""`bench serve` measures the prefix cache: traces with long prompts, the hit rates that they allow, and servers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.tests.load.tiny_server import TinyServer
from retrieval_attn.cli import main
from retrieval_attn.errors import AdmissionError
from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.cache_use import CacheCounts, cache_use, metric_counts
from retrieval_attn_eval.bench.serve.call import Call, chains
from retrieval_attn_eval.bench.serve.row import Bounds, row_of
from retrieval_attn_eval.bench.serve.simulated import PromptTree, optimal_hits, unlimited_hits
from retrieval_attn_eval.load.line import Line
from retrieval_attn_eval.load.long_prompts import AgentProfile, agent_lines, document_lines
from retrieval_attn_eval.load.sender import FORMS, Asking

TINY = ("--shape", "tiny", "--random-ids", "--device", "cpu", "--index", "flat", "--threads", "1", "--no-plot")


def tree_of(lines: Sequence[Line]) -> PromptTree:
    """Prompts whose tokens are the names of their blocks."""
    return PromptTree(
        np.repeat([block.name for block in line.blocks], [block.tokens for block in line.blocks]) for line in lines
    )


def ceiling(lines: Sequence[Line]) -> float:
    tree = tree_of(lines)
    return sum(unlimited_hits(tree)) / sum(tree.prompt_tokens)


# -- simulations -----------------------------------------------------------------------------------


def test_unlimited_hits_by_hand() -> None:
    tree = PromptTree([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5], [7], [7]])
    assert tree.prompt_tokens == [4, 3, 4, 3, 5, 1, 1]
    # nothing; 1 2; all but the last token; all of three but the last one; 1 2 3 4; nothing; its one token is needed
    assert unlimited_hits(tree) == [0, 2, 3, 2, 4, 0, 0]


def test_unlimited_hits_are_longest_common_prefixes() -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(200)]

    def common(first: list[int], second: list[int]) -> int:
        return next(
            (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )

    expected = [
        min(len(prompt) - 1, max((common(prompt, earlier) for earlier in prompts[:number]), default=0))
        for number, prompt in enumerate(prompts)
    ]
    assert unlimited_hits(PromptTree(prompts)) == expected


def test_optimal_hits_by_hand() -> None:
    a, b, c = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    asked = [[*text, number] for number, text in enumerate((a, b, c, a, b, a), start=10)]
    tree = PromptTree(asked)
    assert unlimited_hits(tree) == [0, 0, 0, 4, 4, 4]
    assert optimal_hits(tree, 100) == unlimited_hits(tree)
    # after b: a and 2 of b stay; after c: a is needed first, then b; after a: a and 2 of b stay, as after b
    assert optimal_hits(tree, 6) == [0, 0, 0, 4, 2, 4]
    assert optimal_hits(tree, 4) == [0, 0, 0, 4, 0, 4], "a least recently used cache would hit nothing"
    assert optimal_hits(tree, 0) == [0] * 6


def test_optimal_evicts_ends_of_prompts_first() -> None:
    """A prefix stays as long as anything after it: the rest of a prompt cannot be hit without it."""
    tree = PromptTree([[1, 2, 3, 4], [9, 9], [1, 2, 3, 4, 5]])
    assert optimal_hits(tree, 3) == [0, 0, 3]


# -- traces ----------------------------------------------------------------------------------------


def test_documents() -> None:
    lines = document_lines(400, 128 << 10, 32, 64, [0.0] * 400, 4, seed=1)
    texts = [line.blocks[0] for line in lines]
    assert 40 < len(set(texts)) <= 50 and all(8 << 10 <= text.tokens <= 128 << 10 for text in texts)
    counts = sorted((texts.count(text) for text in set(texts)), reverse=True)
    assert counts[0] > 5 * counts[25] and sum(counts) == 400, "Zipf"
    assert len({line.blocks[1] for line in lines}) == 400 and {line.answer_tokens for line in lines} == {64}
    assert [line.session for line in lines[:5]] == ["client-0", "client-1", "client-2", "client-3", "client-0"]
    assert [line.delay for line in lines[:5]] == [None] * 4 + [0.0]
    assert (
        document_lines(400, 128 << 10, 32, 64, [0.0] * 400, 4, seed=1)
        == lines
        != document_lines(400, 128 << 10, 32, 64, [0.0] * 400, 4, seed=2)
    )
    opened = document_lines(16, 4096, 32, 64, [float(second) for second in range(16)], 4, seed=1)
    assert {line.session for line in opened} == {None} and len({line.blocks[0] for line in opened}) == 2


def test_agents_append_and_clear() -> None:
    lines = agent_lines(3, 20_480, 6, [0.0] * 3, seed=0)
    sessions = {name: [line for line in lines if line.session == name] for name in ("agent-0", "agent-1", "agent-2")}
    assert all(100 <= len(turns) <= 200 for turns in sessions.values())
    assert max(line.prompt_tokens for line in lines) <= 20_480
    assert len({line.blocks[0] for line in lines}) == 1, "one system prompt"
    cleared = 0
    for turns in sessions.values():
        assert [line.delay for line in turns] == [None] + [0.0] * (len(turns) - 1)
        for before, after in pairwise(turns):
            assert len(after.blocks) == len(before.blocks) + 2 and 102 <= after.blocks[-1].tokens <= 205
            cleared += after.blocks[: len(before.blocks)] != before.blocks
    assert cleared > 10
    assert agent_lines(3, 20_480, 6, [0.0] * 3, seed=0) == lines


def test_agents_of_few_turns_fill_their_prompt() -> None:
    for turns in (40, 60, 300):
        lines = agent_lines(1, 16_384, 16, [0.0], 0, AgentProfile.of_turns(turns))
        assert len(lines) == turns and 12_000 < max(line.prompt_tokens for line in lines) <= 16_384


def test_agents_have_the_hit_rates_of_agentx() -> None:
    """Of its traces 96.8 %, and 85.8 % if contexts are compacted."""
    appended = AgentProfile(limits=(1.0, 1.0), kept=0.85)
    mean = np.mean([ceiling(agent_lines(4, 10_240, 3, [0.0] * 4, seed)) for seed in range(3)])
    assert mean == pytest.approx(0.858, abs=0.03)
    mean = np.mean([ceiling(agent_lines(4, 10_240, 3, [0.0] * 4, seed, appended)) for seed in range(3)])
    assert mean == pytest.approx(0.968, abs=0.01)


def test_chains() -> None:
    calls = [Call(None, 0.0, name) for name in ("a", None, "b", "a", None, "b", "a")]  # type: ignore[arg-type]
    assert chains(calls) == [[0, 3, 6], [1], [2, 5], [4]]


# -- counts and tables -----------------------------------------------------------------------------

METRICS = """
# HELP retrieval_attn:prefix_cache_evictions_total Prefix-cache entries evicted
retrieval_attn:prefix_cache_evictions_total 7.0
retrieval_attn:prefix_cache_evicted_bytes_total 7e+09
retrieval_attn:prefix_cache_disk_evictions_total 5.0
retrieval_attn:window_evictions_total 100.0
retrieval_attn:tier_hit_tokens_total{tier="memory"} 1200.0
retrieval_attn:tier_hit_tokens_total{tier="disk"} 0.0
"""


def test_metrics() -> None:
    counts = metric_counts(METRICS)
    assert counts == CacheCounts({"all": 7, "to disk": 5}, {"memory": 1200, "disk": 0})
    by_tier = METRICS.replace("_evictions_total 7.0", '_evictions_total{tier="device"} 9.0')
    assert metric_counts(by_tier).evicted == {"device": 9, "to disk": 5}
    assert counts.since(CacheCounts({"all": 2, "to disk": 1}, {"memory": 200})) == CacheCounts(
        {"all": 5, "to disk": 4}, {"memory": 1000, "disk": 0}
    )
    assert metric_counts("vllm:prefix_cache_hits_total 3.0") == CacheCounts()


def test_use_by_hand() -> None:
    tree = PromptTree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [8, 8]])
    answers = [
        Answered(0.0, (4.0, 4.1, 4.3), (5, 6, 7), 4, 0),
        Answered(5.0, (6.0, 6.1), (5, 6), 4, 2),
        Answered(5.0, (7.0,), (5,), 4, 3),
        Answered(5.0, (), (), 2, 0, "AdmissionError: too long", refused=True),
    ]
    use = cache_use(answers, tree, CacheCounts(peak_tokens=2))
    assert use is not None and use.refused == 1
    assert (use.hit, use.ceiling, use.optimal) == pytest.approx((5 / 12, 6 / 12, 4 / 12))
    assert use.first == pytest.approx([2.0, 3.6, 3.96]) and (use.first_hit, use.first_miss) == (1.5, 4.0)
    assert use.token == pytest.approx(0.125)
    assert cache_use(answers[1:], tree, CacheCounts()).ceiling == pytest.approx(6 / 8), "the first one was read before"  # type: ignore[union-attr]
    assert cache_use(answers[3:], tree, CacheCounts()) is None
    row = row_of("engine", answers, Bounds(2.0, 0.2), None)
    assert row.status == "ok" and row.note == "1 of 4 requests were refused; request 3: AdmissionError: too long"
    assert row_of("engine", answers[3:], Bounds(2.0, 0.2), None).status == "failed"


def test_forms_of_a_prompt() -> None:
    texts = ["system", "task", "answer", "result"]
    raw, user, system = (Asking("m", form=form).prompt(texts) for form in FORMS)
    assert raw == {"prompt": "system\n\ntask\n\nanswer\n\nresult"}
    said = [(one["role"], one["content"]) for one in user["messages"]]
    assert said == [("user", "system\n\ntask"), ("assistant", "answer"), ("user", "result")]
    said = [(one["role"], one["content"]) for one in system["messages"]]
    assert said == [("system", "system"), ("user", "task"), ("assistant", "answer"), ("user", "result")]
    said = [(one["role"], one["content"]) for one in Asking("m").prompt(texts)["messages"]]
    assert said == [("user", "system"), ("assistant", "task"), ("user", "answer\n\nresult")], "as a trace's turns"
    assert Asking("m", form="chat-system").prompt(["alone"])["messages"][0]["role"] == "user"


# -- whole runs ------------------------------------------------------------------------------------


def report_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of a run, and its rows by their way."""
    report = json.loads((folder / "serve.json").read_text())
    return report, {row["way"]: row for row in report["rows"]}


def test_documents_in_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all texts the engine hits all that can be hit; with little, no more than the optimum of its memory;
    with little and a disk, nearly all again.
    """
    flags = ["bench", "serve", "--workload", "documents", *TINY, "--n", "24", "--length", "1600", "--question", "8"]
    flags += ["--tokens", "2", "--max-num-seqs", "1"]
    assert main([*flags, "--output-dir", str(tmp_path / "all")]) == 0
    report, rows = report_of(tmp_path / "all")
    use = rows["engine"]["use"]
    assert list(rows) == ["engine"] and report["prompts"]["requests"] == 24
    assert use["hit"] == pytest.approx(use["ceiling"], abs=0.001) and use["ceiling"] > 0.7
    assert use["optimal"] == use["ceiling"] and use["counts"]["evicted"] == {"all": 0, "to disk": 0}
    assert (
        use["refused"] == 0
        and use["counts"]["hit_tokens"]["memory"] > 0
        and len(use["first"]) == 3
        and use["token"] > 0
    )
    out = capsys.readouterr().out
    assert "| prefix cache | hit rate | ceiling | optimal |" in out and f"| engine | {use['hit']:.1%} |" in out
    held = use["counts"]["peak_tokens"]
    small = ["--prefix-cache-memory", f"{held // 3 * 512 / 1024:.0f}KiB"]
    assert main([*flags, *small, "--output-dir", str(tmp_path / "some")]) == 0
    some = report_of(tmp_path / "some")[1]["engine"]["use"]
    assert some["hit"] < some["ceiling"] == use["ceiling"] and some["counts"]["evicted"]["all"] > 0
    assert some["counts"]["peak_tokens"] < held and some["hit"] <= some["optimal"] <= some["ceiling"]
    assert some["counts"]["evicted"]["to disk"] == some["counts"]["hit_tokens"]["disk"] == 0
    monkeypatch.setattr("retrieval_attn.engine.background_saves.OPEN_SECONDS", -1e9)  # so short a text is read sooner
    store = ["--store", str(tmp_path / "store"), "--output-dir", str(tmp_path / "disk")]
    assert main([*flags, *small, *store]) == 0
    disk = report_of(tmp_path / "disk")[1]["engine"]["use"]
    assert disk["ceiling"] - 0.05 < disk["hit"] and disk["hit"] > some["hit"] + 0.1
    assert disk["counts"]["evicted"]["to disk"] > 0 and disk["counts"]["hit_tokens"]["disk"] > 0
    assert main([*flags, *store]) == 2 and "must be a new folder" in capsys.readouterr().err


def test_agents_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a session follow each other; each finds what the turn before it left."""
    monkeypatch.setattr(AgentProfile, "__init__", short_profile(AgentProfile.__init__))
    flags = ["bench", "serve", "--workload", "agent", *TINY, "--n", "2", "--length", "8k", "--tokens", "2"]
    assert main([*flags, "--max-num-seqs", "2", "--output-dir", str(tmp_path / "out")]) == 0
    report, rows = report_of(tmp_path / "out")
    use, answers = rows["engine"]["use"], rows["engine"]["answers"]
    assert report["prompts"]["requests"] == len(answers) == 2 * 8 and not any(one["problem"] for one in answers)
    assert use["ceiling"] > 0.7 and use["ceiling"] - 0.02 <= use["hit"] <= use["ceiling"]
    for session in range(2):
        turns = answers[session::2]
        for before, after in pairwise(turns):
            end = before["arrival"] + before["token_ms"][-1] / 1000
            assert after["arrival"] >= end - 0.01 and after["prompt_tokens"] > before["prompt_tokens"]


def short_profile(init: Any) -> Any:
    """Sessions of eight turns with results that are long enough to be kept, which clear nothing."""

    def made(self: AgentProfile, **fields: Any) -> None:
        init(self, **{"turns": (8, 8), "limits": (1.0, 1.0), "result": (16_000, 20_000), **fields})

    return made


def test_refused_requests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import retrieval_attn as ra

    submit, calls = ra.Engine.submit, iter(range(1 << 20))

    def refusing(self: ra.Engine, request: ra.Request) -> Any:
        if request.max_tokens == 3 and next(calls) % 4 == 3:
            raise AdmissionError("too much", limit=1, tokens=2)
        return submit(self, request)

    monkeypatch.setattr(ra.Engine, "submit", refusing)
    flags = ["bench", "serve", *TINY, "--n", "8", "--length", "80", "--tokens", "3", "--systems", "engine"]
    assert main([*flags, "--output-dir", str(tmp_path / "out")]) == 0
    row = report_of(tmp_path / "out")[1]["engine"]
    assert row["use"]["refused"] == 2 and row["note"].startswith(
        "2 of 8 requests were refused; request 3: AdmissionError"
    )


def test_documents_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three forms with texts of their own; a server that caches by blocks of 16 words hits nearly all that it can."""
    server = TinyServer()
    server.metrics = METRICS
    flags = ["bench", "serve", "--workload", "documents", "--n", "16", "--length", "600", "--question", "20"]
    flags += ["--tokens", "3", "--max-num-seqs", "1", "--no-plot", "--output-dir", str(tmp_path / "out")]
    with server.running() as url:
        assert main([*flags, "--url", url]) == 0
    report, rows = report_of(tmp_path / "out")
    assert list(rows) == list(FORMS) and report["model"] == "tiny"
    sent = [body for body in server.bodies if body.get("stream")]
    assert len(sent) == 48 and all(body["ignore_eos"] and body["max_tokens"] == 3 for body in sent)
    assert ["prompt" in body for body in sent] == [True] * 16 + [False] * 32
    assert all(body["messages"][0]["role"] == "system" for body in sent[32:])
    for row in rows.values():
        use = row["use"]
        assert row["status"] == "ok" and row["tokens"] == 48 and use["optimal"] is None
        assert use["ceiling"] > 0.7 and use["ceiling"] - 0.1 < use["hit"] <= use["ceiling"]
        assert use["counts"]["evicted"] == {"all": 0, "to disk": 0}
    assert "| chat, in the system message |" in capsys.readouterr().out


def test_a_server_that_refuses(tmp_path: Path) -> None:
    server = TinyServer(lambda body: "503" if body.get("stream") and len(server.bodies) % 5 == 0 else "")
    flags = ["bench", "serve", "--workload", "document", "--n", "10", "--length", "100", "--question", "20"]
    flags += ["--tokens", "2", "--no-plot", "--systems", "completions", "--output-dir", str(tmp_path / "out")]
    with server.running() as url:
        assert main([*flags, "--url", url]) == 0
    row = report_of(tmp_path / "out")[1]["completions"]
    assert row["use"]["refused"] == 2 and "503: too many requests wait" in row["note"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    process = pytest.importorskip("tests.server.process", reason="there is no server here")
    folder = tmp_path_factory.mktemp("store")
    with process.serving(
        "bundled", "--store", str(folder), "--warm-up", "0", "--max-context", "8k", preloaded=True
    ) as running:
        yield running


@pytest.mark.slow
def test_the_real_server(served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form of a question about a known document reuses all but some tokens at its end."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    flags = ["bench", "serve", "--workload", "document", "--n", "3", "--length", "1k", "--question", "40"]
    flags += ["--tokens", "4", "--max-num-seqs", "1", "--rate", "1", "--no-plot", "--output-dir", str(tmp_path / "out")]
    assert main([*flags, "--url", served.url]) == 0
    rows = report_of(tmp_path / "out")[1]
    assert {way: row["status"] for way, row in rows.items()} == dict.fromkeys(FORMS, "ok")
    for row in rows.values():
        use, prompts = row["use"], [one["prompt_tokens"] for one in row["answers"]]
        assert min(prompts) > 0.9 * 1064 and use["counts"]["hit_tokens"]["memory"] > 0
        assert use["ceiling"] - 0.05 <= use["hit"] <= use["ceiling"]
