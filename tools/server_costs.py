"""What the server costs over its engine, and what the engine gives several clients, with the bundled model.

    python -m tools.server_costs [--clients 8] [--repeats 3]

Prints, and as JSON in its last line: what HTTP adds to the first token (the client's time less the engine's, of one
request); processor time of the server's event loop; tokens per second of `clients` streams over HTTP beside the engine
in this process, in turn; the same of clients with 4K tokens each beside one; the first token of a follow-up turn beside
the first turn's, 16K tokens. The processor is shared by server and clients: what clients take counts against HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.llm import LLM
from retrieval_attn.model.bundled import BUNDLED
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.server.prompts import Prompts
from tests.server.process import WORDS, Served, serving

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin take the server's processor

TOKENS = 64
CHAT = "/v1/chat/completions"
STORY = "Tell a story of the sea."


class Streamed(NamedTuple):
    """first, whole: seconds. id: the request's."""

    first: float
    whole: float
    pieces: int
    text: str
    id: str


def document(number: int, tokens: int) -> str:
    """A text of about so many tokens, another one for each number."""
    return f"Book {number}. " + WORDS * (tokens // 22)


def body_of(text: str, max_tokens: int = TOKENS, question: str = STORY) -> dict[str, Any]:
    """A question about a text; temperature and seed make every answer go on to its last token, or nearly."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return {"model": "bundled", "messages": messages, "max_tokens": max_tokens, "temperature": 2.0, "seed": 1}


def streamed(http: httpx.Client, body: dict[str, Any]) -> Streamed:
    """Ask, as a stream."""
    began, first, pieces = time.perf_counter(), 0.0, list[str]()
    with http.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            (choice,) = event["choices"]
            if choice["delta"].get("content"):
                first = first or time.perf_counter() - began
                pieces.append(choice["delta"]["content"])
        return Streamed(first, time.perf_counter() - began, len(pieces), "".join(pieces), reply.headers["x-request-id"])


def at_once(work: Callable[[int], Any], clients: int) -> float:
    """Seconds until all are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def line_of(served: Served, request_id: str) -> dict[str, Any]:
    """What the server logged of a request."""
    while True:
        for line in reversed(served.log):
            if line.get("request_id") == request_id:
                return line
        time.sleep(0.001)


def first_token(served: Served, http: httpx.Client, repeats: int) -> float:
    """Milliseconds that HTTP adds, the median; tokenizing and templates are in them."""
    found = []
    for number in range(10 * repeats):
        one = streamed(http, body_of(document(number, 200), 2))
        found.append(one.first - line_of(served, one.id)["engine_seconds"][0])
    return 1000 * statistics.median(found)


def loop_seconds(served: Served) -> float:
    """That the server's event loop was on a processor: what other programs take does not count. Linux."""
    pid = served.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def loop_costs(served: Served, http: httpx.Client, repeats: int) -> dict[str, float]:
    """Processor time of the event loop for one request, and for one streamed token more, in milliseconds."""
    spent = {}
    for tokens in (1, TOKENS):
        before, made = loop_seconds(served), 0
        for number in range(5 * repeats):
            made += streamed(http, body_of(document(4000 + number, 200), tokens)).pieces
        spent[tokens] = (1000 * (loop_seconds(served) - before) / (5 * repeats), made / (5 * repeats))
    (short, few), (long, many) = spent[1], spent[TOKENS]
    return {"request": short, "token": (long - short) / max(1, many - few)}


def over_http(
    served: Served,
    bodies: Sequence[dict[str, Any]],
    ask: Callable[[httpx.Client, dict[str, Any]], str] = lambda http, body: streamed(http, body).id,
) -> float:
    """Tokens per second, by the server's count, of one client for each body; connected before, as clients that ask more
    than once are. ask: takes a whole answer in; the request's id.
    """
    ids = [""] * len(bodies)

    def work(number: int) -> None:
        ids[number] = ask(https[number], bodies[number])

    with contextlib.ExitStack() as clients:
        https = [clients.enter_context(served.client()) for _ in bodies]
        for http in https:
            http.get("/health").raise_for_status()
        seconds = at_once(work, len(bodies))
    if not all(ids):
        raise RuntimeError("a stream failed; its error stands above")
    return sum(int(line_of(served, one)["completion_tokens"]) for one in ids) / seconds


def requests_of(llm: LLM, bodies: Sequence[dict[str, Any]], tokens: int = TOKENS) -> list[Request]:
    """What a server makes of the bodies, in its parts: what one request reads, the next ones find."""
    made = Prompts(llm.tokenizer, llm.model.config.vocab_size, llm.model.config.max_position_embeddings)
    draw = SamplingParams(temperature=2.0, seed=1)
    return [Request(made.of_messages(body["messages"]), tokens, draw) for body in bodies]


def in_process(engine: Engine, prompts: Sequence[Request]) -> float:
    """Tokens per second of the same requests, by threads that read their events."""
    tokens = [0] * len(prompts)

    def work(number: int) -> None:
        ticket = engine.submit(prompts[number])
        for _ in ticket:
            pass
        tokens[number] = len(ticket.result().tokens)

    seconds = at_once(work, len(prompts))
    return sum(tokens) / seconds


def compared(served: Served, clients: int, repeats: int) -> dict[str, float]:
    """Tokens per second over HTTP and in this process, of short prompts; medians of runs in turn."""
    bodies = [body_of(document(1000 + number, 100)) for number in range(clients)]
    found: dict[str, list[float]] = {"http": [], "engine": []}
    llm = LLM(BUNDLED)
    prompts = requests_of(llm, bodies)
    with Engine(llm) as engine:
        for number in range(repeats + 1):
            one = {"http": over_http(served, bodies), "engine": in_process(engine, prompts)}
            for name, value in one.items() if number else ():  # the first compiles
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def several(served: Served, http: httpx.Client, clients: int, repeats: int) -> dict[str, float]:
    """Tokens per second of one client, and of several, each with 4K tokens that were read before; and how many times
    the one the other is. Medians of runs in turn, of another client each; the first turn compiles.
    """
    bodies = [body_of(document(2000 + number, 4096)) for number in range(clients)]
    for body in bodies:
        streamed(http, {**body, "max_tokens": 1})
    turns = range(3 * repeats + 1)
    pairs = [(over_http(served, [bodies[turn % clients]]), over_http(served, bodies)) for turn in turns][1:]
    one, all_of_them = map(statistics.median, zip(*pairs, strict=True))
    return {"one": one, "all": all_of_them, "times": statistics.median(many / single for single, many in pairs)}


def follow_up(http: httpx.Client, tokens: int, number: int) -> dict[str, float]:
    """Seconds to the first token of two turns of one conversation."""
    body = body_of(document(3000 + number, tokens), 32)
    first = streamed(http, body)
    turns = [*body["messages"], {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = streamed(http, {**body, "messages": turns})
    return {"first": first.first, "second": second.first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=16384)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving("--store", folder) as served, served.client() as http:
        streamed(http, body_of(document(0, 100)))
        added = first_token(served, http, args.repeats)
        print(f"first token: HTTP adds {added:.1f} ms")
        loop = loop_costs(served, http, args.repeats)
        print(f"event loop: {loop['request']:.2f} ms of processor time for a request, {loop['token']:.3f} for a token")
        speeds = compared(served, args.clients, args.repeats)
        share = speeds["http"] / speeds["engine"]
        print(f"{args.clients} streams: {speeds['http']:.0f} tokens/s over HTTP, {share:.3f} of {speeds['engine']:.0f}")
        many = several(served, http, args.clients, args.repeats)
        speed = f"{many['all']:.0f} tokens/s, one {many['one']:.0f}"
        print(f"{args.clients} clients at 4K: {speed}: {many['times']:.2f} times")
        turns = [follow_up(http, args.turn_tokens, number) for number in range(args.repeats)]
        turn = statistics.median(one["second"] / one["first"] for one in turns)
        print(f"follow-up turn of {args.turn_tokens:,} tokens: {100 * turn:.1f} % of the first turn's time to a token")
    print(json.dumps({"first_token_ms": added, "loop_ms": loop, "streams": speeds, "at_4k": many, "follow_up": turns}))


if __name__ == "__main__":
    main()
