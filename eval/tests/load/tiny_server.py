"""A server with as much of OpenAI's API as a replay asks for, that fails, waits and breaks off when it is told to.

It stands in for servers that do so: the real one, which does not, is in `test_real_server.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


def _words(body: Body) -> list[str]:
    said = [body["prompt"]] if "prompt" in body else [one["content"] for one in body["messages"]]
    return " ".join(said).split()


class TinyServer:
    """bodies: what it was asked, in order. behave: told the body, gives "" or what is to go wrong with it: a status as
    "503", "cut" (half of the answer), "error" (an error chunk), "slow" (`slow_seconds` before the first token).
    metrics: text of its metrics.
    """

    def __init__(self, behave: Callable[[Body], str] = lambda body: "", words_per_token: int = 1) -> None:
        self.bodies: list[Body] = []
        self.behave, self.words_per_token = behave, words_per_token
        self.known: set[tuple[str, ...]] = set()
        self.metrics = ""
        self.slow_seconds = 0.5
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def tokens(self, body: Body) -> list[int]:
        """An id for each word of a prompt."""
        with self._lock:
            return [self._ids.setdefault(word, len(self._ids)) for word in _words(body)]

    def usage(self, body: Body) -> Body:
        """Words of a prompt, so many a token, and how many of its beginning it has seen; five more for each message."""
        said, words = body.get("messages", [None]), _words(body)
        with self._lock:
            cached = max((n for n in range(0, len(words) + 1, 16) if tuple(words[:n]) in self.known), default=0)
            self.known |= {tuple(words[:n]) for n in range(16, len(words) + 1, 16)}
        return {
            "prompt_tokens": 5 * len(said) + len(words) // self.words_per_token,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached // self.words_per_token},
        }

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its URL, while it runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tiny = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._text(tiny.metrics)
                    return
                self._json(200, {"data": [{"id": "tiny"}, {"id": "other"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self._json(200, {"tokens": tiny.tokens(body)})
                    return
                tiny.bodies.append(body)
                trouble = tiny.behave(body)
                if trouble.isdigit():
                    self._json(int(trouble), {"error": {"message": "too many requests wait"}})
                elif body.get("stream"):
                    self._stream(body, trouble)
                else:
                    self._json(200, {"choices": [{"index": 0}], "usage": tiny.usage(body)})

            def _text(self, text: str) -> None:
                self._data(200, text.encode())

            def _json(self, status: int, found: Body) -> None:
                self._data(status, json.dumps(found).encode())

            def _data(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, body: Body, trouble: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                usage, count = tiny.usage(body), body["max_tokens"]
                if trouble == "slow":
                    time.sleep(tiny.slow_seconds)
                self._choice({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
                for number in range(count):
                    if number == count // 2 and trouble in ("cut", "error"):
                        if trouble == "error":
                            self._event(json.dumps({"error": {"message": "the engine ended"}}))
                        return
                    piece: Body = {"text": "word "} if "prompt" in body else {"delta": {"content": "word "}}
                    self._choice({**piece, "finish_reason": "length" if number == count - 1 else None})
                    time.sleep(0.002)
                self._event(json.dumps({"choices": [], "usage": usage}))
                self._event("[DONE]")

            def _choice(self, choice: Body) -> None:
                self._event(json.dumps({"choices": [{"index": 0, **choice}]}))

            def _event(self, data: str) -> None:
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()

        return Handler
