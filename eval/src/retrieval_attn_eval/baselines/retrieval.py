"""Retrieval attention as a method: this package's Context with any index (flat, ivf, hnsw, roargraph, ...)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.baselines.reply import Reply
from retrieval_attn_eval.prompts import Prompt

__all__ = ["RetrievalAttention", "attended_tokens"]


class RetrievalAttention:
    """This package: the context is read and indexed, then the question is asked.

    "inside": the question's tokens attend to the context exactly, as in one prefill of the whole prompt; only the
    answer is decoded through retrieval.  "after": the question comes when the index is finished, and its tokens
    go through retrieval too (question_attention="retrieval"; "exact" turns that off).
    Both positions share one reading of the context if the index does not learn from the queries it saw while it was
    built; otherwise "inside" reads its whole prompt anew, as a user's would (inside="prompt"; "context" shares there
    too, and the index is then not trained on the question's few queries).
    beta: retrieved keys fall from layer to layer as PyramidKV's budgets do, retrieve of them on average
    (RetrievalAttention, appendix F); None: retrieve in every layer.
    The last context stays for its next question until `release`.
    Raises UnsupportedModelError or ConfigError when made, not at the first answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: Any,
        append: str = "retrieval",
        *,
        inside: str = "prompt",
        beta: int | None = None,
        name: str = "retrieval",
    ) -> None:
        import retrieval_attn as ra
        import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)

        for option, value, known in (
            ("append", append, ("retrieval", "exact")),
            ("inside", inside, ("prompt", "context")),
        ):
            if value not in known:
                raise ConfigError(f"{name}: {option} must be one of {', '.join(known)}; got {value!r}")
        config = config.replace(full_attention="never")  # it is retrieval that is judged, also where all keys fit a GPU
        self.name = name
        self.options: dict[str, Any] = {**config.to_dict(), "append": append, "inside": inside}
        self._model = model
        self._new_context = lambda: ra.Context(model, tokenizer, config)
        if beta is not None:
            self.options["beta"] = beta
            self._new_context = lambda: _falling(ra.Context(model, tokenizer, config), config, beta)
        self._new_context()
        self._append = append
        self._config, self._inside = config, inside
        self._last: tuple[Any, Any] | None = None  # context ids, their Context
        self._unpaid = 0.0

    def release(self) -> None:
        """Free the memory of the last context."""
        self._last = None

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        for position in positions:
            if position == "inside" and not self._shares_inside(prompt):
                ids = prompt.ids.tolist()
                context, read = self._read(ids[:-1])
                ask = partial(context.continue_with, ids[-1:])
            else:
                context, read = self._shared(prompt)
                append = "exact" if position == "inside" else self._append
                ask = partial(context.ask, prompt.question_text, raw=True, question_attention=append)
            meter = _Meter(position == "after" and self._append == "retrieval")
            begin = time.perf_counter()
            with meter.watching(self._model):
                answer = ask(max_new_tokens=max_new_tokens)
            built = context.cache.stats().index_seconds if read else 0.0
            replies[position] = _reply(answer, read, built, time.perf_counter() - begin, meter)
        return replies

    def _shares_inside(self, prompt: Prompt) -> bool:
        """Whether an index over the context alone is what a reading of the whole prompt would have built."""
        if self._inside == "context":
            return True
        if self._config.index != "auto":
            return not _trains(self._config.index, self._config.index_options)
        context, _ = self._shared(prompt, keep_time=True)  # what "auto" chose is known when it has read
        return not any(_trains(kind, {}) for kind in context.cache.index_kinds())

    def _shared(self, prompt: Prompt, keep_time: bool = False) -> tuple[Any, float]:
        """The context, and the seconds that reading it took if no answer has been charged with them yet."""
        if self._last is None or not np.array_equal(self._last[0], prompt.context_ids):
            self.release()
            context, self._unpaid = self._read(prompt.context_ids.tolist())
            self._last = prompt.context_ids, context
        read = self._unpaid
        if not keep_time:
            self._unpaid = 0.0
        return self._last[1], read

    def _read(self, ids: list[int]) -> tuple[Any, float]:
        begin = time.perf_counter()
        context = self._new_context().read(ids, progress=False)
        return context, time.perf_counter() - begin


def _falling(context: Any, config: Any, beta: int) -> Any:
    """The context, its layers with budgets of their own.  Raises ConfigError if there is no number to divide."""
    from retrieval_attn.testing import RetrievalLayer
    from retrieval_attn_eval.baselines.options import pyramid

    keys = config.retrieve_count(1)
    for name, value in (("retrieve", config.retrieve if keys is None else keys), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"a budget per layer needs {name} as a whole number >= 1, got {value!r}")
    layers = [layer for layer in context.cache.layers if isinstance(layer, RetrievalLayer)]
    for number, layer in enumerate(layers):
        layer.config = replace(config, retrieve=max(1, pyramid(keys, beta, number, len(layers))))
    return context


class _Meter:
    """Counts tokens attended, from the state of the cache after each forward of the model."""

    def __init__(self, count_question: bool) -> None:
        self._count_question = count_question
        self.queries = 0
        self.attended = 0.0

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Counts every forward of `model` in here that goes through retrieval."""
        handle = model.register_forward_hook(self._after_forward, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _after_forward(self, model: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = kwargs.get("input_ids")
        count = 1 if given is None else given.shape[1]
        if count > 1 and not self._count_question:
            return  # the question, read exactly
        counts = [
            seen for layer in kwargs["past_key_values"].layers if (seen := attended_tokens(layer, count)) is not None
        ]
        if counts:
            self.queries += count
            self.attended += count * sum(counts) / len(counts)

    @property
    def mean(self) -> float | None:
        """Tokens per query, None if no query was counted."""
        return self.attended / self.queries if self.queries else None


def attended_tokens(layer: Any, new: int) -> float | None:
    """Tokens that one of the `new` last queries of a retrieval layer attended to: sinks, window, retrieved keys."""
    window, config = getattr(layer, "window", None), layer.config if hasattr(layer, "config") else None
    if window is None or config is None or getattr(layer, "is_sliding", False):
        return None
    static = window.sink_len + window.tail_len
    middle = layer.columns - static
    retrieve = config.retrieve_count(middle) if middle > 0 else 0
    if retrieve and config.estimates:
        # where a device names keys and estimates the others, all that it names are attended to
        codes = layer.index.spec.code_shape(window.buffers[0].shape[3], retrieve, True)
        retrieve = retrieve if codes is None else codes.kept or codes.k
    return float(static - (new - 1) / 2 + (middle if retrieve is None else min(retrieve, middle)))


def _trains(kind: str, options: Any) -> bool:
    """Whether an index learns from queries."""
    from retrieval_attn.testing import IndexSpec

    return IndexSpec.of(kind, options).trains


def _reply(answer: Any, read: float, built: float, asked: float, meter: _Meter) -> Reply:
    """Reply from a Context's answer.  read (built, its index, included) and asked: wall-clock seconds; the question's
    own reading is prefill."""
    stats = answer.stats.to_dict()
    question = stats["prefill_seconds"]
    seconds = {"prefill": max(read - built, 0.0) + question, "index": built, "decode": max(asked - question, 0.0)}
    stats = {**stats, "tokens_attended_per_step": meter.mean, "shared_prefill": read == 0.0}
    return Reply(answer.text, list(answer.tokens), answer.finish_reason, seconds, stats)
