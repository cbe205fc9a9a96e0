"""Measures of the saving stage, through the public API: one process saves a context, others open it.

Times are wall clock around calls. A failed measure is a row of its own and ends its process, because later measures
need its result.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

import retrieval_attn as ra
from retrieval_attn.testing import ContextStore
from retrieval_attn_eval.bench.host import host_peak, start_host_peak
from retrieval_attn_eval.bench.session.events import Tell
from retrieval_attn_eval.bench.session.page_cache import context_files, make_cold, read_through
from retrieval_attn_eval.bench.session.row import Row
from retrieval_attn_eval.bench.session.saving import NAME, Job
from retrieval_attn_eval.bench.session.subject import QUESTION, Subject

__all__ = ["QUESTION", "TOKENS", "WAYS", "Opening", "Saving"]

WAYS: dict[Literal["exact", "retrieval"], str] = {"retrieval": "through the index", "exact": "exact"}
TOKENS = 8
"""Of an answer: the first one is timed, all are compared."""


class Stop(Exception):
    """A stage failed; its row says why."""


class _Stages:
    """Rows and the model, as both kinds of process have them."""

    def __init__(self, job: Job, tell: Tell) -> None:
        """tell: called with {"begin": key, "what": words} before and {"row": fields} after each measure."""
        self._job, self._tell = job, tell
        self._store = ContextStore(job.store)
        self._subject: Subject | None = None

    @property
    def _model(self) -> Subject:
        assert self._subject is not None, "the first stage loads it, or there is no second"
        return self._subject

    def run(self) -> None:
        """All stages, to the first one that fails."""
        try:
            self._measure(Row("load", "model ready", "s"), self._load)
            self._tell({"facts": self._model.about()})
            self._stages()
        except Stop:
            return

    def _stages(self) -> None:
        raise NotImplementedError

    def _load(self) -> list[float]:
        started = time.perf_counter()
        self._subject = Subject(self._job.settings)
        return [time.perf_counter() - started]

    def _measure(self, row: Row, make: Callable[[], list[float]], *, first: bool = True) -> Row:
        """`row` with what `make` returns, in order; first: the first of them is the first in this process."""
        self._tell({"begin": row.key, "what": row.what})
        start_host_peak()
        try:
            values = make()
        except Exception as error:  # the report names it; what was measured before stays
            said = str(error).splitlines()
            note = f"{type(error).__name__}: {said[0] if said else ''}"[:300]
            self._add(replace(row, status="failed", note=note))
            raise Stop from error
        return self._add(replace(_filled(row, values, first), host_bytes=host_peak()))

    def _add(self, row: Row) -> Row:
        known = () if self._subject is None else tuple(self._subject.simplifications)
        row = replace(row, simplifications=(*known, *row.simplifications))
        self._tell({"row": row.to_dict()})
        return row


class Saving(_Stages):
    """Reads plainly and while saving, by turns; saves what was read; grows it and saves again; asks."""

    def _stages(self) -> None:
        settings, job = self._job.settings, self._job
        plain: list[float] = []
        ready: list[float] = []
        saved: list[float] = []

        def read() -> list[float]:
            """Every time another text: the store would know the same one."""
            for turn in range(1 + settings.repeats):
                plain.append(self._read()[0])
                if turn:
                    self._drop("while")
                    seconds, context = self._read(save="while", store=job.store, wait=False)
                    ready.append(seconds)
                    saved.append(seconds + self._saved(context))
            return plain

        tokens = f"{settings.length:,} tokens"
        self._measure(Row("read", f"read {tokens}", "s"), read)
        before = statistics.median(plain[1:])
        self._add(_filled(Row("read_saving", f"read {tokens} and save meanwhile: ready to answer", "s"), ready, False))
        over = statistics.median(ready) / before
        self._add(_filled(Row("ratio", "reading while saving over reading", ""), [over], False))
        self._add(_filled(Row("all_saved", f"read {tokens} and save meanwhile: all on disk", "s"), saved, False))
        self._drop("while")
        self._after_reading()

    def _after_reading(self) -> None:
        job = self._job
        found: list[ra.Context] = []

        def save() -> list[float]:
            found.append(self._read()[1])
            return [self._save(found[0])]

        self._measure(Row("save", "save what was read", "s"), save)
        nbytes = self._store.nbytes()
        self._add(_filled(Row("bytes", "on disk", "GiB"), [nbytes / (1 << 30)], False))
        [context] = found
        if job.turns:
            written: list[float] = []

            def grow() -> list[float]:
                seconds = []
                for _ in range(job.turns):
                    context.extend(self._model.ids(job.turn_tokens), progress=False)
                    before = self._store.nbytes()
                    seconds.append(self._save(context))
                    written.append((self._store.nbytes() - before) / (1 << 20))
                return seconds

            what = f"save after {job.turn_tokens:,} more tokens"
            self._measure(Row("turn", what, "s"), grow)
            self._add(_filled(Row("turn_bytes", f"{what}: written", "MiB"), written, True))
        self._ask(context)

    def _ask(self, context: ra.Context) -> None:
        """First tokens of the context that was never closed; all tokens are what an opened one must say."""
        count = 1 + self._job.settings.repeats
        expected: dict[str, list[list[int]]] = {}
        questions = self._model.questions(count, QUESTION)
        for append, way in WAYS.items():
            answers: list[list[int]] = []

            def ask(append: Literal["exact", "retrieval"] = append, answers: list[list[int]] = answers) -> list[float]:
                timed = [_first_token(context, question, append) for question in questions]
                answers += [chosen for _, chosen in timed]
                return [seconds for seconds, _ in timed]

            self._measure(Row(f"first/{append}", f"first token, question of {QUESTION} {way}", "s"), ask)
            expected[append] = answers
        self._tell({"facts": {"questions": list(questions), "expected": expected}})

    def _read(self, **where: Any) -> tuple[float, ra.Context]:
        ids = self._model.ids(self._job.settings.length)
        gc.collect()  # the context before this one: its memory, and its maps of files
        started = time.perf_counter()
        context = self._model.read(ids, **where)
        self._wait()
        return time.perf_counter() - started, context

    def _saved(self, context: ra.Context) -> float:
        """Seconds until what is being saved is on the disk."""
        started = time.perf_counter()
        assert context.kept.saving is not None
        context.kept.saving.wait()
        return time.perf_counter() - started

    def _save(self, context: ra.Context) -> float:
        started = time.perf_counter()
        context.save(NAME, store=self._job.store)
        return time.perf_counter() - started

    def _drop(self, name: str) -> None:
        if any(context.name == name for context in self._store.list()):
            self._store.remove(name)
            self._store.gc()

    def _wait(self) -> None:
        if self._model.model.device.type == "cuda":
            torch.cuda.synchronize(self._model.model.device)


class Opening(_Stages):
    """Opens the saved context and asks; before every time its bytes are in RAM, or on disk alone."""

    def _stages(self) -> None:
        job = self._job
        for append, way in WAYS.items():
            opened: list[float] = []
            firsts: list[float] = []

            def resume(
                append: Literal["exact", "retrieval"] = append,
                opened: list[float] = opened,
                firsts: list[float] = firsts,
            ) -> list[float]:
                assert job.expected is not None, "the saving process told what it must say"
                for question, expected in zip(job.questions, job.expected[append], strict=True):
                    self._prepare()
                    started = time.perf_counter()
                    context = self._model.context().open(NAME, store=job.store, progress=False)
                    opened.append(time.perf_counter() - started)
                    seconds, chosen = _first_token(context, question, append)
                    firsts.append(seconds)
                    if chosen != expected:
                        raise AssertionError(f"the opened context chose {chosen}, the saved one {expected}")
                    del context
                return [one + other for one, other in zip(opened, firsts, strict=True)]

            what = f"open and first token, question of {QUESTION} {way}"
            self._measure(Row(f"resume/{append}", what, "s"), resume)
            self._add(_filled(Row(f"open/{append}", f"{what}: open", "s"), opened, True))
            self._add(_filled(Row(f"opened_first/{append}", f"{what}: first token", "s"), firsts, True))

    def _prepare(self) -> None:
        """The bytes to where they are to be. Raises AssertionError where the system keeps them in memory."""
        gc.collect()  # a context that is still there has its files mapped: they would stay in memory
        files = context_files(self._job.store, NAME)
        if self._job.kind == "warm":
            read_through(files)
            return
        share = make_cold(files)
        assert share is None or share < 0.05, (
            f"{share:.0%} of the bytes stay in memory after posix_fadvise: this disk cannot be made cold so"
        )


def _first_token(context: ra.Context, question: str, append: Literal["exact", "retrieval"]) -> tuple[float, list[int]]:
    """Seconds from the question to the first piece of its answer, and the answer's tokens."""
    pieces: list[float] = []
    started = time.perf_counter()
    answer = context.ask(
        question,
        raw=True,
        question_attention=append,
        max_new_tokens=TOKENS,
        on_text=lambda text: pieces.append(time.perf_counter()),
    )
    return (pieces[0] if pieces else time.perf_counter()) - started, answer.tokens


def _filled(row: Row, values: list[float], first: bool) -> Row:
    later = values[1:] if first else values
    return replace(
        row,
        first=values[0] if first and values else None,
        later=statistics.median(later) if later else None,
        values=tuple(values),
    )
