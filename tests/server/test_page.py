"""The status page and the JSON that it polls, over HTTP and in a browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from retrieval_attn.server.page import PAGE
from retrieval_attn.server.run import _Server
from retrieval_attn.server.settings import Settings
from tests.server.browser import MISSING, Browser, browsing
from tests.server.process import QUESTION, Served, document, serving

ADMIN, BOB, EVE = "key-of-the-admin", "key-of-bob-1", "key-of-eve-1"
MARKUP = "<img src=x onerror=document.title='hacked'> <script>document.title='hacked'</script> "
WORDS = "<img src=x onerror=document.title='hacked'>"


def ask(served: Served, key: str | None, text: str) -> None:
    """Ask a question about a text, which stays in the prefix cache."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": QUESTION}]
    body = {"model": "bundled", "messages": messages, "max_tokens": 12, "temperature": 0}
    with served.client(key) as http:
        assert http.post("/v1/chat/completions", json=body).is_success


def status(served: Served, key: str | None = None) -> dict[str, Any]:
    with served.client(key) as http:
        reply = http.get("/status")
    assert reply.status_code == 200 and reply.headers["cache-control"] == "no-store"
    found: dict[str, Any] = reply.json()
    return found


def first_words(found: dict[str, Any]) -> set[str]:
    return {one["text"][:20] for one in found["texts"]}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a text of bob, one of eve, and one that an admin saved."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"{ADMIN} root admin\n{BOB} bob\n{EVE} eve\n")
    options = "--store", str(folder / "store"), "--warm-up", "0", "--api-key-file", str(keys)
    with serving(*options, preloaded=True) as served:
        ask(served, BOB, MARKUP + document())
        ask(served, EVE, "Secret of eve. " + document(50))
        with served.client(ADMIN) as http:
            assert http.post("/v1/contexts", json={"name": "book", "text": MARKUP + document(30)}).is_success
        yield served


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}: apt-get install chromium chromium-driver")
    with browsing(tmp_path / "profile") as found:
        yield found


# -- over HTTP -------------------------------------------------------------------------------------


def test_page_is_public_and_runs_only_its_own_script(keyed: Served) -> None:
    with keyed.client() as http:
        reply, head = http.get("/"), http.head("/", headers={"host": "any.example"})
    assert reply.status_code == head.status_code == 200 and head.content == b"" and reply.text == PAGE
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(one.strip().split(" ", 1) for one in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (code,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["referrer-policy"] == "no-referrer"


def test_page_names_no_other_host_and_writes_no_markup() -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=", PAGE.replace("// ", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|style=|\son\w+=", PAGE)


def test_status_needs_a_key(keyed: Served) -> None:
    with keyed.client() as http:
        assert http.get("/status").status_code == 401
    with keyed.client("another-key") as http:
        assert http.get("/status").status_code == 401


def test_a_key_sees_its_own_texts_only(keyed: Served) -> None:
    bob, eve = status(keyed, BOB), status(keyed, EVE)
    asked = {"Question: What is th"}  # questions are cached with their answers
    assert first_words(bob) - asked == {WORDS[:20]} and first_words(eve) - asked == {"Secret of eve. The g"}
    for found in (bob, eve):
        assert not found["admin"] and found["memory"] is found["counts"] is None
        assert [one["key"] for one in found["texts"]] == [None] * len(found["texts"])
        (saved,) = found["contexts"]
        assert saved["name"] == "book" and saved["text"] is saved["tokens"] is saved["disk_bytes"] is None


def test_an_admin_sees_all(keyed: Served) -> None:
    found = status(keyed, ADMIN)
    assert found["admin"] and {"Secret of eve. The g", WORDS[:20]} <= first_words(found)
    assert {"bob", "eve"} <= {one["key"] for one in found["texts"]}
    (saved,) = found["contexts"]
    assert saved["text"].startswith(WORDS) and saved["tokens"] > 500 and saved["disk_bytes"] > 1 << 20
    text = max(found["texts"], key=lambda one: one["tokens"])
    assert text["host_bytes"] > 1 << 20 and text["gpu_bytes"] == 0 and not text["in_use"]
    memory, counts = found["memory"], found["counts"]
    assert "gpu" not in memory and 0 < memory["host"]["cache"] <= memory["host"]["used"] < memory["host"]["limit"]
    assert memory["disk"]["limit"] > memory["disk"]["used"] >= saved["disk_bytes"]
    assert counts["tokens"] >= counts["steps"] >= 12 and counts["shared"]["prefix_tokens_queried"] > 1000
    ask(keyed, BOB, MARKUP + document())
    again = status(keyed, ADMIN)["counts"]
    assert again["clock"] > counts["clock"] and again["hit_tokens"]["memory"] > counts["hit_tokens"]["memory"]


def test_the_page_is_there_while_the_model_loads() -> None:
    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(_Server(Settings(name="model"))._answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [await http.get("/"), await http.get("/status"), await http.post("/")]

    page, polled, posted = asyncio.run(answers())
    assert page.status_code == 200 and page.text == PAGE
    assert polled.status_code == posted.status_code == 503 and "loading" in polled.json()["error"]["message"]


# -- in a browser ----------------------------------------------------------------------------------


def errors(browser: Browser) -> list[str]:
    """Messages of the console: of scripts, and of the security policy."""
    return [one["message"] for one in browser.console()]


def test_a_person_gives_a_key_and_sees_its_texts(keyed: Served, browser: Browser) -> None:
    browser.open(keyed.url)
    browser.wait_for("!document.querySelector('#ask').hidden")
    assert browser.text("#state") == "This server needs an API key." and WORDS not in browser.text()
    browser.type("#key", "not-the-key\n")
    browser.wait_for("document.querySelector('#state').textContent === 'The server does not know this key.'")
    browser.type("#key", f"{BOB}\n")
    browser.wait_for("document.querySelector('#texts td')")
    shown = browser.text()
    assert WORDS in shown and "eve" not in shown and "Memory" not in shown and "book" in browser.text("#contexts")
    assert browser.run("return document.title") == "bundled – retrieval-attn"
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    browser.run("document.querySelector('#forget').click()")
    browser.wait_for("!document.querySelector('#ask').hidden")
    assert WORDS not in browser.text() and not browser.run("return sessionStorage.length")
    browser.type("#key", f"{ADMIN}\n")
    browser.wait_for("document.querySelectorAll('#texts tbody tr').length >= 3")
    shown = browser.text()
    assert "Secret of eve." in shown and "Memory" in shown and WORDS in browser.text("#contexts")
    browser.command("POST", "/refresh")  # the key is this tab's until it is closed
    browser.wait_for("document.querySelectorAll('#texts tbody tr').length >= 3")
    assert all("401" in one for one in errors(browser))


def test_the_page_shows_a_warm_up(tmp_path: Path, browser: Browser) -> None:
    """The server answers before the graphs of more than one row are captured, which this one never does."""
    constants = {"retrieval_attn.engine.warm_up.IDLE_SECONDS": 3600}
    with serving("--store", str(tmp_path), "--warm-up", "1k", preloaded=True, constants=constants) as served:
        ask(served, None, document())
        with served.client() as http:
            assert http.get("/health").json() == {"status": "ok", "warming": "2 of 10 graphs"}
        browser.open(served.url)
        browser.wait_for("document.querySelector('#warming').textContent")
        assert browser.text("#warming") == "warming up: 2 of 10 graphs" and errors(browser) == []


def test_the_page_follows_the_server_and_survives_its_end(tmp_path: Path, browser: Browser) -> None:
    with serving("--store", str(tmp_path / "store"), "--warm-up", "0", preloaded=True) as served:
        browser.size(390, 800)
        browser.open(served.url)
        browser.wait_for("document.querySelector('#texts .empty')")
        assert "No text is cached." in browser.text() and "No context is saved." in browser.text()
        ask(served, None, MARKUP + document())
        browser.wait_for("document.querySelector('#texts td')")
        assert WORDS in browser.text("#texts")
        for dark in (False, True):
            if dark:
                browser.dark()
            assert browser.run("return document.documentElement.scrollWidth") <= 390
            colors = "const found = getComputedStyle(document.body); return [found.color, found.backgroundColor]"
            text, back = (sum(map(int, re.findall(r"\d+", one))) for one in browser.run(colors))
            assert (text > back + 300) if dark else (back > text + 300)
        assert browser.run("return document.querySelectorAll('[role=columnheader][scope=col]').length") >= 8
        assert errors(browser) == []
        served.end()
        browser.wait_for("document.querySelector('#state').textContent.startsWith('No answer since ')")
        assert WORDS in browser.text("#texts")
        assert all("ERR_CONNECTION_REFUSED" in one for one in errors(browser))
