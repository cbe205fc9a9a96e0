"""HTTP connections: uvicorn's protocol with limits on headers, on time, and on connections per address.

uvicorn has no limit on header bytes with httptools, no time limit for a request's head, no limit per address, and
answers malformed requests in plain text. `LimitedProtocol` adds these four to it, and reads the body of a request that
offers to switch protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from retrieval_attn.server.failure import ApiError

MAX_HEAD_BYTES = 64 << 10
"""URL and headers of one request; nginx and Node have 32 KiB and 16 KiB."""
MAX_HEADERS = 128
HEAD_SECONDS = 10.0
"""From a connection, or from a request's first byte, to the end of its headers."""
LINGER_SECONDS = 2.0
"""After an answer that was sent before the whole request was received: closing at once would lose the answer, because
the kernel resets a connection with unread bytes.
"""
MAX_PIPELINED = 1024
MOST_FILES = 1 << 20
SPARE_FILES = 32
"""Descriptors that are kept for files of the store and the engine."""


def max_connections() -> int:
    """Connections that this process has descriptors for. Raises the soft limit to the hard one first."""
    if sys.platform == "win32":
        return 512
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 64
    most = MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)
    return max(8, most - used - SPARE_FILES)


@dataclass
class Connections:
    """Open connections of a server, in the order in which they came.

    per_address: connections that one address may have. total: connections of all addresses. refused: called with the
    status and the reason of every request that is refused before it reaches the app.
    """

    per_address: int
    total: int
    refused: Callable[[int, str], None]
    _open: dict[LimitedProtocol, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, protocol: LimitedProtocol, address: str) -> bool:
        """Count a new connection. Return False if it must be refused.

        If its address has too many, the oldest of them that has no request under way is closed first, as nginx closes
        idle keep-alive connections: half requests then cannot keep others out.
        """
        if self._counts.get(address, 0) >= self.per_address and not self._evict(address):
            return False
        if len(self._open) >= self.total and not self._evict(None):
            return False
        self._open[protocol] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        return True

    def remove(self, protocol: LimitedProtocol) -> None:
        """Forget a closed connection."""
        address = self._open.pop(protocol, None)
        if address is None:
            return
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def _evict(self, address: str | None) -> bool:
        for protocol, owner in self._open.items():
            if address in (None, owner) and protocol.is_idle:
                self.remove(protocol)
                protocol.transport.abort()
                return True
        return False


class UpgradeParser:
    """httptools' parser for a server that speaks HTTP/1.1 alone: a request with an Upgrade header is read as any other.

    RFC 9110, section 7.8, allows to ignore Upgrade. The JDK's HTTP client offers h2c with each request, and httptools
    does not parse the body of such a request.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        """protocol: receives the callbacks."""
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)
        self.is_resuming = False
        """Whether the callbacks are those of `_resume`, for a head that was parsed before."""

    @property
    def is_upgrade(self) -> bool:
        """Whether the request that is parsed has a body that httptools skips."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes. Raises HttpParserError, and HttpParserUpgrade after CONNECT."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.is_upgrade:
                    raise
                data = data[upgrade.args[0] :]
            self._resume()

    def _resume(self) -> None:
        """Parse on where the body begins, by a new parser that has the headers which delimit it."""
        names = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self._protocol.headers if name in names]
        self._parser = httptools.HttpRequestParser(self._protocol)
        self.is_resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        self.is_resuming = False

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return bool(self._parser.should_upgrade())


class LimitedProtocol(HttpToolsProtocol):
    """One connection. See the module."""

    def __init__(self, *, limits: Connections, **arguments: Any) -> None:
        """limits: shared by all connections of a server. arguments: uvicorn's."""
        super().__init__(**arguments)
        self.parser: Any = UpgradeParser(self)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = self._head_bytes = 0
        self._in_message = False
        self._refusal: ApiError | None = None
        self._refused = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way: between requests, or before the end of a request's headers."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many; give it HEAD_SECONDS for a first request."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._limits.add(self, address):
            self._refuse(ApiError(503, "Too many connections; close some, or connect again later.", retry_after=1))
            return
        self._arm(HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.remove(self)
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and refuse what it holds back unparsed beyond the limit."""
        if self._refused or self.transport.is_closing():
            return
        if self._timer is None and self.is_idle:
            self._arm(HEAD_SECONDS, self._head_is_late)
        self._unparsed += len(data)
        super().data_received(data)
        # A header or a trailer without an end stays in the parser: no callback tells of it.
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        if self.parser.is_resuming:
            return
        self._in_message, self._head_bytes = True, 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = ApiError(400, f"More than {MAX_PIPELINED} pipelined requests; wait for answers.")
            raise ValueError("pipeline")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.parser.is_resuming:
            return
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.parser.is_resuming:
            return
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = ApiError(431, f"A request may have {MAX_HEADERS} headers; send fewer.")
            raise ValueError("headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.is_resuming:
            return
        self._unparsed = 0
        self._disarm()
        super().on_headers_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.scope["state"]["abort"] = self.transport.abort

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.is_upgrade:
            return  # its body follows
        self._unparsed, self._in_message = 0, False
        if self.is_idle:
            self._disarm()  # lingering is over: the body that was not needed has come
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn. Close soon if the body is not whole: nothing else would end a client that never sends it."""
        super().on_response_complete()
        if self._in_message and self.is_idle and not self.transport.is_closing():
            self._arm(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refuses, in OpenAI's form."""
        refusal, self._refusal = self._refusal, None
        if refusal is None and self.is_idle and self._head_bytes > MAX_HEAD_BYTES // 2:
            refusal = _head_too_large()  # the parser has a limit of its own for a URL
        self._refuse(refusal or ApiError(400, "The request is not valid HTTP/1.1 (RFC 9112); check its bytes."))

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise ValueError("head")

    def _refuse(self, failure: ApiError) -> None:
        """Answer, and close once the client has; if another answer is under way, close at once."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._limits.refused(failure.status, failure.message)
        if not self.is_idle:
            if self.pipeline or self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # what its app sends is dropped
            self.cycle.message_event.set()
        body = failure.encoded
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode("ascii") for name, value in (headers | failure.headers).items()]
        self.transport.write(b"".join([STATUS_LINE[failure.status], *lines, b"\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(LINGER_SECONDS, self.transport.abort)

    def _head_is_late(self) -> None:
        if self._in_message or self._unparsed:
            self._refuse(
                ApiError(408, f"The request's headers were not received within {HEAD_SECONDS:g} s; send it again.")
            )
        else:
            self.transport.close()  # as an unused keep-alive connection

    def _arm(self, seconds: float, call: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._fire, call)

    def _fire(self, call: Callable[[], None]) -> None:
        self._timer = None
        if not self.transport.is_closing():
            call()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head_too_large() -> ApiError:
    return ApiError(431, f"URL and headers may have {MAX_HEAD_BYTES:,} bytes; send less, or use the body.")
