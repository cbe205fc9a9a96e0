"""The server on Ray Serve: several replicas; a session, and requests about one text, go to the replica that caches it.

    serve run deploy.ray_app:app model=path/or/hub-name store=/data/contexts replicas=2 gpus=1

`Front` takes HTTP requests and names each by what it is about: the saved context, the session, the response that it
continues, or what the first 4K tokens of its prompt are. Ray's multiplexing sends equal names to one replica while that
is not overloaded. A `Replica` is the whole server of `retrieval-attn serve`, without its socket. All share one folder
of saved contexts and responses, so what one has saved, any opens. Ray pickles what goes from process to process; only
replicas and fronts talk so.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response, StreamingResponse

from retrieval_attn.config import Config
from retrieval_attn.model.bundled import model_path
from retrieval_attn.server.access import Keys
from retrieval_attn.server.app import make_app
from retrieval_attn.server.engine_process import Child
from retrieval_attn.server.protocol import SESSION_HEADERS
from retrieval_attn.server.run import service_for, started
from retrieval_attn.server.settings import EngineSpec, Settings

HELD_NAMES = 1024
"""That a replica tells Ray to send to it; the least recently used one is forgotten first."""
HELD_RESPONSES = 65536
"""Whose names a front remembers."""
RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_]+)"')
SAME_TOKENS = 4096
SAME_CHARACTERS = 4 * SAME_TOKENS
"""About as many as these tokens have: fronts load no tokenizer."""
LEAST_CHARACTERS = 256
"""Before a message's last paragraph, for what precedes that to be shared by itself, as the server does."""
TRIES = 3
"""Replicas that get a request, one after the other, as long as nothing of an answer came."""


class Options(BaseModel):
    """Of `serve run`, as NAME=VALUE. gpus, cpus: of each replica. gpu_memory: as `retrieval-attn serve` takes it. keys:
    the file of API keys. name: of the model, for clients. body_bytes: of a request at most. apart: the engine has a
    process of its own, as `--engine process` gives it one. warm_up: tokens of `--warm-up`, or auto. allowed_hosts:
    names of the server without keys, as `--allowed-host`, with commas between them.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "bundled"
    store: str | None = None
    name: str | None = None
    keys: str | None = None
    replicas: int = 2
    gpus: float = 0.0
    cpus: float = 1.0
    gpu_memory: str | None = None
    max_context: int | None = None
    warm_up: int | Literal["auto"] = "auto"
    body_bytes: int = 64 << 20
    apart: bool = False
    allowed_hosts: str = ""


class Call(NamedTuple):
    """An HTTP request on its way to a replica. headers: names in lower case."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Start(NamedTuple):
    """What comes of an answer before its body."""

    status: int
    headers: list[tuple[bytes, bytes]]


def affinity(call: Call, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Which name the requests have that one replica should answer; "" where any may. names: of earlier responses."""
    headers = dict(call.headers)
    words = call.path.strip("/").split("/")
    if words[:2] == ["v1", "contexts"] and len(words) > 2 and words[2] != "files":
        return f"context:{words[2]}"
    try:
        body = json.loads(call.body)
    except ValueError:
        return ""
    if not isinstance(body, dict):
        return ""
    if words[:2] == ["v1", "contexts"]:
        return f"context:{body.get('name')}"
    context = body.get("context") or str(body.get("model", "")).partition("@")[2]
    if context:
        return f"context:{context}"
    previous = names.get(str(body.get("previous_response_id")))
    if previous is not None:
        return previous
    begins = _session(body, headers) or _beginning(body)
    if not begins:
        return ""
    # who has another key shares nothing
    key = headers.get(b"authorization", b"") + b"\0" + headers.get(b"x-api-key", b"")
    return hashlib.sha256(key + b"\0" + begins.encode("utf-8", "surrogatepass")).hexdigest()


def _session(body: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str:
    """The session's name, as clients send it; "" without one."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None  # of the Messages API
    named = [headers.get(name.encode(), b"").decode("latin-1") for name in SESSION_HEADERS]
    found = next((one for one in (*named, body.get("session_id"), user, body.get("prompt_cache_key")) if one), "")
    return f"session:{found}" if found else ""


def _beginning(body: Mapping[str, Any]) -> str:
    """What later requests about the same begin with: all up to the first question of a conversation."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _shared(prompt)
    if isinstance(prompt, list):
        return json.dumps(prompt[:SAME_TOKENS])
    items, instructions = body.get("input"), body.get("instructions")  # of the Responses API
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = body.get("messages", items)
    said: list[str] = [instructions] if isinstance(instructions, str) and messages else []
    for message in messages if isinstance(messages, list) else []:
        said.append(_text(message.get("content") if isinstance(message, dict) else None))
        if isinstance(message, dict) and message.get("role") == "user":
            break
    return _shared("\n\n".join([*said[:-1], _shared(said[-1])])) if said else ""


def _text(content: Any) -> str:
    """Of a message: of its parts the text alone, because clients move marks such as cache_control between them."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return content if isinstance(content, str) else "\n\n".join(texts) or json.dumps(content)


def _shared(text: str) -> str:
    """Without its last paragraph, likely a question, where there is enough before it."""
    cut = text.rstrip().rfind("\n\n")
    return text[: cut if cut >= LEAST_CHARACTERS else None][:SAME_CHARACTERS]


async def through(app: Callable[..., Any], call: Call) -> AsyncIterator[Start | bytes]:
    """What an ASGI app answers: its start, then pieces of its body. If it is left early, the app gets a disconnect
    message.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": call.headers,
        "client": None,
        "server": None,
    }
    given = [{"type": "http.request", "body": call.body, "more_body": False}]
    left = asyncio.Event()
    answered: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, answered.put)
        finally:
            answered.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await answered.get()) is not None:
            if message["type"] == "http.response.start":
                yield Start(message["status"], list(message.get("headers", [])))
            elif message.get("body"):
                yield message["body"]
        await task
    finally:
        left.set()
        with contextlib.suppress(Exception):
            await task


@serve.deployment(max_ongoing_requests=4096, health_check_period_s=5)
class Replica:
    """A server: model, engine and app. Several run side by side over one folder of saved contexts."""

    async def __init__(self, options: Options) -> None:
        """Loads the model. Raises as `retrieval-attn serve` does for what it cannot use."""
        path = model_path(options.model)
        name = options.name or (Path(path).name if Path(path).is_dir() else path)
        loading = {"gpu_memory": options.gpu_memory, "max_context": options.max_context}
        warm = None if options.warm_up == "auto" else options.warm_up
        spec = EngineSpec(path, loading, Config().to_dict(), store=options.store, warm_tokens=warm)
        found = await started(spec, Child.start() if options.apart else None)
        self._client = found.client
        hosts = tuple(host for host in options.allowed_hosts.split(",") if host)
        settings = Settings(name, body_bytes=options.body_bytes, allowed_hosts=hosts)
        self._app = make_app(service_for(found, settings, Keys.of(options.keys), options.store))
        self._name = serve.get_replica_context().replica_id.unique_id

    @serve.multiplexed(max_num_models_per_replica=HELD_NAMES)
    async def hold(self, name: str) -> str:
        """From now on requests of this name come here. The engine opens or reads the text with the first of them, and
        gives it up by its own rules: Ray's list says where a text is likely to be.
        """
        return name

    async def answer(self, call: Call) -> AsyncIterator[Start | bytes]:
        """The start of the answer, then pieces of its body."""
        if name := serve.get_multiplexed_model_id():
            await self.hold(name)
        async for piece in through(self._app, call):
            if isinstance(piece, Start):
                piece = Start(piece.status, [*piece.headers, (b"x-replica", self._name.encode())])
            yield piece

    async def whole(self, call: Call) -> tuple[str, int, bytes]:
        """Who this is, and a short answer as a whole: of requests that all replicas get."""
        status, body = 500, b""
        async for piece in through(self._app, call):
            if isinstance(piece, Start):
                status = piece.status
            else:
                body += piece
        return self._name, status, body

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def check_health(self) -> None:
        """Ray makes another one where this raises."""
        if self._client.lost is not None:
            raise RuntimeError(f"the engine has ended: {self._client.lost}")

    async def __del__(self) -> None:
        """Ray waits for it when it takes a replica away; answers under way have ended then."""
        client = getattr(self, "_client", None)
        if client is not None:
            await client.close(drain=False)


# What `Front` calls stands before it: `serve.ingress` pickles its routes with what they know then.


async def _passed(pieces: Any, name: str, names: OrderedDict[str, str] | None) -> AsyncIterator[bytes]:
    """An answer's body. A replica that ends in the middle is said in the stream, and the next request finds another.

    names: gets the id of a response, with the name of its request.
    """
    whole = False
    try:
        async for piece in pieces:
            if names is not None and name and (found := RESPONSE_ID.search(piece)):
                names[found[1].decode()] = name
                while len(names) > HELD_RESPONSES:
                    names.popitem(last=False)
                names = None
            yield piece
        whole = True
    except (RayError, RayServeException) as error:
        whole = True
        said = {"message": f"The replica ended: {type(error).__name__}; ask again.", "type": "server_error"}
        yield b"data: " + json.dumps({"error": said}).encode() + b"\n\n"
    finally:
        if not whole:
            pieces.cancel()  # the client has disconnected


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": None}}, status, headers)


def merged(found: Mapping[str, str]) -> str:
    """Metrics of several replicas in one text: a metric's help and type once, each sample with its replica."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in found.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split()[2]
                known = about.setdefault(family, [])
                known += [] if line in known else [line]
            elif line:
                name, _, value = line.rpartition(" ")
                label = f'replica="{replica}"'
                named = f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"
                samples.setdefault(family, []).append(f"{named} {value}")
    return "".join(f"{line}\n" for family, lines in about.items() for line in [*lines, *samples.get(family, [])])


routes = FastAPI(title="retrieval-attn", docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment(max_ongoing_requests=16384)
@serve.ingress(routes)
class Front:
    """Takes requests in and passes answers on."""

    def __init__(self, replicas: DeploymentHandle, options: Options) -> None:
        """replicas: those of `Replica`."""
        self._replicas, self._body_bytes = replicas, options.body_bytes
        self._names: OrderedDict[str, str] = OrderedDict()  # of requests, by the id of their response

    @routes.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        """Of all replicas, each sample with the label replica."""
        call = Call("GET", "/metrics", b"", list(request.headers.raw), b"")
        found = await self._replicas.broadcast("whole", call).results_async(timeout_s=10)
        wrong = next(((status, body) for _, status, body in found if status != 200), None)
        if wrong is not None:
            return Response(wrong[1], wrong[0], media_type="application/json")
        return Response(merged({name: body.decode() for name, _, body in found}), media_type="text/plain")

    @routes.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(self, request: Request, path: str) -> Response:
        """To the replica that has what the request is about; to another one if that has gone."""
        body = await self._body(request)
        if body is None:
            return _error(413, f"A body may have {self._body_bytes:,} bytes; send a shorter one.")
        call = Call(request.method, f"/{path}", request.scope["query_string"], list(request.headers.raw), body)
        name = affinity(call, self._names)
        names = self._names if call.path.startswith("/v1/responses") else None
        chosen = self._replicas.options(stream=True, multiplexed_model_id=name)
        for tried in range(1, TRIES + 1):
            pieces = chosen.answer.remote(call)
            try:
                start = await anext(pieces)
            except (RayError, RayServeException, StopAsyncIteration) as error:
                if tried == TRIES:
                    return _error(503, f"No replica answered: {type(error).__name__}.", {"retry-after": "5"})
                continue
            response = StreamingResponse(_passed(pieces, name, names), start.status)
            response.raw_headers = start.headers
            return response
        raise AssertionError("the last try returns")

    async def _body(self, request: Request) -> bytes | None:
        """None for one that is too long."""
        pieces, total = [], 0
        async for piece in request.stream():
            pieces.append(piece)
            total += len(piece)
            if total > self._body_bytes:
                return None
        return b"".join(pieces)


def app(options: Options) -> serve.Application:
    """What `serve run` starts."""
    actors = {"num_gpus": options.gpus, "num_cpus": options.cpus}
    replica = Replica.options(num_replicas=options.replicas, ray_actor_options=actors)
    front = Front.options(ray_actor_options={"num_cpus": 0})
    return front.bind(replica.bind(options), options)
