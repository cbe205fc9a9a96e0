"""FittedSuite: suites whose generated contexts fill a length in tokens, and the description of one of their tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.suite.fit import Draft, Fitted, fit
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["FittedSuite", "Stock", "TaskSpec"]

_BATCH_TOKENS = 1 << 19  # samples counted together hold about so many tokens


@dataclass(frozen=True)
class TaskSpec:
    """One task.  title: its column in the paper.  part: one reference is enough (otherwise the share found counts).

    needs: name of its file in the data folder; "" for generated tasks.
    """

    name: str
    title: str
    family: str
    max_new_tokens: int
    part: bool = False
    needs: str = ""
    options: Mapping[str, str | int] = field(default_factory=dict)


class Stock:
    """What is made once for a tokenizer: its counter, and texts that many samples share."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.counter = tokenizer, TokenCounter(tokenizer)
        self._made: dict[tuple[Any, ...], Any] = {}

    def cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Asking(Protocol):
    """What asks about a context: a question, and how the answer begins."""

    @property
    def question(self) -> str: ...

    @property
    def prefix(self) -> str: ...


class FittedSuite:
    """Rows of any task, length and seed, each made from its own random numbers and fitted to its length.

    A subclass has `name`, `generator`, `available` and `draft`.
    form: what stands around the prompt; set it, and its tokens are counted; None counts what the tokenizer puts
    before a text on its own (BOS), once.
    """

    name: str
    generator: str  # part of every row: raise it when the same settings give other rows

    def __init__(self) -> None:
        self.form: PromptFormat | None = None
        self._stock: Stock | None = None

    def available(self, task: str) -> TaskSpec:
        """The task's spec.  Raises ConfigError for a task that is unknown, or whose file was not given."""
        raise NotImplementedError

    def draft(self, stock: Stock, spec: TaskSpec, length: int, seed: int, i: int) -> Draft:
        """Sample i before its size is known."""
        raise NotImplementedError

    def stream(self, spec: TaskSpec, length: int, seed: int, i: int, what: str) -> random.Random:
        """Random numbers of one sample and purpose."""
        return random.Random(f"{self.generator}/{spec.name}/{length}/{seed}/{i}/{what}")

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """Rows of `length` tokens, answer included.

        Raises ConfigError for an unknown task or a length that is too short, InputDataError past a file's end.
        """
        spec = self.available(task)
        if length is None or length < 1:
            raise ConfigError(f"task {task} needs a length in tokens, got {length}; give a positive number")
        stock = self.stock_of(tokenizer)
        remaining = iter(indices)
        while batch := list(islice(remaining, max(1, min(16, _BATCH_TOKENS // length)))):
            drafts = [self.draft(stock, spec, length, seed, i) for i in batch]
            around = self._around(stock, drafts, spec)
            fitted = fit(drafts, stock.counter, length, around, task)
            for i, draft, used, sized in zip(batch, drafts, around, fitted, strict=True):
                yield self._row(spec, length, seed, i, draft, used, sized)

    def stock_of(self, tokenizer: Any) -> Stock:
        """What was made for this tokenizer."""
        if self._stock is None or self._stock.tokenizer is not tokenizer:
            self._stock = Stock(tokenizer)
        return self._stock

    def _around(self, stock: Stock, drafts: Sequence[Asking], spec: TaskSpec) -> list[int]:
        """Return the tokens of each sample without its context."""
        form = self.form or PromptFormat.of(stock.tokenizer, "never")
        texts = [draft.question + form.tail + draft.prefix for draft in drafts]
        fixed = len(form.head) + spec.max_new_tokens
        return [fixed + count for count in stock.counter.counts(texts)]

    def _row(self, spec: TaskSpec, length: int, seed: int, i: int, draft: Draft, around: int, sized: Fitted) -> Row:
        used = sized.tokens + around
        meta: dict[str, Any] = {
            "generator": self.generator,
            "prompt_tokens": used - spec.max_new_tokens,
            "fill": round(used / length, 5),
            "units": sized.units,
            "cut_unit": sized.tuned,
            **draft.meta(sized.units, sized.context),
        }
        return Row(
            id=f"{self.name}/{spec.name}/{length}/{seed}/{i}",
            task=spec.name,
            context=sized.context,
            question=draft.question,
            answer_prefix=draft.prefix,
            answers=draft.references(sized.units),
            max_new_tokens=spec.max_new_tokens,
            target_tokens=length,
            meta=meta,
        )
