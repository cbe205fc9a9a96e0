"""What a session does, in order: read, ask, switch, fork, extend, ask four at once. Public API only.

A stage that fails is its own row, by name; the next one runs, unless it needs what failed. Times are wall clock, from
the call to what a user sees: an answer's text, or its first piece.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import retrieval_attn as ra
from retrieval_attn_eval.bench.host import host_peak, start_host_peak
from retrieval_attn_eval.bench.session.card import INTERVAL_MS, CardMemory
from retrieval_attn_eval.bench.session.row import Row
from retrieval_attn_eval.bench.session.subject import QUESTION, Settings, Subject

__all__ = ["STAGES", "Session"]

Append = Literal["exact", "retrieval"]
DECODE_TOKENS = 8
"""Questions of at most so many tokens retrieve, whatever `question_attention` says."""
WAYS: dict[Append, str] = {"exact": "exact", "retrieval": "through the index"}
SWITCH_TOKENS = 8
AT_ONCE = 4
STAGES = ("load", "read", "answer", "questions", "switch", "fork", "extend", "many", "memory")
"""Stages in order. `load` and `read` always run."""
GIB = 1 << 30
SECOND = "the second context was not read"


class NotRun(Exception):
    """What a stage needs is not there; the message says what."""


class WrongAnswer(Exception):
    """What answers wrongly has no speed."""


@dataclass
class Timed:
    """Times of one answer.

    Attributes:
        whole: Seconds from the call to the end of the answer.
        first: Seconds from the call to the first piece of text.
        tokens: Number of generated tokens.
        chosen: Ids of the generated tokens.
        search_seconds: Host search time, summed over layers and steps.
        attend_seconds: Host attention time, summed over layers and steps.
    """

    whole: float
    first: float
    tokens: int
    chosen: list[int]
    search_seconds: float = 0.0
    attend_seconds: float = 0.0

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token after the first; None for a single one."""
        return 1000 * (self.whole - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def search_ms(self) -> float | None:
        """Milliseconds of host search per token; None without a host search."""
        return 1000 * self.search_seconds / self.tokens if self.search_seconds else None

    @property
    def attend_ms(self) -> float | None:
        """Milliseconds of host attention per token; None without host attention."""
        return 1000 * self.attend_seconds / self.tokens if self.attend_seconds else None


class Session:
    """Runs the stages and hands every row to `tell` as soon as it is known."""

    def __init__(self, settings: Settings, card: CardMemory | None, tell: Callable[[dict[str, Any]], None]) -> None:
        """tell: called with {"begin": key, "what": words} before and {"row": fields} after each measure."""
        self._settings, self._card, self._tell = settings, card, tell
        self._subject: Subject | None = None
        self._contexts: list[ra.Context] = []
        self._rows: list[Row] = []

    @property
    def subject(self) -> Subject:
        """The model. Raises NotRun where it could not be loaded."""
        if self._subject is None:
            raise NotRun("the model was not loaded")
        return self._subject

    def context(self, number: int = 0) -> ra.Context:
        """A context that was read. Raises NotRun where it was not."""
        if number >= len(self._contexts):
            raise NotRun("the context was not read" if not self._contexts else self._settings.no_second or SECOND)
        return self._contexts[number]

    def run(self) -> None:
        """All stages that the settings do not skip."""
        for stage, make in (
            ("load", self._load),
            ("read", self._read),
            ("answer", self._answers),
            ("questions", self._questions),
            ("read", self._read_second),
            ("switch", self._switch),
            ("fork", self._fork),
            ("extend", self._extend),
            ("many", self._many),
            ("memory", self._memory),
        ):
            if stage not in self._settings.skip:
                make()

    # -- stages ----------------------------------------------------------------------------------------

    def _load(self) -> None:
        def load() -> list[float]:
            started = time.perf_counter()
            self._subject = Subject(self._settings)
            return [time.perf_counter() - started]

        self._measure(Row("load", "model ready", "s"), load)
        if self._subject is not None:
            self._tell({"facts": self._subject.about()})

    def _read(self) -> None:
        self._measure(Row("read", f"read {self._settings.length:,} tokens", "s"), self._reading)

    def _read_second(self) -> None:
        """Only to switch between two contexts, and where there is one already."""
        if "switch" in self._settings.skip or not self._contexts:
            return

        def read_again() -> list[float]:
            if self._settings.no_second:
                raise NotRun(self._settings.no_second)
            return self._reading()

        key, what = "read_second", f"read another {self._settings.length:,} tokens"
        self._measure(Row(key, what, "s"), read_again, first=False)

    def _reading(self) -> list[float]:
        subject = self.subject
        ids = subject.ids(self._settings.length)
        started = time.perf_counter()
        self._contexts.append(subject.read(ids))
        return [time.perf_counter() - started]

    def _answers(self) -> None:
        """The first answer of all comes before any other question; then as many, exactly and through the index."""
        tokens = self._settings.tokens
        for append, way in WAYS.items():
            timed: list[Timed] = []

            def answer(append: Append = append, timed: list[Timed] = timed) -> list[float]:
                context = self.context()
                for question in self.subject.questions(1 + self._settings.repeats, QUESTION):
                    timed.append(_ask(context, question, append, tokens))
                return [one.whole for one in timed]

            what = f"answer of {tokens} tokens, question of {QUESTION} {way}"
            self._measure(Row(f"answer/{append}", what, "s"), answer)
            for name, words, unit in (
                ("first", "its first token", "s"),
                ("ms_per_token", "per token after it", "ms"),
                ("search_ms", "host search per token", "ms"),
                ("attend_ms", "host attention per token", "ms"),
            ):
                found = [value for one in timed if (value := getattr(one, name)) is not None]
                self._derive(f"answer/{append}/{name}", f"{what}: {words}", unit, found)

    def _questions(self) -> None:
        for append, way in WAYS.items():
            for length in self._settings.questions:

                def ask(append: Append = append, length: int = length) -> list[float]:
                    context = self.context()
                    return [
                        _ask(context, question, append, 1).whole
                        for question in self.subject.questions(1 + self._settings.repeats, length)
                    ]

                held: tuple[str, ...] = ()
                what = f"first token, question of {length:,} {way}"
                if append == "exact" and length <= DECODE_TOKENS:
                    held = (f"questions of up to {DECODE_TOKENS} tokens always go through the index",)
                self._measure(Row(f"first_token/{append}/{length}", what, "s", simplifications=held), ask)

    def _switch(self) -> None:
        """A, B, A: the first answer of each after the other's. A says the same to the same question both times."""
        for append, way in WAYS.items():

            def switch(append: Append = append) -> list[float]:
                here, there = self.context(0), self.context(1)
                question, other = self.subject.questions(2, QUESTION)
                before, there_first, after = (
                    _ask(context, text, append, SWITCH_TOKENS)
                    for context, text in ((here, question), (there, other), (here, question))
                )
                if before.chosen != after.chosen:
                    raise WrongAnswer(f"a question chose {before.chosen}, and {after.chosen} after the switch")
                return [there_first.first, after.first]

            what = f"first token after the other context's answer, {way} (there, back)"
            self._measure(Row(f"switch/{append}", what, "s"), switch)

    def _fork(self) -> None:
        def fork() -> list[float]:
            context, found = self.context(), []
            for _ in range(1 + self._settings.repeats):
                started = time.perf_counter()
                context.fork()
                found.append(1000 * (time.perf_counter() - started))
            return found

        self._measure(Row("fork", "fork", "ms"), fork)

    def _extend(self) -> None:
        for tokens in self._settings.extensions:
            times: list[float] = []

            def extend(tokens: int = tokens, times: list[float] = times) -> list[float]:
                found = []
                for _ in range(1 + self._settings.repeats):
                    fork, ids = self.context().fork(), self.subject.ids(tokens)
                    started = time.perf_counter()
                    fork.extend(ids, progress=False)
                    found.append(time.perf_counter() - started)
                    times.append(_ask(fork, self.subject.question(QUESTION), "retrieval", 1).whole)
                return found

            self._measure(Row(f"extend/{tokens}", f"extend a fork by {tokens:,} tokens", "s"), extend)
            words = f"first token after {tokens:,} appended tokens, question of {QUESTION} through the index"
            self._derive(f"extend/{tokens}/first", words, "s", times)

    def _many(self) -> None:
        for append, way in WAYS.items():

            def first(append: Append = append) -> list[float]:
                return [_ask_many(self.context(), self.subject.questions(AT_ONCE, QUESTION), append, 1)[0]
                        for _ in range(1 + self._settings.repeats)]  # fmt: skip

            what = f"{AT_ONCE} questions of {QUESTION} at once, first tokens, {way}"
            self._measure(Row(f"many/{append}/first", what, "s"), first)

        def step() -> list[float]:
            questions = self.subject.questions(AT_ONCE, QUESTION)
            tokens = max(2, self._settings.tokens)
            return [_ask_many(self.context(), questions, "retrieval", tokens)[1]
                    for _ in range(1 + self._settings.repeats)]  # fmt: skip

        self._measure(Row("many/ms_per_step", f"{AT_ONCE} questions at once, per step", "ms"), step)

    def _memory(self) -> None:
        """Highest uses over the stages before."""
        card = "highest use of the card"
        if self._card is None:
            note = "no card, or no nvidia-smi"
            self._add(Row("memory/card/all", card, "GiB", status="not measured", note=note))
        for name, begins in (
            ("reading", ("read",)),
            ("asking", ("answer", "first_token", "switch", "many")),
            ("all", ()),
        ):
            seen = [row for row in self._rows if not begins or row.key.startswith(begins)]
            words = f"while {name}" if begins else "in all"
            device = [row.device_bytes for row in seen if row.device_bytes is not None]
            if device:
                held = (f"the card is sampled every {INTERVAL_MS} ms",)
                what = f"{card} {words}"
                self._add(Row(f"memory/card/{name}", what, "GiB", max(device) / GIB, simplifications=held))
            host = [row.host_bytes for row in seen if row.host_bytes is not None]
            if host:
                what = f"highest resident memory of the process {words}"
                self._add(Row(f"memory/host/{name}", what, "GiB", max(host) / GIB))

    # -- rows ------------------------------------------------------------------------------------------

    def _measure(self, row: Row, make: Callable[[], list[float]], *, first: bool = True) -> None:
        """`row` with what `make` returns, values in its unit in order; first: the first of them is the first ever."""
        self._tell({"begin": row.key, "what": row.what})
        start_host_peak()
        if self._card is not None:
            self._card.start()
        try:
            row = _filled(row, make(), first)
        except NotRun as reason:
            row = replace(row, status="not run", note=str(reason))
        except Exception as error:  # one failing row must not cost the others
            said = str(error).splitlines()
            row = replace(row, status="failed", note=f"{type(error).__name__}: {said[0] if said else ''}"[:300])
        device = None if self._card is None else self._card.peak()
        self._add(replace(row, device_bytes=device, host_bytes=host_peak()))

    def _derive(self, key: str, what: str, unit: str, values: list[float]) -> None:
        """A row of what the stage before found beside its own; none where that found nothing."""
        if values:
            self._add(_filled(Row(key, what, unit), values, True))

    def _add(self, row: Row) -> None:
        known = () if self._subject is None else tuple(self._subject.simplifications)
        row = replace(row, simplifications=(*known, *row.simplifications))
        self._rows.append(row)
        self._tell({"row": row.to_dict()})


def _filled(row: Row, values: list[float], first: bool) -> Row:
    later = values[1:] if first else values
    return replace(
        row, first=values[0] if first else None, later=statistics.median(later) if later else None, values=tuple(values)
    )


def _ask(context: ra.Context, question: str, append: Append, tokens: int) -> Timed:
    """One answer of `tokens` tokens. A text that begins with no visible piece counts from the next one."""
    pieces: list[float] = []
    started = time.perf_counter()
    answer = context.ask(
        question,
        raw=True,
        question_attention=append,
        max_new_tokens=tokens,
        on_text=lambda text: pieces.append(time.perf_counter()),
    )
    whole = time.perf_counter() - started
    stats = answer.stats
    first = pieces[0] - started if pieces else whole
    return Timed(whole, first, stats.new_tokens, answer.tokens, stats.search_seconds, stats.attend_seconds)


def _ask_many(context: ra.Context, questions: Any, append: Append, tokens: int) -> tuple[float, float]:
    """Seconds of the whole, and milliseconds per step after the first tokens (0.0 for one token)."""
    started = time.perf_counter()
    answers = context.ask_many(questions, raw=True, question_attention=append, max_new_tokens=tokens)
    return time.perf_counter() - started, 1000 * answers[0].stats.seconds_per_token
