"""Requests that offer another protocol, as the JDK's HTTP client does: answered in HTTP/1.1, with their bodies read."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.inside import Inside
from tests.waiting import WAIT_SECONDS

OFFER = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    "Content-Type": "application/json",
}
BODY = json.dumps({"model": "tiny", "prompt": "5 6 7", "max_tokens": 3, "ignore_eos": True}).encode()


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path)
    made.wait_until_it_serves()
    try:
        yield made
    finally:
        made.end()


def answered(connection: http.client.HTTPConnection) -> tuple[int, dict[str, Any]]:
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_of_a_request_that_offers_an_upgrade_is_read(inside: Inside, is_chunked: bool) -> None:
    """Several on one connection, and one without an offer after them."""
    connection = http.client.HTTPConnection(*inside.address, timeout=WAIT_SECONDS)
    for headers in (OFFER, OFFER, {"Content-Type": "application/json"}, OFFER):
        pieces = iter([BODY[:9], BODY[9:]]) if is_chunked else BODY
        connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=is_chunked)
        status, found = answered(connection)
        assert status == 200 and found["usage"]["completion_tokens"] == 3, found
    connection.request("GET", "/v1/models", headers=OFFER)
    assert answered(connection)[0] == 200
    connection.close()


def request_of(body: bytes, **headers: str) -> bytes:
    fields = {"Host": "localhost", **OFFER, "Content-Length": str(len(body)), **headers}
    lines = ["POST /tokenize HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_bytes_that_come_one_by_one_and_pipelined(inside: Inside) -> None:
    body = b'{"prompt": "5 6"}'
    many = request_of(body) * 3 + request_of(body, Connection="close, Upgrade")
    for step in (1, 7, len(many)):
        with socket.create_connection(inside.address, timeout=WAIT_SECONDS) as sock:
            for start in range(0, len(many), step):
                sock.sendall(many[start : start + step])
            found = b"".join(iter(lambda: sock.recv(65536), b""))  # noqa: B023
        assert found.count(b"HTTP/1.1 200") == 4 and found.count(b'"tokens":[') == 4, found


def test_an_offer_hides_no_malformed_length(inside: Inside) -> None:
    """Nothing of a body counts as a request of its own."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for headers, statuses in (
        ({"Content-Length": "3", "Transfer-Encoding": "chunked"}, [400]),
        ({"Content-Length": "-1"}, [400]),
        ({"Content-Length": str(len(inner))}, [400, 200]),  # no JSON; then the request after it
    ):
        with socket.create_connection(inside.address, timeout=WAIT_SECONDS) as sock:
            sock.sendall(request_of(inner, **headers) + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            found = b"".join(iter(lambda: sock.recv(65536), b""))  # noqa: B023
        assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", found)] == statuses, found
