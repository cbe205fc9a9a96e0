"""PagedPrefix: the first tokens of a sequence in GPU pages, all of which every later token attends to.

Such tokens are on no host, in no index and in no window; a layer's own tokens begin behind them. Caches that continue
the same prefix have the same pages, and when they step together, each span is attended to once for all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.shared.partials import (
    PagedKeys,
    empty_pages,
    follows_its_plan,
    path_partial,
    plan_shape,
    shared_partials,
    write_pages,
)
from retrieval_attn.gpu.shared.plan import LEVELS, PAGE_TOKENS, SharedNode, SharedPlan, pages_for
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.staging import pack

FEW_QUERIES = 32
"""Queries of int8 pages up to which they are attended with as rows of a step are."""


class PagedLayers:
    """Pages of all layers of a model: a page has the same number in each. Memory is taken when a layer's tokens come.

    int8: rows are stored as on the host in int8. nbytes_per_page: of all layers that have tokens so far. dtype: of the
    tokens that came; None: none did. retired: steps captured over them are not to be kept.
    """

    def __init__(self, pages: int, *, int8: bool = False) -> None:
        self.pages, self.int8, self.retired = pages, int8, False
        self.nbytes_per_page = 0
        self.dtype: torch.dtype | None = None
        self._layers: dict[int, PagedKeys] = {}
        self._lock = threading.Lock()

    def layer(self, number: int) -> PagedKeys:
        """Return the pages of a layer that has tokens."""
        return self._layers[number]

    @property
    def any_layer(self) -> PagedKeys | None:
        """Pages of any layer that has tokens; None if no layer has."""
        return next(iter(self._layers.values()), None)

    def write(
        self, number: int, span: PagedSpan, key: Tensor, value: Tensor, dtype: torch.dtype, first: int = 0
    ) -> None:
        """Write the keys and values (1, kv_heads, tokens, dim) of a span from token `first` on, in one layer.

        dtype: of the tokens. int8: they may come as they are stored, (1, kv_heads, tokens, width).
        """
        self.dtype = dtype
        if self.int8 and key.dtype != torch.int8:
            key, value = pack(key, Format.INT8), pack(value, Format.INT8)
        page, slot = divmod(first, PAGE_TOKENS)
        pages = span.pages[page : pages_for(first + key.shape[2])]
        with self._lock:
            pool = self._layers.get(number)
            if pool is None:
                pool = self._layers[number] = empty_pages(self.pages, key, value)
                self.nbytes_per_page += pool.nbytes // max(1, self.pages)
        write_pages(pool, pages, key[0], value[0], slot)


class PagedSpan:
    """Tokens in pages, the same pages in every layer. They are freed when the last reference to the span is gone."""

    def __init__(self, pages: NDArray[np.int32], tokens: int, give_back: Callable[[NDArray[np.int32]], object]) -> None:
        self.pages, self.tokens = pages, tokens
        weakref.finalize(self, give_back, pages).atexit = False


class PagedPrefix:
    """Spans of tokens from a sequence's first on. It never changes.

    reading: the span that is being read, behind the others; it counts from `closed` on.
    """

    def __init__(
        self, layers: PagedLayers, spans: tuple[PagedSpan, ...] = (), reading: PagedSpan | None = None
    ) -> None:
        self.layers, self.spans, self.reading = layers, spans, reading
        self.tokens = sum(one.tokens for one in spans)
        self._plans = PrefixPlans()

    @property
    def nbytes(self) -> int:
        """Bytes of the spans' pages in all layers, shared with others or not."""
        spans = self.spans if self.reading is None else (*self.spans, self.reading)
        return self.layers.nbytes_per_page * sum(len(one.pages) for one in spans)

    def opened(self, span: PagedSpan) -> PagedPrefix:
        """The same, with a span to be read."""
        return PagedPrefix(self.layers, self.spans, span)

    def closed(self) -> PagedPrefix:
        """With the span that has been read."""
        return self if self.reading is None else PagedPrefix(self.layers, (*self.spans, self.reading))

    def write(self, number: int, key: Tensor, value: Tensor) -> None:
        """Keys and values (1, kv_heads, tokens, dim) of the span that is being read, in layer `number`."""
        assert self.reading is not None
        self.layers.write(number, self.reading, key, value, key.dtype)

    def attend(self, number: int, query: Tensor, scoring: Scoring) -> Partial:
        """query (batch, q_heads, new, head_dim) of tokens behind the prefix, over all of it; `tokens` is not 0."""
        pool, (batch, q_heads, new, _) = self.layers.layer(number), query.shape
        if pool.steps is not None and batch * new <= FEW_QUERIES and follows_its_plan(pool):
            # a kernel that reads int8 as it is, for rows of one token: nothing is turned into the model's dtype
            rows = query.transpose(1, 2).reshape(batch * new, q_heads, 1, -1)
            found = self._plans.attend(number, [self] * len(rows), rows, scoring)
            assert found is not None
            out, lse = (one.unflatten(0, (batch, new)).squeeze(3).transpose(1, 2) for one in found)
            return Partial(out, lse)
        nodes = [SharedNode(one.pages, one.tokens, ()) for one in self.spans]
        return path_partial(query, pool, nodes, **scoring._asdict())


class KnownPrefixes:
    """Prefixes of rows, to be known when the same come again. It keeps none of them."""

    def __init__(self) -> None:
        self._rows: list[weakref.ref[PagedPrefix] | None] = []

    def are(self, prefixes: Items[PagedPrefix | None]) -> bool:
        """Whether these are the ones that were noted last."""
        return len(self._rows) == len(prefixes) and all(
            known is one if known is None or one is None else known() is one
            for known, one in zip(self._rows, prefixes, strict=True)
        )

    def note(self, prefixes: Items[PagedPrefix | None]) -> None:
        """Know these from now on, and no others."""
        self._rows = [None if one is None else weakref.ref(one) for one in prefixes]


class PrefixPlans:
    """The plan of the rows of the step before: mostly the same rows come again. It keeps no prefix."""

    def __init__(self) -> None:
        self._known = KnownPrefixes()
        self._plan: SharedPlan | None = None

    def attend(
        self, number: int, prefixes: Items[PagedPrefix | None], query: Tensor, scoring: Scoring
    ) -> Partial | None:
        """query (rows, q_heads, 1, head_dim) of rows with these prefixes, each over its own; rows without one get the
        empty partial. None where no row has one, or they lie in pages of several engines.
        """
        owners = {id(one.layers): one.layers for one in prefixes if one is not None and one.tokens}
        if len(owners) != 1:
            return None
        (layers,) = owners.values()
        pool = layers.layer(number)
        plan = self._plan_of(prefixes, query, pool)
        return shared_partials(query, pool, plan, **scoring._asdict())

    def _plan_of(self, prefixes: Items[PagedPrefix | None], query: Tensor, pool: PagedKeys) -> SharedPlan:
        rows, q_heads, _, _ = query.shape
        heads, plan = pool.key.shape[0], self._plan
        if plan is not None and self._known.are(prefixes) and plan.serves(query, heads):
            return plan
        nodes = nodes_of(prefixes)
        deepest = max((len(one.spans) for one in prefixes if one is not None), default=0)
        shape = plan_shape(pool, rows, q_heads, exact=query.element_size() > 2, levels=max(LEVELS, deepest))
        if plan is None or plan.device != query.device or plan.shape != shape:
            plan = SharedPlan(shape, query.device)
        plan.write(nodes)
        self._known.note(prefixes)
        self._plan = plan
        return plan


def nodes_of(prefixes: Items[PagedPrefix | None]) -> list[SharedNode]:
    """Every span once, with its rows; those nearer to the beginning of a sequence first."""
    every = ((row, one.spans) for row, one in enumerate(prefixes) if one is not None)
    deep = [(depth, row, span) for row, spans in every for depth, span in enumerate(spans)]
    deep.sort(key=lambda one: one[0])
    rows: dict[int, tuple[PagedSpan, list[int]]] = {}
    for _, row, span in deep:
        rows.setdefault(id(span), (span, []))[1].append(row)
    return [SharedNode(span.pages, span.tokens, own) for span, own in rows.values()]
