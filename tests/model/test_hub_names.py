"""Models by name: "bundled" is known everywhere, and a hub that cannot be reached is asked once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

import retrieval_attn as ra
from retrieval_attn.cli import main
from retrieval_attn.errors import InputDataError
from retrieval_attn.model.bundled import BUNDLED

NAME = "someone/no-such-model-of-theirs"


def unreachable(*args: Any, **options: Any) -> Any:
    raise httpx.ConnectError("no route to host")


def test_plan_and_verify_know_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert ra.plan("bundled", context=4096).fits
    assert main(["plan", "bundled", "--max-context", "4k"]) == 0
    assert "bundled" in capsys.readouterr().out.splitlines()[0]
    assert main(["verify", "bundled", "--tokens", "16"]) == 0


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    for command in (["plan", NAME], ["verify", NAME], ["verify", f"{NAME}/model.gguf"]):
        began = time.monotonic()
        assert main(command) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and "huggingface.co could not be reached: ConnectError" in said[0]
        assert time.monotonic() - began < 30


class TinyHub(BaseHTTPRequestHandler):
    """A hub with one model; paths: those that were asked for."""

    paths: list[str] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.paths.append(self.path)
        found = self.path == f"/{NAME}/resolve/main/config.json"
        data = (BUNDLED / "config.json").read_bytes() if found else b"{}"
        self.send_response(200 if found else 404)
        headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))}
        for name, value in (headers if found else {"X-Error-Code": "EntryNotFound"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_plan_downloads_the_config_alone(tmp_path: Path) -> None:
    TinyHub.paths.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), TinyHub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "retrieval_attn.cli", "plan", NAME, "--max-context", "4k"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
        hub.shutdown()
    assert done.returncode == 0 and done.stdout.startswith(NAME), done.stderr
    assert {path.rpartition("/")[2] for path in TinyHub.paths if NAME in path} == {"config.json"}


@pytest.mark.parametrize("name", ["a/b/c", "../x y"])
def test_names_that_no_model_has(name: str) -> None:
    with pytest.raises(InputDataError, match="could not be read"):
        ra.plan(name)


def test_models_and_contexts_print_what_they_are() -> None:
    llm = ra.LLM("bundled", device="cpu", max_context=1024)
    assert re.fullmatch(r"<LLM '.*bundled' on cpu, up to 1,024 tokens>", repr(llm))
    assert re.fullmatch(r"<Context of \d+ tokens, model '.*bundled'>", repr(llm.read("The sky is blue.")))
