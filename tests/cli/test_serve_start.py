"""The first lines of a server: before its model is loaded, and a request that works as it is printed."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from retrieval_attn.cli import main
from tests.cli.terminal import in_terminal
from tests.server.process import serving

SERVE = ("serve", "bundled", "--port", "0", "--warm-up", "0", "--max-context", "2k")


@pytest.mark.slow
def test_a_terminal_shows_loading_and_a_request_that_works() -> None:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    with in_terminal(*SERVE, COLUMNS="500") as terminal:
        terminal.wait_for(r"Ctrl-C ends the server\.\r\n")
        seen = terminal.seen.replace("\r", "")
        assert re.match(r"loading bundled; requests to http://127\.0\.0\.1:\d+ get 503 until it is ready\n", seen)
        printed = re.search(r"^curl .*$", seen, re.MULTILINE)
        assert printed, seen
        answer = subprocess.run(["bash", "-c", printed[0]], capture_output=True, text=True, timeout=100, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
def test_without_a_terminal_all_lines_are_json() -> None:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    with serving("bundled", "--warm-up", "0", "--max-context", "2k") as served:
        assert served.log[0]["message"].startswith("loading bundled; requests to ") and not served.other
        said = r"ready after ([\d.]+) s: imports ([\d.]+), model ([\d.]+), engine ([\d.]+), first graphs ([\d.]+)"
        (found,) = filter(None, (re.fullmatch(said, line["message"]) for line in served.log))
        total, *parts = map(float, found.groups())
        assert total == pytest.approx(sum(parts), abs=0.3)


def test_flags_are_checked_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such-model", "--gpu-memory", "24GiB", "--device", "cpu"]) == 2
    assert "the model would run on the CPU" in capsys.readouterr().err
    assert main(["serve", "no/such-model", "--index", "foo"]) == 2
    assert "index='foo' is not a known kind" in capsys.readouterr().err
