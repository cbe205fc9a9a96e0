"""Messages between server and engine process: length-prefixed JSON, which cannot run code."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from dataclasses import asdict
from typing import Any

import numpy as np

from retrieval_attn import errors
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.model.images import Image
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.sampling.sampler import TokenScore
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.server.failure import EngineLostError

Plain = dict[str, Any]

HEAD = struct.Struct(">I")
MAX_BYTES = 1 << 30
"""Maximum size of a frame; a larger one is a broken stream."""


class EngineFailure(RuntimeError):
    """An exception of the engine process that is not of this package; its log has the traceback."""


def frame_of(value: Plain) -> bytes:
    """Encode a frame. Minus infinity, a log-probability, is written and read by Python's json."""
    data = json.dumps(value, separators=(",", ":")).encode("ascii")
    return HEAD.pack(len(data)) + data


def receive_frame(sock: socket.socket) -> Plain | None:
    """Wait for the next frame; None if the other process has ended."""
    head = _received(sock, HEAD.size)
    if head is None:
        return None
    data = _received(sock, _length(head))
    return None if data is None else json.loads(data)


async def async_frame(reader: asyncio.StreamReader) -> Plain | None:
    """Read the next frame in an event loop; None if the other process has ended."""
    try:
        head = await reader.readexactly(HEAD.size)
        found: Plain = json.loads(await reader.readexactly(_length(head)))
        return found
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _length(head: bytes) -> int:
    (length,) = HEAD.unpack(head)
    if length > MAX_BYTES:
        raise EngineLostError(f"A frame of {length:,} bytes came from the engine's process; at most {MAX_BYTES:,} can.")
    return int(length)


def _received(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        try:
            more = sock.recv(min(length - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not more:
            return None
        data += more
    return bytes(data)


def ids_of(ids: tuple[int, ...]) -> str:
    """Encode token ids as int32 in base64, which is faster to parse than a JSON list."""
    return base64.b64encode(np.asarray(ids, np.int32).tobytes()).decode("ascii")


def ids_from(text: str) -> tuple[int, ...]:
    """Decode ids of `ids_of`."""
    return tuple(np.frombuffer(base64.b64decode(text), np.int32).tolist())


def request_of(request: Request) -> Plain:
    """Encode a request as plain values."""
    return {
        "parts": [ids_of(part) for part in request.parts],
        "max_tokens": request.max_tokens,
        "draw": asdict(request.draw),
        "stop": list(request.stop),
        "stop_ids": None if request.stop_ids is None else sorted(request.stop_ids),
        "namespace": request.namespace,
        "owner": request.owner,
        "priority": request.priority,
        "context": request.context,
        "min_tokens": request.min_tokens,
        "prompt_logprobs": request.prompt_logprobs,
        "visible": sorted(request.visible),
        "session": request.session,
        "grammar": None if request.grammar is None else asdict(request.grammar),
        "images": [
            [base64.b64encode(one.data).decode("ascii"), one.tokens, one.grid, one.line] for one in request.images
        ],
    }


def request_from(plain: Plain) -> Request:
    """Decode a request of `request_of`. Raises as `Request`."""
    stop_ids = plain["stop_ids"]
    changed = {
        "parts": tuple(ids_from(part) for part in plain["parts"]),
        "draw": SamplingParams(**plain["draw"]),
        "stop": tuple(plain["stop"]),
        "stop_ids": None if stop_ids is None else frozenset(stop_ids),
        "visible": frozenset(plain["visible"]),
        "grammar": None if plain["grammar"] is None else GrammarSpec(**plain["grammar"]),
        "images": tuple(
            Image(base64.b64decode(data), tokens, None if grid is None else (grid[0], grid[1]), line=line)
            for data, tokens, grid, line in plain["images"]
        ),
    }
    return Request(**{**plain, **changed})


def item_of(item: Event | Finished) -> list[Any]:
    """Encode an event or the end of a request as plain values."""
    if isinstance(item, Event):
        return ["event", item.token, item.text, item.logprob, item.top]
    *plain, error, scores = item
    return ["end", *plain, None if error is None else plain_error(error), scores]


def item_from(plain: list[Any]) -> Event | Finished:
    """Decode an item of `item_of`."""
    kind, *values = plain
    if kind == "event":
        token, text, logprob, top = values
        return Event(token, text, logprob, tuple((one, value) for one, value in top))
    reason, text, tokens, prompt, cached, seconds, error, scores = values
    told = None if error is None else error_from(error)
    scored = tuple(TokenScore(logprob, tuple(map(tuple, top))) for logprob, top in scores)
    return Finished(reason, text, tuple(tokens), prompt, cached, (seconds[0], seconds[1]), told, scored)


def plain_error(error: BaseException) -> list[Any]:
    """Encode an exception: class name, message, and attributes with plain values."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, int | str | None)}
    return [type(error).__name__, str(error), fields]


def error_from(plain: list[Any]) -> Exception:
    """Decode an exception: of the same class if it is public in this package, otherwise an EngineFailure."""
    kind, words, fields = plain
    found: Any = EngineLostError if kind == EngineLostError.__name__ else getattr(errors, kind, None)
    ours = isinstance(found, type) and issubclass(found, errors.RetrievalAttentionError)
    if ours:
        error: Exception = found(words)
        vars(error).update(fields)
        return error
    return EngineFailure(f"{kind}: {words}")
