"""A headless Chromium, driven by ChromeDriver's HTTP interface (W3C WebDriver). No Python package is needed."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import WAIT_SECONDS

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
DRIVER = shutil.which("chromedriver") or ""
MISSING = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if not path]
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
START_SECONDS = 30


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._path = http, f"/session/{session}"

    def command(self, method: str, path: str, **body: Any) -> Any:
        """Send a WebDriver command. Return its value; raise AssertionError for an error."""
        reply = self._http.request(method, self._path + path, json=body if method == "POST" else None)
        assert reply.is_success, reply.text
        return reply.json()["value"]

    def open(self, url: str) -> None:
        """Navigate to a URL."""
        self.command("POST", "/url", url=url)

    def run(self, script: str, *given: Any) -> Any:
        """Run JavaScript in the page. Return its result."""
        return self.command("POST", "/execute/sync", script=script, args=list(given))

    def wait_for(self, script: str, *given: Any, seconds: float = WAIT_SECONDS) -> Any:
        """Return the first true result of an expression."""
        end = time.monotonic() + seconds
        while not (found := self.run(f"return {script}", *given)):
            assert time.monotonic() < end, f"{script}: {found!r}, the page has {self.text()!r}"
            time.sleep(0.1)
        return found

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def type(self, selector: str, text: str) -> None:
        """Type into an input as a keyboard does; "\\n" is the enter key."""
        found = self.command("POST", "/element", using="css selector", value=selector)
        (number,) = found.values()
        self.command("POST", f"/element/{number}/value", text=text.replace("\n", "\ue007"))

    def size(self, width: int, height: int) -> None:
        """Emulate a screen of this size: a headless window has a minimum width."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self) -> None:
        """Emulate a dark color scheme."""
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        self._devtools("Emulation.setEmulatedMedia", features=features)

    def _devtools(self, command: str, **parameters: Any) -> None:
        self.command("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.command("GET", "/screenshot")))

    def console(self) -> list[dict[str, Any]]:
        """Return the console's entries since the last call: errors of scripts, and of the security policy."""
        return list(self.command("POST", "/se/log", type="browser"))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile in a folder, and end it after the block."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process, httpx.Client(timeout=60) as http:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "started successfully on port" in line)
            http.base_url = httpx.URL(f"http://127.0.0.1:{line.rpartition(' ')[2].strip().rstrip('.')}")
            options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            reply = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert reply.is_success, reply.text
            browser = Browser(http, reply.json()["value"]["sessionId"])
            try:
                yield browser
            finally:
                browser.command("DELETE", "")
        finally:
            process.terminate()
