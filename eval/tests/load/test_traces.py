"""Traces that are drawn or converted: their statistics, what their prompts share, and what is refused."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from retrieval_attn.cli import main
from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.load.burstgpt import read_burstgpt
from retrieval_attn_eval.load.conversation import Conversation
from retrieval_attn_eval.load.line import BLOCK, Block, Line, read_trace, written
from retrieval_attn_eval.load.made import QUESTION_SHARE, Arrivals, make_trace
from retrieval_attn_eval.load.sessions import Statistics
from retrieval_attn_eval.load.sharegpt import counted_bytes, read_sharegpt


def by_session(lines: list[Line]) -> dict[str | None, list[Line]]:
    found: dict[str | None, list[Line]] = {}
    for line in lines:
        found.setdefault(line.session, []).append(line)
    return found


def test_drawn_sessions_are_those_of_the_paper() -> None:
    """CachedAttention, section 4: 5.75 turns on average, 73 % with several; 47 % longer than 2K, 30 % than 4K."""
    lines = make_trace(4000, Arrivals(rate=2.0), Statistics(most_tokens=32768), seed=1)
    sessions = by_session(lines)
    assert len(sessions) == 4000
    totals = [turns[-1].prompt_tokens + turns[-1].answer_tokens for turns in sessions.values()]
    assert len(lines) / 4000 == pytest.approx(5.75, abs=0.25)
    assert sum(len(turns) > 1 for turns in sessions.values()) / 4000 == pytest.approx(0.73, abs=0.02)
    assert sum(total > 2048 for total in totals) / 4000 == pytest.approx(0.47, abs=0.02)
    assert sum(total > 4096 for total in totals) / 4000 == pytest.approx(0.30, abs=0.02)
    assert max(totals) < 32768 + 40  # turns are rounded up to a token
    arrivals = sorted(turns[0].seconds for turns in sessions.values())
    assert 4000 / arrivals[-1] == pytest.approx(2.0, rel=0.05)
    gaps = [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.025), "exponential, mean 0.5"
    delays = [line.delay for line in lines if line.delay is not None]
    assert sum(delays) / len(delays) == pytest.approx(60.0, rel=0.05)


def test_turns_continue_each_other() -> None:
    """A prompt is the last one and its answer, and a question; full blocks are the same ones, of no other session."""
    lines = make_trace(50, Arrivals(), Statistics(), seed=2)
    assert [line.seconds for line in lines] == sorted(line.seconds for line in lines)
    owners: dict[int, str | None] = {}
    for name, turns in by_session(lines).items():
        assert turns[0].delay is None
        for before, after in zip(turns, turns[1:], strict=False):
            grown = after.prompt_tokens - before.prompt_tokens
            assert grown > before.answer_tokens and after.delay is not None
            assert after.seconds > before.seconds
            assert after.blocks[: before.prompt_tokens // BLOCK] == before.blocks[: before.prompt_tokens // BLOCK]
        for block in {block.name for line in turns for block in line.blocks}:
            assert owners.setdefault(block, name) == name
    questions = sum(turns[0].prompt_tokens for turns in by_session(lines).values())
    answers = sum(turns[0].answer_tokens for turns in by_session(lines).values())
    assert questions / (questions + answers) == pytest.approx(QUESTION_SHARE, abs=0.01)


def test_blocks_of_a_conversation() -> None:
    conversation = Conversation(count(1))
    assert conversation.prompt(512) == (Block(1, 512),)
    assert conversation.prompt(600) == (Block(1, 512), Block(2, 88))
    assert conversation.prompt(1024) == (Block(1, 512), Block(3, 512)), "with more tokens it is another block"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    lines = make_trace(20, Arrivals(), Statistics(), seed=3)
    lines[0] = lines[0]._replace(extra={"temperature": 1.0})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(written(lines)), encoding="utf-8-sig")
    again = read_trace(path)
    assert [line._replace(seconds=0, delay=None) for line in again] == [
        line._replace(seconds=0, delay=None) for line in lines
    ]
    assert [line.seconds for line in again] == pytest.approx([line.seconds for line in lines], abs=0.001)
    assert [line.delay or 0.0 for line in again] == pytest.approx([line.delay or 0.0 for line in lines], abs=0.001)


def test_a_later_turn_needs_no_timestamp(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turn = {"input_length": 5, "output_length": 1, "hash_ids": [1], "session_id": 7}
    path.write_text(f"{json.dumps({**turn, 'timestamp': 1000})}\n{json.dumps({**turn, 'delay': 500})}")
    assert [(line.seconds, line.delay, line.session) for line in read_trace(path)] == [(0, None, "7"), (0.5, 0.5, "7")]


@pytest.mark.parametrize(
    "change",
    [
        {"delay": -1},
        {"delay": "soon"},
        {"timestamp": None},
        {"timestamp": float("nan")},
        {"extra": [1]},
        {"hash_ids": [1, 2]},
        {"output_length": 0},
        {"input_length": True},
    ],
)
def test_lines_of_another_form_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], **change}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line))
    with pytest.raises(InputDataError, match=r"trace\.jsonl, line 1: needed timestamp"):
        read_trace(tmp_path / "trace.jsonl")


BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,2,ChatGPT,472,18,490,API log
10,a,4,GPT-4,600,100,700,Conversation log
12,,1,ChatGPT,0,0,0,Conversation log
40,a,4.5,GPT-4,1300,50,1350,Conversation log
60,a,1,GPT-4,20,5,25,Conversation log
"""


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURST, encoding="utf-8-sig")
    alone, first, second, cut = read_burstgpt(path)
    assert (alone.seconds, alone.prompt_tokens, alone.answer_tokens, alone.session) == (5, 472, 18, None)
    assert first.blocks[:1] == second.blocks[:1] and len(second.blocks) == 3 and first.blocks[1] not in second.blocks
    assert second.delay == pytest.approx(26.0), "from the answer, 4 s after 10, to 40"
    assert not set(cut.blocks) & {*first.blocks, *second.blocks, *alone.blocks}, "its history was cut: nothing shared"
    assert [line.session for line in read_burstgpt(path, model="GPT-4")] == ["a"] * 3
    assert len(list(read_burstgpt(path, requests=2))) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,b\n1,2\n", "Request tokens, Response tokens is not there"),
        (b"Timestamp,Request tokens,Response tokens\nnow,1,1\n", "line 2: needed numbers"),
        (b"Timestamp,Request tokens,Response tokens\n1,2\n", "line 2: needed numbers"),
        (b"\xff\xfe", "needed a CSV file in UTF-8"),
    ],
)
def test_other_csv_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "burst.csv").write_bytes(data)
    with pytest.raises(InputDataError, match=message):
        list(read_burstgpt(tmp_path / "burst.csv"))


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in pairs]


def test_sharegpt(tmp_path: Path) -> None:
    """Equal beginnings are equal blocks, also of two conversations; what is not answered is left out."""
    long = "x" * (4 * BLOCK)
    entries = [
        {"id": "a", "conversations": said(("human", long), ("gpt", "yes. " * 8), ("human", "and?"), ("gpt", "no."))},
        {"id": "b", "conversations": said(("system", "Be."), ("human", long + "more"), ("gpt", "ok"), ("human", "?"))},
        {"id": "c", "conversations": said(("gpt", "Hello"))},
        {"id": "d", "conversations": []},
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries), encoding="utf-8-sig")
    lines = list(read_sharegpt(path, counted_bytes, Arrivals(), 0))
    assert [line.session for line in lines] == ["a", "a", "b"]
    first, second, other = lines
    assert [line.prompt_tokens for line in lines] == [512, 512 + 10 + 1, 513]
    assert [line.answer_tokens for line in lines] == [10, 1, 1]
    assert first.blocks[0] == second.blocks[0] == other.blocks[0] and second.blocks[1] != other.blocks[1]
    assert first.delay is None and second.delay is not None and other.delay is None
    assert len(list(read_sharegpt(path, counted_bytes, Arrivals(), 0, requests=1))) == 1
    for text, message in (
        ("{", "needed a JSON file"),
        ("{}", "a list of conversations"),
        ("[1]", "entry 0"),
        ('[{"conversations": {}}]', "entry 0"),
    ):
        path.write_text(text)
        with pytest.raises(InputDataError, match=message):
            list(read_sharegpt(path, counted_bytes, Arrivals(), 0))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], needle_model_path: Path) -> None:
    """Equal seeds give equal traces; converted ones are in order of time, and any reader of the format takes them."""
    assert main(["load", "make", "--n", "5", "--seed", "7"]) == 0
    first = capsys.readouterr()
    assert "requests of 5 sessions" in first.err
    assert main(["load", "make", "--n", "5", "--seed", "7"]) == 0
    assert capsys.readouterr().out == first.out
    assert main(["load", "make", "--n", "5", "--seed", "8"]) == 0
    assert capsys.readouterr().out != first.out
    (tmp_path / "burst.csv").write_text(BURST)
    assert main(["load", "convert", str(tmp_path / "burst.csv")]) == 0
    (tmp_path / "burst.jsonl").write_text(capsys.readouterr().out)
    assert [line.seconds for line in read_trace(tmp_path / "burst.jsonl")] == [0, 5, 35, 55]
    entries = [{"conversations": said(("human", "How high is it?"), ("gpt", "12 m"))}] * 3
    (tmp_path / "share.json").write_text(json.dumps(entries))
    capsys.readouterr()
    assert main(["load", "convert", str(tmp_path / "share.json"), "--model", str(needle_model_path)]) == 0
    counted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["timestamp"] for one in counted] == sorted(one["timestamp"] for one in counted)
    assert {tuple(one["hash_ids"]) for one in counted} == {(1,)}, "equal texts"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "--n", "0"], "--n must be at least 1"),
        (["make", "--rate", "0"], "--rate must be more than 0"),
        (["make", "--rate", "nan"], "--rate must be more than 0"),
        (["make", "--max-context", "many"], "--max-context"),
        (["convert", "trace.txt"], "needed a .csv file of BurstGPT"),
        (["convert", "missing.csv"], "missing.csv: No such file"),
        (["replay", "missing.jsonl", "--url", "http://127.0.0.1:1"], "missing.jsonl: needed a readable text file"),
        (["replay", "t", "--url", "localhost:8000"], "must be the address of a server"),
        (["replay", "t", "--url", "http://x", "--speed", "0"], "--speed must be more than 0"),
        (["replay", "t", "--url", "http://x", "--body", "[]"], "must be a JSON object"),
        (["replay", "t", "--url", "http://x", "--body", "{"], "must be JSON"),
    ],
)
def test_bad_flags(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["load", *arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and message in said[0]
