"""Random schedules of many requests: every answer must be the one that its request gets alone.

python -m tests.fuzz.engine_schedules --schedules 500

Of each schedule, arrivals, lengths, documents that begin alike, saved contexts, saves, sampling, cancels, slots,
prompts read ahead, the memory for requests and for shared prefixes, which of these are attended to exactly, where no
context is named, the kind of index and whether prompts leave each other at any token are random; a tiny model in
float32 with seeded weights. Idle texts move from the device to the host and to the disk at random times; when all are
there, the requests come once more. What is alone reads everything itself: nothing shared, no store. Prints how often
rows were parked, windows spilled, spans split, nodes evicted, texts moved to the disk and back, contexts opened and
saved, and requests cancelled in each state. Exit status 1 and the seed for the first answer that differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

import retrieval_attn as ra
from retrieval_attn.engine import background_saves, prefix_handle, resident_set, stepper
from retrieval_attn.engine import engine as engine_module
from retrieval_attn.engine.background_saves import DiskTier
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import InputDataError
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.store import ContextStore
from tests.engine.audit import check_engine
from tests.fuzz.engine_actions import Actions, watched
from tests.small_windows import spill_early

CONFIG = ra.Config(sink=4, window=24, retrieve=6, prefill_chunk=64)
WIDE_TOKENS = 16
"""Tokens of a chunk of every second schedule's prefills, of which four are one forward."""
STOP = frozenset({3})
SAVED_TOKENS = (150, 600)
"""Of the saved contexts that requests name."""
MOST_TOKENS = 800
"""Of a request, its saved context and its answer: what memory must have room for, or it is refused."""


MOVE_SECONDS = 0.05
"""Maximum between two moves of idle texts from the device and to the disk."""
DISK_SECONDS = 5.0
"""Maximum time until all idle texts are on the disk and requests are asked again."""


class Coming(NamedTuple):
    """A request and when it comes; when it is cancelled, None: never; whether its document is saved and asked again."""

    request: Request
    seconds: float
    cancel: float | None = None
    save: bool = False


@dataclass(frozen=True)
class Schedule:
    """What comes, and what the engine has for it. host_tokens: that its memory has room for; None: as much as it is.

    paged_prefix_pages: with paged_prefix_tokens, all that there are: some requests must wait for others'.
    crops: prompts are single parts that leave each other at any token, and all keys are attended to: a cropped index
    may retrieve others than a fresh one.
    """

    seed: int
    coming: list[Coming]
    rows: int
    ahead: int
    host_tokens: int | None
    prefix_cache_bytes: int
    index: str
    paged_prefix_tokens: int
    paged_prefix_pages: int
    crops: bool = False

    @property
    def requests(self) -> list[Request]:
        """All that come."""
        return [one.request for one in self.coming]


class Answered(NamedTuple):
    """What came of a request. alone: the request that must have the same answer, or one that begins so if cancelled."""

    alone: Request
    found: Finished
    cancelled: bool


def _ids(chance: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(chance.randrange(4, vocabulary) for _ in range(tokens))


def schedule_of(seed: int, count: int, vocabulary: int, contexts: bool = False) -> Schedule:
    """The schedule of a seed. contexts: requests name saved ones, too."""
    chance = random.Random(seed)
    documents = [_ids(chance, chance.randrange(70, 500), vocabulary) for _ in range(2)]
    crops = random.Random(-1 - seed).random() < 0.4
    same = chance.randrange(64, len(documents[0]) + 1)
    if not crops:
        same %= prefix_handle.CROP_TOKENS  # fewer than an entry is cropped for
    documents.append(documents[0][:same] + _ids(chance, chance.randrange(5, 90), vocabulary))
    turns = [_ids(chance, chance.randrange(5, 90), vocabulary) for _ in range(3)]
    coming = []
    for _ in range(count):
        tail = _ids(chance, chance.randrange(1, 40), vocabulary)
        context = f"saved-{chance.randrange(len(SAVED_TOKENS))}" if contexts and chance.random() < 0.3 else None
        documented = () if context is not None else (chance.choice(documents),)
        shared = (*documented, chance.choice(turns))[: chance.choice((0, 1, 1, 2, 2))]
        draw = (
            SamplingParams(0.8, top_k=9, top_p=0.95, seed=chance.randrange(99))
            if chance.random() < 0.3
            else SamplingParams()
        )
        request = Request(
            (*shared, tail),
            chance.choice((1, chance.randrange(1, 14), chance.randrange(10, 40))),
            draw,
            stop_ids=STOP if chance.random() < 0.5 else frozenset(),
            namespace=chance.choice((None, "", "", "x")),
            owner=chance.choice("ab"),
            priority=chance.choice(("interactive", "interactive", "batch")),
            context=context,
        )
        cancel = chance.random() * chance.choice((0.01, 0.1, 0.4)) if chance.random() < 0.25 else None
        save = contexts and len(shared) > 0 and context is None and chance.random() < 0.3
        coming.append(Coming(request, chance.random() * chance.choice((0.02, 0.2)), cancel, save))
    rows = chance.choice((1, 2, 3, 8))
    if crops:
        coming = [one._replace(request=_cropped(one.request, chance), save=False) for one in coming]
    return Schedule(
        seed,
        coming,
        rows,
        chance.choice((0, 1, 2)),
        chance.choice((None, None, MOST_TOKENS, 2 * MOST_TOKENS)),
        chance.choice((0, 40_000, 300_000, 1 << 26)),
        chance.choice(("auto", "flat", "device")),
        0 if contexts else chance.choice((0, 250, 700)),  # what was saved lies elsewhere than what was read
        chance.choice((12, 25)),
        crops,
    )


def _cropped(request: Request, chance: random.Random) -> Request:
    """The request as one part, whose first part ends at a random token."""
    first, *others = request.parts
    kept = first[: chance.randrange(1, len(first) + 1)] if others else first
    return replace(request, parts=((*kept, *(token for part in others for token in part)),))


def llm_of(model: Any, tokenizer: Any, index: str, crops: bool = False) -> Any:
    """Return the parts of an `LLM` that an engine needs; windows evict early in this process from here on."""
    spill_early()
    all_keys: dict[str, Any] = {"retrieve": "all", "tail": False} if crops else {}
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=CONFIG.replace(index=index, **all_keys))


class Library:
    """Saved contexts for schedules, the same texts for each kind of index, in folders of their own."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        chance = random.Random(99)
        self.texts = {f"saved-{number}": _ids(chance, n, vocabulary) for number, n in enumerate(SAVED_TOKENS)}
        self._folder = folder

    def store(self, llm: Any) -> ContextStore:
        """With all texts, as this model reads them."""
        folder = self._folder / f"{llm.config.index}-{llm.config.retrieve}"
        store = ContextStore(folder)
        if not folder.exists():
            for name, text in self.texts.items():
                context = ra.Context(llm.model, llm.tokenizer, llm.config)
                context.read(text, progress=False, save=name, store=store)
        return store

    def alone(self, request: Request) -> Request:
        """The request with its context as a part that is read."""
        if request.context is None:
            return request
        return replace(request, parts=(self.texts[request.context], *request.parts), context=None)


def run(
    llm: Any, schedule: Schedule, library: Library | None = None, actions: Actions | None = None,
    chunk_tokens: int | None = None,
) -> list[Answered]:  # fmt: skip
    """All requests of a schedule by one engine, whose books are checked after each. With a store, all are asked again
    when their texts are on the disk. chunk_tokens: of a chunk of a prefill; None: the usual ones.
    """
    limits = replace(
        default_limits(llm.model, llm.config), rows=schedule.rows, ahead=schedule.ahead, inter_token_seconds=0.01
    )
    if schedule.host_tokens is not None:
        limits = replace(limits, host_bytes=schedule.host_tokens * limits.token_bytes)
    if chunk_tokens is not None:
        limits = replace(limits, chunk_tokens=chunk_tokens)
    store = None if library is None else library.store(llm)
    found: dict[int, list[Answered]] = {}
    errors: list[BaseException] = []
    exact: dict[str, Any] = {
        "paged_prefix_tokens": schedule.paged_prefix_tokens,
        "paged_prefix_pages": schedule.paged_prefix_pages,
    }
    with Engine(llm, limits=limits, prefix_cache_bytes=schedule.prefix_cache_bytes, store=store, **exact) as engine:

        def ask(number: int) -> None:
            try:
                request, seconds, cancel, save = schedule.coming[number]
                pause = threading.Event()
                pause.wait(seconds)
                ticket = engine.submit(request)
                if cancel is not None:
                    pause.wait(cancel)
                    ticket.cancel()
                alone = request if library is None else library.alone(request)
                found[number] = [Answered(alone, ticket.result(), cancel is not None)]
                check_engine(engine)
                if save:
                    found[number] += asked_again(engine, f"made-{schedule.seed}-{number}", request, actions)
                    check_engine(engine)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(schedule.coming))]
        for thread in threads:
            thread.start()
        chance = random.Random(schedule.seed)

        def move(tree: RadixCache | None, disk: DiskTier | None) -> None:
            time.sleep(chance.random() * MOVE_SECONDS)
            if tree is not None:
                tree.offload(chance.choice((1, 1 << 40)))
            if disk is not None and chance.random() < 0.7:
                disk.evict(Sizes(chance.choice((1, 1 << 40))), Sizes(1 << 60), engine._prefills.waited_for, 0)

        while any(thread.is_alive() for thread in threads):
            move(engine._tree, engine._disk)
        for thread in threads:
            thread.join()
        if engine._disk is not None and not errors:
            end = time.monotonic() + DISK_SECONDS
            while engine._tree is not None and engine._tree.idle.host and time.monotonic() < end:
                move(engine._tree, engine._disk)
            tickets = [engine.submit(request) for request in schedule.requests]
            for number, ticket in enumerate(tickets):
                found[number].append(Answered(found[number][0].alone, ticket.result(), False))
            check_engine(engine)
    if errors:
        raise errors[0]
    return [one for number in range(len(schedule.coming)) for one in found[number]]


def asked_again(engine: Engine, name: str, request: Request, actions: Actions | None) -> list[Answered]:
    """Save the document of a request, if the engine still has it, and ask about what was saved."""
    try:
        engine.save(name, request.parts[0], namespace=request.namespace)
    except InputDataError:
        return []
    if actions is not None:
        actions.note("save")
    again = engine.submit(replace(request, parts=request.parts[1:], context=name))
    return [Answered(request, again.result(), False)]


def answer_alone(llm: Any, request: Request, paged_prefix_tokens: int = 0) -> Finished:
    """Answer a request by an engine of its own, without a store."""
    with Engine(llm, prefix_cache_bytes=0, paged_prefix_tokens=paged_prefix_tokens) as engine:
        return engine.submit(request).result()


@contextmanager
def drafting(llm: Any, schedule: Schedule, library: Library) -> Iterator[Any]:
    """Return parts of an engine whose rows draft at every token: answers of the schedule, one token in four wrong."""
    import pytest

    from tests.engine.test_captured_drafts import many_drafts
    from tests.runner.test_drafts import Script

    known, chance = dict[tuple[int, ...], list[int]](), random.Random(schedule.seed)
    for one in map(library.alone, schedule.requests):
        known[tuple(chain.from_iterable(one.parts))] = list(answer_alone(llm, one).tokens)

    def made_of(prompt: Any) -> Script:
        return Script(known.get(tuple(prompt.tolist()), []), chance)

    with pytest.MonkeyPatch.context() as patch, many_drafts(patch):
        patch.setattr(stepper, "LookupDrafter", made_of)
        yield SimpleNamespace(**{**vars(llm), "config": llm.config.replace(drafts=True)})


def wrong(llm: Any, answers: list[Answered], paged_prefix_tokens: int = 0) -> list[int]:
    """Numbers of answers that are not those of the request alone; a cancelled one must be a beginning of it.

    paged_prefix_tokens: of the engine that answered.
    """
    differ = []
    for number, (request, one, cancelled) in enumerate(answers):
        expected = answer_alone(llm, request, paged_prefix_tokens)
        if one.reason == "cancelled" and cancelled:
            right = one.tokens == expected.tokens[: len(one.tokens)]
        else:
            right = (one.tokens, one.text, one.reason) == (expected.tokens, expected.text, expected.reason)
        if not right or one.error is not None:
            differ.append(number)
    return differ


def _counted_on_device(tensor: Tensor) -> bool:
    """Count what a GPU would hold as there."""
    return True


def main() -> int:
    """Run schedules until one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500, metavar="N")
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="of each schedule")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--graphs", action="store_true", help="steps are emulated graphs; what is alone steps eagerly")
    parser.add_argument("--drafts", action="store_true", help="rows draft at every token; what is alone has no drafts")
    args = parser.parse_args()
    from retrieval_attn_eval.bench.session.subject import number_tokenizer
    from tests.emulation.emulated import emulated
    from tests.tiny_models import tiny_model

    model = tiny_model("llama")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokenizer, answers, cached = number_tokenizer(vocabulary), 0, 0
    prefix_handle.LAST_TOKENS, resident_set.LEAST_OFFLOADED = 64, 1
    prefix_handle.on_device = _counted_on_device
    engine_module.read_config = lambda model, config, chunk_tokens: config  # forwards of several chunks, as on a GPU
    background_saves.OPEN_SECONDS = -1e9  # texts are so short that none would be saved
    with tempfile.TemporaryDirectory() as folder, watched() as actions:
        library = Library(Path(folder), vocabulary)
        for seed in tqdm(range(args.seed, args.seed + args.schedules), unit="schedule", mininterval=10):
            schedule = schedule_of(seed, args.requests, vocabulary, contexts=seed % 3 > 0)
            llm = llm_of(model, tokenizer, schedule.index, schedule.crops)
            with (
                emulated() if args.graphs else nullcontext(),
                drafting(llm, schedule, library) if args.drafts else nullcontext(llm) as rows,
            ):
                found = run(rows, schedule, library, actions, WIDE_TOKENS if seed % 2 else None)
            if differ := wrong(llm, found, schedule.paged_prefix_tokens):
                print(f"schedule {seed}: answers {differ} differ from those alone", file=sys.stderr)
                return 1
            answers += len(found)
            cached += sum(one.found.cached_tokens > 0 for one in found)
    print(f"{args.schedules:,} schedules, {answers:,} answers, {cached:,} with a shared beginning: all as alone")
    print(actions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
