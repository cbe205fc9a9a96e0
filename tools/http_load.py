"""A client for load: asks a server over HTTP/1.1 with little work, because it shares the machine with the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any, NamedTuple

__all__ = ["Heard", "LoadClient"]

LINE_BYTES = 1 << 20
TOKEN = b'"content":"'
"""In an event of a stream that has text; the first event has an empty one."""
EMPTY = b'"content":""'


class Heard(NamedTuple):
    """What came back. status: of HTTP; 0: the client went away, as it wanted to; -1: the connection broke.

    first, whole: seconds since the request was due; first is None where no text was streamed.
    """

    status: int
    retry_after: str | None
    first: float | None
    whole: float
    body: bytes


class LoadClient:
    """Keeps connections that nobody uses for the next request. Used in one event loop."""

    def __init__(self, host: str, port: int) -> None:
        """Nothing is opened yet."""
        self._host, self._port = host, port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(
        self, path: str, body: dict[str, Any] | None = None, *, gone_after: float | None = None,
        due: float | None = None,
    ) -> Heard:  # fmt: skip
        """POST a body, or GET. gone_after: seconds until the client goes away without reading on. due: when it should
        have begun, by `time.perf_counter`; None: now.
        """
        due = time.perf_counter() if due is None else due
        try:
            async with asyncio.timeout(gone_after):
                return await self._asked(path, body, due)
        except TimeoutError:
            return Heard(0, None, None, time.perf_counter() - due, b"")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            return Heard(-1, None, None, time.perf_counter() - due, repr(error).encode())

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()

    async def _asked(self, path: str, body: dict[str, Any] | None, due: float) -> Heard:
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        reader, writer = await self._connection()
        kept = False
        try:
            writer.write(head.encode() + data)
            await writer.drain()
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            headers = await _headers(reader)
            if "chunked" in headers.get("transfer-encoding", ""):
                first, text = await _chunks(reader, due)
            else:
                first, text = None, await reader.readexactly(int(headers.get("content-length", "0")))
            kept = headers.get("connection", "") != "close"
            return Heard(status, headers.get("retry-after"), first, time.perf_counter() - due, text)
        finally:
            if kept:
                self._free.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        found[name.lower()] = value.strip()
    return found


async def _chunks(reader: asyncio.StreamReader, due: float) -> tuple[float | None, bytes]:
    """The body of a stream, and when its first text came."""
    first, parts = None, []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        part = (await reader.readexactly(size + 2))[:-2]
        parts.append(part)
        if first is None and part.count(TOKEN) > part.count(EMPTY):
            first = time.perf_counter() - due
    await reader.readuntil(b"\r\n")
    return first, b"".join(parts)
