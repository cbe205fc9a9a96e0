"""Engine: many requests at once over one model; each joins the running batch at a step, and leaves when it is done.

One thread plans and steps (Orca's iteration-level scheduling); long prompts are read between steps, cell by cell; what
requests begin with is read once, and kept in a tree for those that come later (RadixAttention). Steps are eager here.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol, Self

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.chooser import Chooser
from retrieval_attn.batch.job import Job, State
from retrieval_attn.batch.limits import Limits
from retrieval_attn.batch.request import Reason, Request
from retrieval_attn.batch.row import Row, stacked
from retrieval_attn.batch.rows import step
from retrieval_attn.batch.scheduler import Results, Scheduler, StepPlan
from retrieval_attn.batch.ticket import Ticket
from retrieval_attn.batch.tree import Tree, TreeStats
from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.cpu.windows import compile_windows
from retrieval_attn.errors import EngineFullError, NotFiniteError, RowsFailedError
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.offload.transfer import host_format
from retrieval_attn.template import PromptTemplate, Question

__all__ = ["Engine", "default_limits"]

log = logging.getLogger(__name__)

ROWS = 16
"""Rows of a step, unless limits say otherwise."""
HOST_SHARE = 0.5
"""Of the memory that is free at the start, what requests may have; a quarter of that again is for shared prefixes."""
INTER_TOKEN_SECONDS = 0.1
CLAIM_SECONDS = 0.002
"""Between two looks, where all that is left to do is read by requests that wait for another."""


class Loaded(Protocol):
    """What an engine needs of an `LLM`."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def config(self) -> Config: ...


def default_limits(model: PreTrainedModel, config: Config) -> Limits:
    """For a machine that does nothing else."""
    shape = model_shape(model)
    layers = max(1, shape.full_layers)
    return Limits(
        rows=ROWS,
        pages=ROWS + 2,
        row_pages=1,
        host_bytes=int(available_host_bytes() * HOST_SHARE),
        token_bytes=max(1, layers * shape.kv_layer_bytes),
        row_seconds=0.0,
        step_seconds=1.0,
        inter_token_seconds=INTER_TOKEN_SECONDS,
        chunk_tokens=config.prefill_chunk,
        layers=shape.layers,
    )


class Engine:
    """See the module. Use it in a `with` block, or call `close`.

    An answer is the one that its request gets alone: load decides when something is computed, and not what.
    """

    def __init__(self, llm: Loaded, *, limits: Limits | None = None, shared_bytes: int | None = None) -> None:
        """llm: an `LLM`. shared_bytes: for prefixes that nobody uses now; 0: nothing is shared; None: an eighth of the
        memory that is free. Raises ConfigError.
        """
        self._config = llm.config
        self._loop = AnswerLoop(unwrapped(llm.model), llm.tokenizer)
        self._template = PromptTemplate.of(llm.tokenizer)
        self._empty = RetrievalCache(self._loop.model, self._config)
        self._limits = default_limits(self._loop.model, self._config) if limits is None else limits
        self._scheduler = Scheduler(self._limits)
        if shared_bytes is None:
            shared_bytes = self._limits.host_bytes // 4
        self._tree = Tree() if shared_bytes else None
        self._shared_bytes = shared_bytes
        self._chooser = Chooser(self._limits.rows, self._loop.model.device)
        self._rows: dict[str, Row] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._died: BaseException | None = None
        self._steps = self._filled = 0
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-engine", daemon=True)
        self._thread.start()
        self._at_exit = functools.partial(self.close, drain=False)  # Python must not end inside a compiled function
        atexit.register(self._at_exit)

    def submit(self, request: Request) -> Ticket:
        """Take a request in. Any thread. Raises ContextLengthError or AdmissionError for one that never fits,
        EngineFullError if too many wait or the engine is closed.
        """
        self._empty.require_room(request.prompt_tokens + request.max_tokens)
        with self._changed:
            if self._closing or self._died is not None:
                raise EngineFullError("The engine is closed; make another.") from self._died
            number = str(next(self._numbers))
            ticket = Ticket(number, lambda: self._abort(number))
            # one more than there are: a job's last one is not read but fed to a step, and here all of a prompt is read
            job = Job(number, request.prompt_tokens + 1, request.max_tokens, 0, request.owner, request.priority)
            row = Row(request, ticket, self._loop)
            self._scheduler.submit(job, time.monotonic())
            self._rows[number] = row
            self._changed.notify_all()
            return ticket

    def ask(self, text: str | Sequence[int], question: Question, *, raw: bool = False, **options: Any) -> Ticket:
        """Submit a question about a text, put as `Context.ask` puts it; equal texts are read once.

        options: of `Request`. Raises as `submit`, and InputDataError for a question that is empty.
        """
        template = self._template
        document = template.context_ids(text) if isinstance(text, str) else text
        return self.submit(Request((tuple(document), tuple(template.question_ids(question, raw))), **options))

    @property
    def stats(self) -> dict[str, Any]:
        """waiting, rows: now; filled: share of slots that were filled in steps so far; shared: counts of the tree."""
        with self._changed:
            filled = self._filled / max(1, self._steps * self._limits.decoding_rows)
            now = {"waiting": self._scheduler.waiting, "rows": self._scheduler.filled, "filled": filled}
            return {**now, "steps": self._steps, "shared": TreeStats() if self._tree is None else self._tree.stats}

    def check(self) -> None:
        """Raise AssertionError unless pages, bytes, slots and references add up."""
        with self._changed:
            self._scheduler.check()
            if self._tree is not None:
                self._tree.check()

    def close(self, *, drain: bool = True) -> None:
        """End: once all are answered, or at once, and those that are there end as "cancelled"."""
        with self._changed:
            self._closing = True
            self._scheduler.drain()
            if not drain:
                for number in self._rows:
                    self._scheduler.abort(number)
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def _abort(self, number: str) -> None:
        with self._changed:
            self._scheduler.abort(number)
            self._changed.notify_all()

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        results, model = Results(), self._loop.model
        try:
            compile_windows(host_format(self._config.host_dtype, model.dtype))  # the first step would wait for it
            while True:
                with self._changed:
                    while self._scheduler.idle and not self._closing:
                        self._changed.wait()
                    if self._scheduler.idle:
                        return
                    plan = self._scheduler.tick(results, time.monotonic())
                results = self._do(plan)
        except BaseException as error:  # nobody is left waiting for a thread that is gone
            log.exception("the engine ends")
            with self._changed:
                self._died = error
                for row in self._rows.values():
                    row.finish("error", error)
                    row.leave()
                self._rows.clear()

    def _do(self, plan: StepPlan) -> Results:
        failed: list[str] = []
        for number in plan.leave:
            row = self._rows.pop(number)
            reason: Reason = "length" if len(row.tokens) >= row.request.max_tokens else "cancelled"
            row.finish(reason)
            row.leave()
        ended, tokens, seconds = self._decode(plan.decode, failed)
        read, done, cell_seconds = self._read(plan, failed)
        self._give_up()
        return Results(
            tuple(ended), tuple(tokens), tuple(failed), read, tuple(done), decode_seconds=seconds,
            cell_seconds=cell_seconds,
        )  # fmt: skip

    def _fail(self, number: str, error: BaseException, failed: list[str]) -> None:
        """This request ends with its error; the others go on."""
        log.warning("request %s failed: %s: %s", number, type(error).__name__, error)
        self._rows[number].finish("error", error)
        failed.append(number)

    def _decode(self, numbers: Sequence[str], failed: list[str]) -> tuple[list[str], list[str], float]:
        """One token for each of these rows: those that ended by themselves, those that got one, and the seconds."""
        if not numbers:
            return [], [], 0.0
        began = time.perf_counter()
        rows = {number: self._rows[number] for number in numbers}
        self._steps += 1
        self._filled += len(rows)
        fed = {number: row for number, row in rows.items() if row.logits is None}
        stepped: Tensor | None = None
        if fed:
            caches = [row.cache for row in fed.values() if row.cache is not None]
            fed_tokens = [row.tokens[-1] for row in fed.values()]
            try:
                stepped = step(self._loop.model, caches, fed_tokens, [row.position for row in fed.values()])
            except RowsFailedError as error:
                stepped = error.logits
                names = list(fed)
                for place, cause in error.errors.items():
                    self._fail(names[place], cause, failed)
        alive = [(number, row) for number, row in rows.items() if number not in failed]
        if not alive:
            return [], [], time.perf_counter() - began
        ended, tokens = self._choose(alive, stacked([row for _, row in alive], stepped, list(fed.values())), failed)
        return ended, tokens, time.perf_counter() - began

    def _choose(self, rows: list[tuple[str, Row]], logits: Tensor, failed: list[str]) -> tuple[list[str], list[str]]:
        ended: list[str] = []
        tokens: list[str] = []
        draws = [row.request.draw for _, row in rows]
        choices = self._chooser(draws, logits, [row.position + 1 for _, row in rows])
        for (number, row), choice in zip(rows, choices, strict=True):
            if choice is None:
                self._fail(number, NotFiniteError("the model gave logits that are not finite"), failed)
            elif row.chosen(*choice):
                row.finish("stop")
                ended.append(number)
            else:
                tokens.append(number)
        return ended, tokens

    def _read(self, plan: StepPlan, failed: list[str]) -> tuple[dict[str, int], list[str], float]:
        """Cells read, prompts that are read, and the seconds of a cell."""
        began = time.perf_counter()
        cells: dict[str, int] = {}
        done: list[str] = []
        busy = False
        with self._changed:
            reading = [number for number in self._rows if self._scheduler.state(number) is State.READING]
        granted = self._passed_on(dict(plan.read), reading)
        for number in reading:
            if number in failed:
                continue
            row = self._rows[number]
            try:
                row.advance(self._config, self._tree)
                if row.read is not None and number in granted:
                    busy, before = True, row.read.cells_done
                    row.read.go(granted[number])
                    row.read.wait()
                    cells[number] = row.read.cells_done - before
                    row.advance(self._config, self._tree)
            except Exception as error:
                self._fail(number, error, failed)
                continue
            self._note_shared(number, row)
            if row.is_read:
                done.append(number)
        if reading and not busy and not plan.decode and not done:
            time.sleep(CLAIM_SECONDS)
        total = sum(cells.values())
        return cells, done, (time.perf_counter() - began) / total if total else 0.0

    def _note_shared(self, number: str, row: Row) -> None:
        """What the tree holds of a prompt is not reserved for the request, too."""
        if row.shared_tokens > row.noted_tokens:
            row.noted_tokens = row.shared_tokens
            with self._changed:
                self._scheduler.set_cached(number, row.shared_tokens)

    def _passed_on(self, granted: dict[str, int], reading: Sequence[str]) -> dict[str, int]:
        """Cells of requests that wait for another's read go to that one, whatever its priority."""
        readers = {id(row.claim): number for number in reading if (row := self._rows[number]).claim is not None}
        found: dict[str, int] = {}
        for number, cells in granted.items():
            claim = self._rows[number].claim if number in self._rows else None
            reader = None if claim is None else claim.reader
            to = number if reader is None else readers.get(id(reader), number)
            found[to] = found.get(to, 0) + cells
        return found

    def _give_up(self) -> None:
        """Prefixes that nobody uses, where they or requests need more than there is."""
        if self._tree is None:
            return
        with self._changed:
            lacking = self._scheduler.lacking_bytes
        over = max(self._tree.nbytes - self._shared_bytes, min(lacking, self._tree.nbytes))
        if over > 0:
            self._tree.evict(over)
        with self._changed:
            self._scheduler.set_outside(self._tree.nbytes)
