"""Random schedules of many requests: every answer must be the one that its request gets alone.

python -m tools.engine_schedules --schedules 500

Of each schedule, arrivals, lengths, shared documents, sampling, cancels, the number of slots, the memory for shared
prefixes and the kind of index are random; a tiny model in float32 with seeded weights. Exit status 1 and the seed for
the first answer that differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

import retrieval_attn as ra
from retrieval_attn.batch.draw import RowDraw
from retrieval_attn.batch.engine import Engine, default_limits
from retrieval_attn.batch.request import Finished, Request

CONFIG = ra.Config(sink=4, window=24, spill=8, retrieve=6, prefill_chunk=64)
STOP = frozenset({3})


@dataclass(frozen=True)
class Schedule:
    """requests, and for each when it comes and when it is cancelled: seconds, None for never."""

    requests: list[Request]
    arrivals: list[float]
    cancels: list[float | None]
    rows: int
    shared_bytes: int
    index: str


def schedule_of(seed: int, count: int, vocabulary: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(seed)

    def ids(tokens: int) -> tuple[int, ...]:
        return tuple(chance.randrange(4, vocabulary) for _ in range(tokens))

    documents = [ids(chance.randrange(70, 500)) for _ in range(3)]
    turns = [ids(chance.randrange(5, 90)) for _ in range(3)]
    requests = []
    for _ in range(count):
        tail = ids(chance.randrange(1, 40))
        shared = (chance.choice(documents), chance.choice(turns))[: chance.choice((0, 0, 1, 1, 2))]
        draw = RowDraw(0.8, top_k=9, top_p=0.95, seed=chance.randrange(99)) if chance.random() < 0.3 else RowDraw()
        priority: Any = chance.choice(("interactive", "interactive", "batch"))
        owner = chance.choice("ab")
        length = chance.randrange(1, 14)
        requests.append(Request((*shared, tail), length, draw, stop_ids=STOP, owner=owner, priority=priority))
    return Schedule(
        requests,
        [chance.random() * 0.02 for _ in requests],
        [chance.random() * 0.05 if chance.random() < 0.25 else None for _ in requests],
        chance.choice((1, 2, 3, 8)),
        chance.choice((0, 40_000, 1 << 26)),
        chance.choice(("auto", "flat", "device")),
    )


def llm_of(model: Any, tokenizer: Any, index: str) -> Any:
    """What an engine needs of an `LLM`."""
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=CONFIG.replace(index=index))


def run(llm: Any, schedule: Schedule) -> list[Finished]:
    """All requests of a schedule by one engine, whose books are checked after each."""
    limits = replace(
        default_limits(llm.model, llm.config), rows=schedule.rows, pages=schedule.rows + 1, inter_token_seconds=0.01
    )
    found: dict[int, Finished] = {}
    errors: list[BaseException] = []
    with Engine(llm, limits=limits, shared_bytes=schedule.shared_bytes) as engine:

        def ask(number: int) -> None:
            try:
                pause = threading.Event()
                pause.wait(schedule.arrivals[number])
                ticket = engine.submit(schedule.requests[number])
                if (seconds := schedule.cancels[number]) is not None:
                    pause.wait(seconds)
                    ticket.cancel()
                found[number] = ticket.result()
                engine.check()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(schedule.requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(schedule.requests))]


def wrong(llm: Any, schedule: Schedule, found: list[Finished]) -> list[int]:
    """Numbers of answers that are not those of the request alone; a cancelled one must be a beginning of it."""
    differ = []
    for number, (request, one) in enumerate(zip(schedule.requests, found, strict=True)):
        with Engine(llm, shared_bytes=0) as engine:
            expected = engine.submit(request).result()
        if one.reason == "cancelled" and schedule.cancels[number] is not None:
            right = one.tokens == expected.tokens[: len(one.tokens)]
        else:
            right = (one.tokens, one.text, one.reason) == (expected.tokens, expected.text, expected.reason)
        if not right or one.error is not None:
            differ.append(number)
    return differ


def main() -> int:
    """Run schedules until one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500, metavar="N")
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="of each schedule")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    args = parser.parse_args()
    from retrieval_attn.eval.bench.session.subject import number_tokenizer
    from tests.tiny_models import tiny_model

    model = tiny_model("llama")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokenizer, answers, cached = number_tokenizer(vocabulary), 0, 0
    for seed in tqdm(range(args.seed, args.seed + args.schedules), unit="schedule"):
        schedule = schedule_of(seed, args.requests, vocabulary)
        llm = llm_of(model, tokenizer, schedule.index)
        found = run(llm, schedule)
        if differ := wrong(llm, schedule, found):
            print(f"schedule {seed}: answers {differ} differ from those alone", file=sys.stderr)
            return 1
        answers += len(found)
        cached += sum(one.cached_tokens > 0 for one in found)
    print(f"{args.schedules:,} schedules, {answers:,} answers, {cached:,} with a shared beginning: all as alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
