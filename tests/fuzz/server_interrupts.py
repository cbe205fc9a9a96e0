"""SIGTERM and SIGINT at random times: a server ends soon, says so, leaves no process, and keeps what it said it has.

python -m tests.fuzz.server_interrupts --tries 100

A server with the bundled model is started again and again over one store. Streams run, contexts are made, forked and
removed; some signals come while it starts, some come twice. Each time: it ends within two seconds of the time that it
may drain, with the exit status of an end that was asked for, without a trace of an error, and its engine's process
with it. Every context that a client was told of is there and whole, every removed one is gone. At last one more server
answers about the contexts that are left, without reading them. Exit status 1 where one of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from retrieval_attn.store import ContextStore
from tests.fuzz.harness import conclude
from tests.server.process import NEEDLE, WORDS, Served, processes, runs, serving, starting

DRAIN_SECONDS = 1
MOST_SECONDS = 2.0
LOOK_SECONDS = 0.02
"""From the end of the drain to the end of the process; from a signal, where nothing is drained."""
EARLY_SHARE, TWICE_SHARE = 0.15, 0.2
START_SECONDS, LOAD_SECONDS = 8.0, 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
STREAM: dict[str, Any] = {
    "model": "bundled", "messages": [{"role": "user", "content": "Tell a story of the sea."}], "max_tokens": 3000,
    "temperature": 2.0, "stream": True,
}  # fmt: skip


class Told(NamedTuple):
    """What clients know of the store, by the answers that they got. unsure: asked for, and no answer came."""

    kept: dict[str, int]
    removed: set[str]
    unsure: set[str]


def load(
    served: Served, told: Told, number: int, draw: random.Random, ended: threading.Event
) -> list[threading.Thread]:
    """Clients that go on until their server has gone."""

    def stream() -> None:
        with served.client() as http:
            while not ended.is_set():
                with http.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
                    for _ in reply.iter_lines():
                        pass

    def contexts(steps: random.Random) -> None:
        with served.client() as http:
            for place in range(1000):
                if ended.is_set():
                    return
                step(http, told, f"{number}-{place}", steps)

    steps = random.Random(draw.random())
    works: list[Callable[[], None]] = [stream, stream, lambda: contexts(steps)]
    threads = [threading.Thread(target=_until_gone, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    return threads


def step(http: httpx.Client, told: Told, name: str, draw: random.Random) -> None:
    """Make a context, or fork or remove one that is there."""
    known = sorted(set(told.kept) - told.unsure)
    what = draw.choice(["make", "make", "fork", "remove"]) if known else "make"
    changed = draw.choice(known) if what == "remove" else name
    told.unsure.add(changed)
    if what == "make":
        text = NEEDLE + WORDS * draw.randint(5, 60)
        reply = http.post("/v1/contexts", json={"name": name, "text": f"{name}. {text}"})
    elif what == "fork":
        reply = http.post(f"/v1/contexts/{draw.choice(known)}/fork", json={"name": name})
    else:
        reply = http.delete(f"/v1/contexts/{changed}")
    if reply.status_code == 503:  # it drains, and has done nothing
        told.unsure.discard(changed)
        return
    reply.raise_for_status()
    while what == "make" and not http.get(f"/v1/contexts/{name}").raise_for_status().json()["durable"]:
        time.sleep(LOOK_SECONDS)
    if what == "remove":
        told.kept.pop(changed)
        told.removed.add(changed)
    else:
        told.kept[name] = reply.json()["tokens"]
    told.unsure.discard(changed)


def tried(folder: str, told: Told, number: int, draw: random.Random, arguments: list[str]) -> tuple[float, list[str]]:
    """Seconds that the end took beyond the drain, and what was wrong."""
    early = draw.random() < EARLY_SHARE
    ended, threads = threading.Event(), list[threading.Thread]()
    with starting("--store", folder, "--shutdown-timeout", str(DRAIN_SECONDS), "--warm-up", "0", *arguments) as served:
        if early:
            time.sleep(draw.uniform(0, START_SECONDS))
        else:
            served.wait()
            threads = load(served, told, number, draw, ended)
            time.sleep(draw.uniform(0, LOAD_SECONDS))
        listened, which = bool(served.url), draw.choice(SIGNALS)
        children = processes(served.process.pid)[1:] if served.process.poll() is None else []
        began = time.monotonic()
        served.process.send_signal(which)
        twice = draw.random() < TWICE_SHARE
        if twice:
            time.sleep(draw.uniform(0, 0.5))
            served.process.send_signal(which)
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.process.wait(30)
        seconds = time.monotonic() - began - (DRAIN_SECONDS if listened and not twice else 0)
        ended.set()
        for thread in threads:
            thread.join()
        problems = _problems(served, (which, listened), seconds, children)
    return seconds, [f"try {number}, {which.name}, {'early' if early else 'later'}: {one}" for one in problems]


def _problems(served: Served, told: tuple[signal.Signals, bool], seconds: float, children: list[int]) -> list[str]:
    which, listened = told
    status, problems = served.process.poll(), []
    expected = {0} if listened else {0, -which, 128 + which}
    if status not in expected:
        problems.append(f"exit status {status}, not one of {sorted(expected)}")
    if seconds > MOST_SECONDS:
        problems.append(f"the end took {seconds:.1f} s more than the drain")
    deadline = time.monotonic() + MOST_SECONDS
    while alive := [pid for pid in children if runs(pid)]:
        if time.monotonic() > deadline:
            problems.append(f"processes {alive} are left")
            break
        time.sleep(0.02)
    served.finish_log()
    text = "".join(served.other) + "".join(str(line) for line in served.log if line.get("level") == "error")
    interrupted = not listened and text.rstrip().endswith("KeyboardInterrupt")  # while Python itself starts
    if ("Traceback" in text or "Error" in text) and not interrupted:
        problems.append(f"it says {text[:3000]}")
    return problems


def checked(folder: str, told: Told) -> list[str]:
    """What is wrong with the store, beside what clients were told."""
    with contextlib.closing(ContextStore(folder)) as store:
        there = {one.name: one.plain.get("tokens") for one in store.list()}
        for name in told.unsure:  # asked for when the server ended: done or not, but whole
            told.kept.pop(name, None)
            if name in there:
                told.kept[name] = int(str(there[name]))
        told.unsure.clear()
        problems = [f"{name} is lost" for name in told.kept if name not in there]
        problems += [f"{name} was removed and is there" for name in told.removed & set(there)]
        problems += [
            f"{name} has {there[name]} tokens, not {n}" for name, n in told.kept.items() if there.get(name) != n
        ]
        return problems + [f"damaged: {damage}" for damage in store.verify()]


def answered(folder: str, told: Told) -> list[str]:
    """What is wrong with answers about the contexts that are left: one more server, which reads none of them."""
    with serving("--store", folder, "--warm-up", "0") as served, served.client() as http:
        problems = []
        for name, tokens in sorted(told.kept.items())[:20]:
            question = [{"role": "user", "content": "What is the special magic Bergen number?"}]
            body = {"model": f"bundled@{name}", "messages": question, "max_tokens": 12}
            found = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached != tokens or "7391846" not in found["choices"][0]["message"]["content"]:
                problems.append(f"{name}: {cached} of {tokens} tokens were there, {found['choices']}")
        return problems


def _until_gone(work: Callable[[], None]) -> None:
    with contextlib.suppress(httpx.TransportError):
        work()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="here", choices=["here", "process"])
    args = parser.parse_args()
    draw, told, slowest, wrong = random.Random(args.seed), Told({}, set(), set()), 0.0, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.tries):
            seconds, problems = tried(folder, told, number, draw, ["--engine", args.engine])
            problems += checked(folder, told)
            slowest = max(slowest, seconds)
            wrong += problems
            print(f"{number}: {seconds:.2f} s, {len(told.kept)} contexts", *problems, sep="\n  ", flush=True)
        wrong += answered(folder, told)
    print(f"{args.tries} tries, the slowest {slowest:.2f} s, {len(told.removed)} contexts removed")
    return conclude(wrong)


if __name__ == "__main__":
    sys.exit(main())
