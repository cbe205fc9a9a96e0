"""Whose key a path needs, however the path is written; names and origins where no key is needed."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.server.access import AllowedHosts, ApiKey, Caller, Keys
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.permissions import GuardedRoute
from tests.server.inside import Inside

ADMIN, USER = "admin-key-1", "user-key-01"
KEYS = Keys([ApiKey(ADMIN, Caller("root", "key:root", True)), ApiKey(USER, Caller("bob", "key:bob", False))])
ADMIN_PATHS = ("/metrics", "/v1/contexts", "/v1/contexts/files", "/v1/contexts/x", "/v1/contexts/x/save")
BEHIND = ("", "%0A", "%0a%0a", "%0D", "%00", "/", "//", "/.", ";x", "?x", "%3f", "%23", "%20", "%09", "%e2%80%a8")
USER_PATHS = (
    "/v1/models", "/v1/models/tiny", "/tokenize", "/detokenize", "/props", "/v1/completions", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/x", "/openapi.json", "/status",
)  # fmt: skip


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    found = Inside(tmp_path_factory.mktemp("store"), KEYS, cors=("https://chat.example",))
    found.wait_until_it_serves()
    yield found
    found.end()


def status(
    inside: Inside, method: str, path: str, key: str | None = None, body: bytes = b"{}", header: str = "authorization"
) -> int:
    """Of a request whose path goes out as it is written here. header: that has the key."""
    headers = {"host": "localhost", "content-type": "application/json"}
    headers |= {} if key is None else {header: f"Bearer {key}" if header == "authorization" else key}
    connection = http.client.HTTPConnection(*inside.address, timeout=60)
    try:
        connection.request(method, path, body if method == "POST" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def written(draw: st.DrawFn, path: str) -> str:
    """A path with letters encoded, in another case, with slashes added, with something behind it."""
    letters = []
    for letter in path:
        way = draw(st.sampled_from(("as it is",) * 12 + ("encoded", "case", "slash")))
        if way == "encoded":
            letter = f"%{ord(letter):02{draw(st.sampled_from('xX'))}}"
        elif way == "case":
            letter = letter.swapcase()
        elif way == "slash":
            letter += draw(st.sampled_from(("/", "/./", "/../", "%2f", "\\")))
        letters.append(letter)
    behind = draw(st.sampled_from(BEHIND))
    return f"/{''.join(letters[1:])}{behind}"


@st.composite
def paths(draw: st.DrawFn, of: tuple[str, ...]) -> str:
    return written(draw, draw(st.sampled_from(of)))


@settings(max_examples=200, deadline=None)
@given(
    paths(ADMIN_PATHS),
    st.sampled_from(("GET", "HEAD", "POST", "DELETE", "OPTIONS")),
    st.sampled_from(("authorization", "x-api-key")),
)
def test_no_way_of_writing_a_path_gives_a_user_what_is_an_admins(
    keyed: Inside, path: str, method: str, header: str
) -> None:
    assert status(keyed, method, path, USER, header=header) in (400, 403, 404, 405), path


@settings(max_examples=200, deadline=None)
@given(paths(ADMIN_PATHS + USER_PATHS), st.sampled_from(("GET", "HEAD", "POST", "DELETE")))
def test_no_way_of_writing_a_path_needs_no_key(keyed: Inside, path: str, method: str) -> None:
    assert status(keyed, method, path) in (400, 401), path


@pytest.mark.parametrize("path", ["/metrics%0A", "/v1/contexts%0A", "/v1/contexts/%0A", "/v1/contexts/x%0A"])
def test_a_line_feed_behind_a_path_changes_nothing(keyed: Inside, path: str) -> None:
    """The pattern of a route ends with $, which fits before a line feed, too; comparing strings saw another path."""
    assert status(keyed, "GET", path, USER) in (403, 404)
    assert status(keyed, "POST", path, USER, b'{"name": "x", "text": "planted"}') in (403, 404, 405)
    assert status(keyed, "GET", path) == 401


def test_keys_open_what_they_should(keyed: Inside) -> None:
    assert status(keyed, "GET", "/metrics", ADMIN) == status(keyed, "GET", "/v1/models", USER) == 200
    assert status(keyed, "GET", "/metrics", USER) == 403 and status(keyed, "GET", "/v1/models") == 401
    for path in ("/", "/health", "/version"):
        assert status(keyed, "GET", path) == status(keyed, "HEAD", path) == 200
    assert status(keyed, "GET", "/nothing") == 401 and status(keyed, "GET", "/nothing", USER) == 404
    assert status(keyed, "GET", "/metrics/", ADMIN) == 404  # no redirect, whose address would be the client's Host


def test_a_key_of_anthropics_clients(keyed: Inside) -> None:
    """It is a key like the other one, and one key that is wrong is not made right by another."""
    for path, key, wanted in (
        ("/v1/models", USER, 200), ("/metrics", USER, 403), ("/metrics", ADMIN, 200), ("/v1/models", "wrong-key", 401),
    ):  # fmt: skip
        assert status(keyed, "GET", path, key, header="x-api-key") == wanted
    host, port = keyed.address
    with httpx.Client(base_url=f"http://{host}:{port}") as web:
        headers = {"authorization": "Bearer wrong-key", "x-api-key": ADMIN}
        assert web.get("/v1/models", headers=headers).status_code == 401
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "1 2 3"}]}
        reply = web.post("/v1/messages", json=body)
        assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        assert reply.json()["request_id"] == reply.headers["request-id"]
        for caller in (USER, ADMIN):  # each key has a prefix cache of its own
            usage = [web.post("/v1/messages", json=body | {"messages": [{"role": "user", "content": "5 6 7 " * 100}]},
                              headers={"x-api-key": caller}).json()["usage"] for _ in range(2)]  # fmt: skip
            assert usage[0]["cache_read_input_tokens"] == 0 < usage[1]["cache_read_input_tokens"]


def test_a_response_is_read_with_its_callers_key_alone(keyed: Inside) -> None:
    """Another key, an admin's too, gets the answer to an unknown id: it is not read, deleted or continued."""
    host, port = keyed.address
    body = {"model": "tiny", "max_output_tokens": 4, "input": "1 2 3"}
    with httpx.Client(base_url=f"http://{host}:{port}") as web:

        def ask(method: str, path: str, key: str | None, **fields: object) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return web.request(method, path, headers=headers, json=fields or None)

        made = ask("POST", "/v1/responses", USER, **body)
        assert made.status_code == 200
        name = made.json()["id"]
        path = f"/v1/responses/{name}"
        for method in ("GET", "DELETE"):
            other, unknown = ask(method, path, ADMIN), ask(method, "/v1/responses/resp_0", ADMIN)
            assert other.status_code == unknown.status_code == 404
            assert other.text.replace(name, "resp_0") == unknown.text
            assert ask(method, path, None).status_code == ask(method, path, "wrong-key").status_code == 401
        assert ask("POST", "/v1/responses", ADMIN, **body, previous_response_id=name).status_code == 404
        assert ask("POST", "/v1/responses", USER, **body, previous_response_id=name).status_code == 200
        assert ask("GET", path, USER).json() == made.json()
        assert ask("DELETE", path, USER).json() == {"id": name, "object": "response", "deleted": True}
        assert ask("GET", path, USER).status_code == 404


def test_every_route_has_a_permission(keyed: Inside) -> None:
    """One that was added to the app in another way would be open to everybody."""
    assert keyed.app is not None
    found: list[object] = []
    for route in keyed.app.router.routes:
        found += route.original_router.routes if hasattr(route, "original_router") else [route]
    assert len(found) >= 15
    assert [route for route in found if not isinstance(route, GuardedRoute)] == []


def test_web_pages_of_an_origin_that_was_named(keyed: Inside) -> None:
    """A preflight brings no key, and must be answered; others' pages get no permission."""
    host, port = keyed.address
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with httpx.Client(base_url=f"http://{host}:{port}") as web:
        reply = web.options("/v1/chat/completions", headers={"origin": "https://chat.example", **asks})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()
        reply = web.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asks})
        assert reply.status_code == 400 and "access-control-allow-origin" not in reply.headers
        key = {"authorization": f"Bearer {USER}"}
        reply = web.get("/v1/models", headers={"origin": "https://chat.example", **key})
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        reply = web.get("/v1/models", headers={"origin": "https://evil.example", **key})
        assert reply.status_code == 200 and "access-control-allow-origin" not in reply.headers
        assert web.get("/v1/models", headers={"host": "any.example", **key}).status_code == 200  # keys decide


@pytest.mark.parametrize(
    ("right", "host", "origin"),
    [
        (True, "localhost:8000", None),
        (True, "LOCALHOST", None),
        (True, "127.0.0.1:8000", None),
        (True, "127.9.9.9", None),
        (True, "[::1]:8000", None),
        (True, "app.localhost", None),
        (True, "gpu.lan:8000", None),
        (True, "", None),
        (False, "evil.example", None),
        (False, "localhost.evil.example", None),
        (False, "127.0.0.1.evil.example", None),
        (False, "evil.example:127.0.0.1", None),
        (False, "localhost@evil.example", None),
        (False, "[::1", None),
        (False, "evil.example@localhost", None),
        (False, "[::1].evil.example", None),
        (False, "localhost:80:80", None),
        (True, "localhost.", None),
        (False, "10.0.0.5", None),
        (True, "localhost:8000", "http://localhost:3000"),
        (True, "localhost:8000", "https://chat.example"),
        (True, "gpu.lan:8000", "http://gpu.lan:8000"),
        (False, "localhost:8000", "http://evil.example"),
        (False, "localhost:8000", "https://chat.example.evil.example"),
        (False, "localhost:8000", "null"),
        (False, "localhost:8000", "http://evil.example@localhost"),
        (False, "localhost:8000", "http://["),
        (False, "localhost:8000", ""),
        (False, "gpu.lan:8000", "http://other.lan:8000"),
    ],
)
def test_names_and_origins_without_keys(right: bool, host: str, origin: str | None) -> None:
    hosts = AllowedHosts(("gpu.lan",), ("https://chat.example",))
    origins = [] if origin is None else [origin.encode()]
    if right:
        hosts.check(host.encode(), origins)
    else:
        with pytest.raises(ApiError, match=r"--allowed-host|--cors") as found:
            hosts.check(host.encode(), origins)
        assert found.value.status == 403


def test_any_name_does_not_mean_any_origin() -> None:
    hosts = AllowedHosts(("*",))
    hosts.check(b"anything.example", [])
    hosts.check(b"anything.example", [b"http://anything.example"])
    with pytest.raises(ApiError):
        hosts.check(b"anything.example", [b"http://evil.example"])


def test_a_page_of_another_origin_plants_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A form needs no preflight: without a check of its origin, any page could save contexts here."""
    inside = Inside(tmp_path_factory.mktemp("store"))
    inside.wait_until_it_serves()
    try:
        with inside.client() as web:
            form = {"files": {"file": ("a.txt", b"1 2 3 4")}, "data": {"name": "planted"}}
            for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
                reply = web.post("/v1/contexts/files", headers=headers, **form)  # type: ignore[arg-type]
                assert reply.status_code == 403 and reply.json()["error"]["type"] == "permission_error"
                assert web.get("/v1/models", headers=headers).status_code == 403
            assert web.get("/v1/contexts").json()["data"] == []
            assert web.get("/health", headers={"host": "10.1.2.3:8000"}).status_code == 200  # a container's probe
    finally:
        inside.end()
