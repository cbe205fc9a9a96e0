"""`retrieval-attn speed`: no time without a right answer, bytes that add up, nothing overwritten."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError, ContextLengthError, RunFolderError
from retrieval_attn.eval import speed, speed_decode

CONFIG = ra.Config(sink=4, window=16, retrieve=8, prefill_chunk=64)
IDS = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture(scope="module")
def model() -> Any:
    return speed_decode.random_model("tiny", torch.float32, seed=0)


@pytest.fixture(scope="module")
def source(model: Any) -> Any:
    ids = torch.randint(128, (1, 100), generator=torch.Generator().manual_seed(1))
    return speed_decode.read_prompt(model, ids, CONFIG)


def arguments(folder: Path, *extra: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    speed.add_arguments(parser)
    base = ["decode", "--model", "random:tiny", "--lengths", "90,300", "--read", "100", "--tokens", "3"]
    small = ["--rounds", "2", "--sink", "4", "--window", "16", "--retrieve", "8", "--output-dir", str(folder)]
    return parser.parse_args([*base, *small, *extra])


def test_spread_is_median_and_percentiles() -> None:
    """Times in seconds become milliseconds; outliers stay out of the three numbers."""
    spread = speed_decode.Spread.of([0.001 * i for i in range(1, 12)])
    assert (spread.median, spread.low, spread.high) == pytest.approx((6.0, 2.0, 10.0))
    assert speed_decode.Spread.of([0.002]) == speed_decode.Spread(2.0, 2.0, 2.0)


def test_report_has_rows_machine_and_a_last_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command on random weights: one length that is read, one that repeats its keys."""
    assert speed.run(arguments(tmp_path / "out")) == 0
    printed = capsys.readouterr().out.splitlines()
    report = json.loads(printed[-1])
    assert report == json.loads((tmp_path / "out" / "speed.json").read_text())
    assert [row["context"] for row in report["rows"]] == [90, 300]
    assert {"commit", "machine", "versions", "command", "config", "threads"} <= set(report)
    table = (tmp_path / "out" / "speed.md").read_text()
    assert "| 300 |" in table
    assert table in "\n".join(printed) + "\n"
    for row in report["rows"]:
        assert row["full"]["median"] > 0
        assert row["logit_error"] < 1e-4
    assert report["rows"][0]["same_token"] is not None
    assert report["rows"][1]["same_token"] is None, "300 tokens repeat the 100 that were read"


def test_bytes_per_token_equal_hand_sums(model: Any, source: Any) -> None:
    """2 layers x 2 KV heads x 16 numbers x 4 bytes = 256 bytes of keys per token, as many of values.

    The flat index reads every key between sinks and window once; attention takes the scores it found and reads
    the 8 retrieved values of each of 4 heads.
    """
    row = speed_decode.measure(model, source, 200, CONFIG, ids=IDS[:3], rounds=1)
    assert row.full_bytes == (200 + 1) * 512
    keys = (200 - 20) * 256
    assert row.host_bytes == keys + 8 * 4 * 2 * 64
    assert row.keys_scanned == 180 * 4 * 2
    assert row.device_bytes == (20 + 1) * 512


def test_everything_retrieved_chooses_the_same_tokens(model: Any, source: Any) -> None:
    """retrieve="all" is full attention: every greedy choice is the same."""
    row = speed_decode.measure(model, source, 90, CONFIG.replace(retrieve="all"), ids=IDS, rounds=1)
    assert row.same_token == 1.0


def test_placed_keys_are_as_good_as_read_ones(model: Any, source: Any) -> None:
    """Placing keys reaches into the cache layers; a real prefill of the same tokens is the oracle."""
    ids = torch.randint(128, (1, 100), generator=torch.Generator().manual_seed(1))
    token, place = torch.tensor([[7]]), torch.tensor([[100]])
    ra.enable(model, CONFIG)
    try:
        with torch.no_grad():
            read = ra.RetrievalCache(model, CONFIG)
            model(ids, past_key_values=read)
            wanted = model(token, past_key_values=read, position_ids=place).logits
            placed = speed_decode._retrieval_cache(model, source, 100, CONFIG)
            got = model(token, past_key_values=placed, position_ids=place).logits
    finally:
        ra.disable(model)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_wrong_answers_have_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values off by a tenth on the host side: exit status 1, nothing timed, nothing written."""
    place = speed_decode._place
    monkeypatch.setattr(speed_decode, "_place", lambda layer, key, value: place(layer, key, 1.1 * value))
    assert speed.run(arguments(tmp_path / "out")) == 1
    captured = capsys.readouterr()
    assert "No speed is reported" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    """An existing folder is refused before anything is measured."""
    with pytest.raises(RunFolderError, match="never overwritten"):
        speed.run(arguments(tmp_path))


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        (["--lengths", "4k"], ConfigError, "lengths"),
        (["--lengths", ""], ConfigError, "lengths"),
        (["--lengths", "0"], ConfigError, "lengths"),
        (["--tokens", "0"], ConfigError, "tokens"),
        (["--rounds", "-1"], ConfigError, "rounds"),
        (["--threads", "-1"], ConfigError, "threads"),
        (["--retrieve", "many"], ConfigError, "top-k"),
        (["--retrieve", "0"], ConfigError, "retrieve"),
        (["--model", "random:huge"], ConfigError, "llama3-8b-slice"),
        (["--index", "graph"], ConfigError, "--read 300"),
        (["--lengths", "65536"], ContextLengthError, "65536"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, extra: list[str], error: type[Exception], words: str) -> None:
    """Each with its own error, and no folder left behind."""
    with pytest.raises(error, match=words):
        speed.run(arguments(tmp_path / "out", *extra))
    assert not (tmp_path / "out").exists()


def test_command_turns_bad_input_into_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m retrieval_attn.eval.speed` behaves as the subcommand does."""
    assert speed.main(["decode", "--lengths", "none"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
