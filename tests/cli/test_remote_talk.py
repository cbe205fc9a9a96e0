"""A conversation with a server: with a stand-in that fails as it is told to, and with the real one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from eval.tests.load.tiny_server import TinyServer
from retrieval_attn.cli import output as waiting
from retrieval_attn.cli.chat.remote import RemoteBackend
from retrieval_attn.cli.output import Spinner
from retrieval_attn.errors import InputDataError
from retrieval_attn.remote import Endpoint, RemoteError
from tests.cli.terminal import CTRL_C, Terminal, chatting
from tests.cli.test_local_talk import BERGEN, DOCUMENT, OSLO
from tests.waiting import wait_until

pytest.importorskip("httpx", reason="talking to a server needs httpx; pip install httpx")

SAMPLING = ra.Sampling(max_new_tokens=12, seed=5)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def talking() -> Iterator[Callable[..., RemoteBackend]]:
    """Makes conversations, which are closed at the end."""
    with ExitStack() as made:
        yield lambda *arguments: made.enter_context(closing(RemoteBackend(*arguments)))


def said(talk: RemoteBackend, question: str) -> str:
    return "".join(talk.answer(question)).strip()


def test_what_the_server_is_sent(talking: Callable[..., RemoteBackend]) -> None:
    """The whole conversation, with the document at the start of the first message and of no other."""
    server = TinyServer()
    with server.running() as url:
        talk = talking(Endpoint.of(url), "tiny", SAMPLING, "A story.")
        assert said(talk, "Who?") == " ".join(["word"] * 12)
        mark, _ = talk.fork("here")
        said(talk, "Why?")
        assert talk.forget(1) == 1
        said(talk, "Where?")
        talk.go_back(mark)
        said(talk, "When?")
    answer = " ".join(["word"] * 12)
    first = {"role": "user", "content": "A story.\n\nWho?"}
    for body, last in zip(server.bodies[1:], ("Why?", "Where?", "When?"), strict=True):
        assert body["messages"] == [
            first, {"role": "assistant", "content": answer}, {"role": "user", "content": last},
        ]  # fmt: skip
    told = server.bodies[0]
    assert (told["model"], told["max_tokens"], told["temperature"], told["seed"]) == ("tiny", 12, 0.0, 5)
    assert told["stream"] and "context" not in told
    assert "2 questions answered\nlast answer: " in talk.stats() and "12 generated" in talk.stats()


@pytest.mark.parametrize(
    ("trouble", "message", "kept"),
    [("503", "answered 503: too many requests wait", 0), ("error", "ended early: the engine ended", 2)],
)
def test_a_server_that_fails(talking: Callable[..., RemoteBackend], trouble: str, message: str, kept: int) -> None:
    """It is said; of an answer that began, what came stays."""
    with TinyServer(lambda body: trouble).running() as url:
        talk = talking(Endpoint.of(url), "tiny", SAMPLING)
        with pytest.raises(RemoteError, match=message):
            said(talk, "Who?")
        assert len(talk._messages) == kept
        with pytest.raises(InputDataError, match="nothing to save"):
            talk.forget(None)
            talk.save("name")
    with pytest.raises(RemoteError, match="check that a server is running"):
        said(talk, "Who?")


def test_an_answer_that_breaks_off_without_a_word(talking: Callable[..., RemoteBackend]) -> None:
    """A stream that ends in the middle is an error, not an answer."""
    with TinyServer(lambda body: "cut").running() as url:
        talk = talking(Endpoint.of(url), "tiny", SAMPLING)
        with pytest.raises(RemoteError, match="ended early"):
            said(talk, "Who?")
        assert talk._messages[-1]["content"] == " ".join(["word"] * 6)


def test_waiting_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "EVERY_SECONDS", 0.05)
    with Spinner("the server reads"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "the server reads: 0 s\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Spinner("the server reads") as shown:
        time.sleep(0.3)
        shown.end()
        said = capsys.readouterr().err
    assert "\rthe server reads: 0 s" in said and said.endswith(" \r") and capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if "waiting" in thread.name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The real one with the bundled model, as a process."""
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    process = pytest.importorskip("tests.server.process", reason="there is no server here")
    folder = tmp_path_factory.mktemp("store")
    with process.serving(
        "bundled", "--store", str(folder), "--warm-up", "0", "--max-context", "8k", preloaded=True
    ) as served:
        yield served


def answered(terminal: Terminal, keys: str, shown: str) -> None:
    """Type a line; until this is shown, and the next may be typed."""
    behind = len(terminal.seen)
    terminal.type(keys)
    terminal.wait_for(shown, behind=behind)
    terminal.wait_for(">>> ", behind=behind)


@pytest.mark.slow
def test_a_conversation_with_the_real_server(server: Any, tmp_path: Path) -> None:
    """Questions, a saved context that goes on after it was left, and a fork that outlives its name."""
    path = tmp_path / "text.txt"
    path.write_text(DOCUMENT)
    with chatting("--url", server.url, "--document", str(path), "--max-new-tokens", "12") as terminal:
        terminal.wait_for(r"at http://127.0.0.1:\d+/v1, about a document of [\d,]+ characters\r\nAsk, or /help")
        for keys, shown in (
            (f"{BERGEN}\n", r"7391846\r\n"),
            ("/save turn\n", r"saved [\d,]+ tokens as 'turn' at the server; /load turn goes on"),
            (f"{OSLO}\n", r"1234567\r\n"),
            ("/stats\n", r"2 questions answered\r\nlast answer: [\d,]+ prompt tokens, [1-9][\d,]+ of them cached"),
            ("/load other\n", r"answered 404: "),
            ("/load turn\n", r"loaded 'turn': [\d,]+ tokens\r\n"),
            (f"{OSLO}\n", r"1234567\r\n"),
            ("/save both\n", r"saved [\d,]+ tokens as 'both'"),
            ("/undo\n", "dropped 1 question"),
            ("/save again\n", r"saved [\d,]+ tokens as 'again'"),
            ("/fork here\n", r"the server keeps the context 'turn' as 'here' too; /load here"),
            ("/fork here\n", r"answered 409: There is a context 'here' already"),
        ):
            answered(terminal, keys, shown)
        with server.client() as client:  # the context's own name goes, and what it had read is not read again
            tokens = client.get("/v1/contexts/turn").json()["tokens"]
            assert client.delete("/v1/contexts/turn").status_code == 200
        for keys, shown in (
            (f"{OSLO}\n", r"answered 404: "),
            ("/load here\n", "back at 0 questions answered"),
            (f"{OSLO}\n", r"1234567\r\n"),
            ("/stats\n", rf"behind the context 'here'\r\nlast answer: [\d,]+ prompt tokens, {tokens:,} of them cached"),
        ):
            answered(terminal, keys, shown)
        terminal.type("/quit\n")
        terminal.require_success()
    with chatting("--url", server.url, "--load", "both", "--max-new-tokens", "12") as terminal:
        terminal.wait_for(r"loaded 'both': [\d,]+ tokens")
        terminal.type(f"{BERGEN}\n")
        terminal.wait_for(r"7391846\r\n")
        terminal.type("/quit\n")
        terminal.require_success()


@pytest.mark.slow
def test_ctrl_c_ends_the_real_servers_work(server: Any) -> None:
    with chatting("--url", server.url, "--temperature", "2", "--seed", "1", "--max-new-tokens", "4k") as terminal:
        terminal.wait_for(">>> ")
        for _ in range(2):
            behind = len(terminal.seen)
            terminal.type("Tell me everything about grass.\n")
            terminal.wait_for(r"grass\.\r\n.{20}", behind=behind)
            terminal.type(CTRL_C)
            terminal.wait_for(r"\[stopped\]\r\n>>> ", behind=behind)
        terminal.type("/quit\n")
        terminal.require_success()
    with server.client() as client:
        wait_until(lambda: "retrieval_attn:num_requests_running 0.0" in client.get("/metrics").text, pause=0.2)
    assert server.end(signal.SIGTERM) == 0
