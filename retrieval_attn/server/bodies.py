"""Request bodies: read within limits, checked as bytes, and parsed in a thread if they are large.

JSON becomes Python objects of 15 to 24 times its size, so lengths, counts and depth are checked on the bytes first.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from retrieval_attn.server.failure import ApiError, invalid

BODY_SECONDS = 60.0
SMALL_BYTES = 64 << 10
"""Larger bodies are parsed in a thread."""
PARSERS = 2
"""Threads that parse large bodies, and so the number of them that are Python objects at a time."""
MAX_DEPTH, MAX_KEYS, MAX_CONTAINERS, MAX_STRINGS = 64, 4096, 16384, 65536
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)
"""Matches strings (an unclosed one to the end of the body), brackets and commas. Possessive: it never backtracks."""


class Bodies:
    """Limits of request bodies. most: bytes of one. total: bytes of all in memory. items: elements of one list."""

    def __init__(self, most: int, total: int, items: int) -> None:
        self._most, self._total, self._items = most, total, items
        self._held = 0
        self._parsers = ThreadPoolExecutor(PARSERS, "retrieval_attn-body")

    @asynccontextmanager
    async def read(self, request: HttpRequest) -> AsyncIterator[bytes | None]:
        """Read the body, None if the client disconnected; its memory is reserved until the end of the block.

        Raises ApiError: 413, 408, and 503 if other bodies use the memory.
        """
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given) > self._most:
            raise self._too_large()
        pieces: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    whole = await self._receive(request, pieces)
            except TimeoutError:
                raise ApiError(408, f"The body was not received within {BODY_SECONDS:g} s; send it again.") from None
            pieces[:] = [b"".join(pieces)]
            yield pieces[0] if whole else None
        finally:
            self._held -= sum(map(len, pieces))

    async def _receive(self, request: HttpRequest, pieces: list[bytes]) -> bool:
        """Append the body to `pieces`. Return False if the client disconnected."""
        held, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return False
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
            held += len(pieces[-1])
            self._held += len(pieces[-1])
            if held > self._most:
                raise self._too_large()
            self._require_room(held)
        return True

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Reserve memory for stored text that a request brings back, as for a body. Raises ApiError: 413, 503."""
        if nbytes > self._most:
            raise self._too_large()
        self._held += nbytes
        try:
            self._require_room(nbytes)
            yield
        finally:
            self._held -= nbytes

    def _require_room(self, held: int) -> None:
        """Raise ApiError 503 if other requests, besides one with `held` bytes, use the memory."""
        if self._held > self._total and self._held > held:
            raise ApiError(
                503, f"Bodies of other requests use {self._held - held:,} of {self._total:,} bytes; send this "
                "again later.", code="bodies_full", retry_after=1,
            )  # fmt: skip

    async def parse(self, body: bytes, kind: type[BaseModel]) -> BaseModel:
        """Parse and validate JSON. Raises ApiError 400."""
        if len(body) <= SMALL_BYTES:
            return parse_json(body, kind, self._items)
        return await asyncio.get_running_loop().run_in_executor(self._parsers, parse_json, body, kind, self._items)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._most:,} bytes; send a shorter one, or save the text as a context in "
            "parts.",
        )


def parse_json(body: bytes, kind: type[BaseModel], items: int) -> BaseModel:
    """See `Bodies.parse`."""
    check_json(body, items)
    try:
        found = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"The body must be JSON in UTF-8, got byte {body[error.start]:#04x} at {error.start}; encode it so, "
            "and do not compress it.",
        ) from error  # fmt: skip
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {str(error)[:200]}.") from error
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise ApiError(400, "The body has an integer with too many digits; no field takes such a number.") from error
    except RecursionError as error:
        raise ApiError(400, "The body's JSON is nested too deep.") from error
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False)) from error


def check_json(body: bytes, items: int) -> None:
    """Check the counts of a JSON text on its bytes, without checking its syntax.

    items: of one list, at most; of all lists together, 16 times as many. Stops at the first count that is too large.
    Raises ApiError 400.
    """
    open_counts: list[int] = []  # items of each open list or object but the last one, objects below zero
    containers = strings = commas = 0
    most_commas = 16 * items + MAX_STRINGS
    for match in _STRUCTURE.finditer(body):
        sign = body[match.start()]
        if sign == 34:  # "
            strings += 1
            if strings > MAX_STRINGS:
                raise _too_many("strings", MAX_STRINGS)
        elif sign == 44:  # ,
            commas += 1
            if not open_counts:
                continue
            if open_counts[-1] < 0:
                open_counts[-1] -= 1
                if -open_counts[-1] > MAX_KEYS:
                    raise _too_many("keys in an object", MAX_KEYS)
            else:
                open_counts[-1] += 1
                if open_counts[-1] >= items or commas > most_commas:
                    raise _too_many("items in a list", items)
        elif sign in (91, 123):  # [ {
            containers += 1
            open_counts.append(-1 if sign == 123 else 0)
            if containers > MAX_CONTAINERS:
                raise _too_many("lists and objects", MAX_CONTAINERS)
            if len(open_counts) > MAX_DEPTH:
                raise ApiError(400, f"The body's JSON is nested deeper than {MAX_DEPTH}; send it flatter.")
        elif open_counts:
            open_counts.pop()


def _too_many(what: str, most: int) -> ApiError:
    return ApiError(400, f"The body has more than {most:,} {what}; send fewer, a long text as one string.")
