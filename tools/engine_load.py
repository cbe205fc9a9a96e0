"""Mixed load for as long as you like: an engine must hold as much at the end as at the beginning, and answer alike.

python -m tools.engine_load --minutes 120

Requests come from several clients: documents that are shared, and new ones; saved contexts; turns; rows that are parked
by others; aborts at any time; stop tokens and strings; prompts that are refused; saves under names that come again. A
known question comes again and again, and its answer must stay. Memory of the process, threads, open files and what the
tree holds are looked at every quarter of a minute or so, when the engine has drained. Exit status 1 where one of them
grows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.engine.audit import check_engine
from tests.fuzz.engine_actions import Actions, watched
from tests.fuzz.engine_schedules import Library, llm_of

CLIENTS = 10
LOOKS = 10
"""At least. Of those before the first fifth nothing is compared: memory pools fill, kernels are loaded."""
LOOK_SECONDS = 12.0
"""Between two of them, and what the last requests take."""
SHARED_BYTES = 2_000_000
MAY_START = 3
"""Threads of pools, which start when they first have work. A leak of a thread per request is far beyond."""
MAY_GROW = 32 << 20
"""Bytes of the process: what a heap of small pieces may come to keep. A leak of a cache per request is far beyond."""


class Look(NamedTuple):
    """What was held while nothing was asked."""

    rss: int
    threads: int
    files: int
    objects: int
    shared: int


class Client:
    """Asks until it is told to stop, one or two requests at a time."""

    def __init__(self, engine: Engine, seed: int, vocabulary: int, actions: Actions) -> None:
        self._engine, self._chance, self._actions = engine, random.Random(seed), actions
        self._vocabulary = vocabulary
        same = random.Random(1)  # of all clients
        self._documents = [self._ids(same.randrange(70, 900), same) for _ in range(4)]

    def _ids(self, tokens: int, chance: random.Random | None = None) -> tuple[int, ...]:
        return tuple((chance or self._chance).randrange(4, self._vocabulary) for _ in range(tokens))

    def request(self) -> Request:
        """Another one."""
        chance = self._chance
        kind = chance.randrange(10)
        shared: tuple[tuple[int, ...], ...] = ()
        context = None
        if kind < 4:
            shared = (chance.choice(self._documents),)
        elif kind < 6:
            context = chance.choice(("saved-0", "saved-1", "made-0", "made-1", "nobody"))
        elif kind < 8:
            shared = (self._ids(chance.randrange(70, 900)), self._ids(chance.randrange(5, 60)))
        return Request(
            (*shared, self._ids(chance.choice((1, 20, 100, 300, 4_090)) if kind == 9 else chance.randrange(1, 40))),
            chance.choice((1, 8, 30, 60)),
            SamplingParams(0.9, seed=chance.randrange(99), logprobs=chance.choice((0, 3))),
            stop=(" 7 ",) if chance.random() < 0.3 else (),
            stop_ids=frozenset({3}) if chance.random() < 0.5 else frozenset(),
            namespace=chance.choice((None, "", "a")),
            owner=chance.choice("abc"),
            priority=chance.choice(("interactive", "batch")),
            context=context,
        )

    def ask(self) -> None:
        """One request to its end, or until it is left."""
        request = self.request()
        try:
            ticket = self._engine.submit(request)
        except RetrievalAttentionError as error:
            self._actions.note(f"refused: {type(error).__name__}")
            return
        if self._chance.random() < 0.2:
            time.sleep(self._chance.random() * 0.2)
            ticket.cancel()
        found = ticket.result()
        self._actions.note(f"ended: {found.reason}")
        if found.error is not None:
            raise found.error
        if self._chance.random() < 0.02 and len(request.parts) > 1:
            try:
                self._engine.save(f"made-{self._chance.randrange(2)}", request.parts[0], namespace=request.namespace)
                self._actions.note("save")
            except RetrievalAttentionError as error:
                self._actions.note(f"not saved: {type(error).__name__}")


def looked(engine: Engine) -> Look:
    """What is held now, without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    return Look(resident, threading.active_count(), files, len(gc.get_objects()), engine.stats["shared"].nbytes)


def turn(clients: list[Client], seconds: float) -> list[BaseException]:
    """All clients ask for so long; then nothing is left. What went wrong."""
    errors: list[BaseException] = []
    stop = time.monotonic() + seconds

    def run(client: Client) -> None:
        try:
            while time.monotonic() < stop:
                client.ask()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def grown(looks: list[Look]) -> list[str]:
    """What is more in the last fifth than in the second one, beyond what may be."""
    fifth = len(looks) // 5
    found = []
    for name, room in zip(Look._fields, (MAY_GROW, MAY_START, 0, 3_000, SHARED_BYTES), strict=True):
        values = [getattr(look, name) for look in looks]
        before, after = max(values[fifth : 2 * fifth]), min(values[-fifth:])
        if after > before + room:
            found.append(f"{name}: at most {before:,} in the second fifth, at least {after:,} in the last")
    return found


def main() -> int:
    """Load, then 0 if nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", default="device", help="kind of index (default: %(default)s)")
    args = parser.parse_args()
    from retrieval_attn_eval.bench.session.subject import number_tokenizer
    from tests.tiny_models import tiny_model

    model = tiny_model("llama")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    llm: Any = llm_of(model, number_tokenizer(vocabulary), args.index)
    seconds = min(LOOK_SECONDS, args.minutes * 60 / LOOKS)
    began = time.monotonic()
    limits = replace(default_limits(model, llm.config), rows=2, inter_token_seconds=0.01, waiting=64)
    known, looks, answers = Request((tuple(range(4, 90)) * 3, (5, 6, 7)), 20), list[Look](), set[tuple[int, ...]]()
    with tempfile.TemporaryDirectory() as folder, watched() as actions:
        store = Library(Path(folder), vocabulary).store(llm)
        with Engine(llm, limits=limits, prefix_cache_bytes=SHARED_BYTES, store=store) as engine:
            clients = [Client(engine, args.seed + number, vocabulary, actions) for number in range(CLIENTS)]
            while len(looks) < LOOKS or time.monotonic() < began + args.minutes * 60:
                if errors := turn(clients, seconds):
                    print(f"{type(errors[0]).__name__}: {errors[0]}", file=sys.stderr)
                    return 1
                answers.add(engine.submit(known).result().tokens)
                check_engine(engine)
                store.gc()
                looks.append(looked(engine))
                if len(looks) % LOOKS == 1:
                    print(looks[-1], flush=True)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {len(looks)} looks: {actions}")
    print(f"first {looks[len(looks) // 5]}\nlast  {looks[-1]}")
    problems = grown(looks) + ([] if len(answers) == 1 else [f"the known question has {len(answers)} answers"])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
