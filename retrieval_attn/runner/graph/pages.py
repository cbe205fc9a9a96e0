"""StepPages: what the rows of captured steps attend to in pages, as lists that the graphs walk.

A graph knows where the pages of a layer lie. Which spans there are, who lies over them and in which parts they are
attended to is read from memory, which is written when rows change: one graph serves every tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import KnownPrefixes, PagedLayers, PagedPrefix, nodes_of
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.shared.partials import PagedKeys, follows_its_plan, plan_shape, shared_partials
from retrieval_attn.gpu.shared.plan import LEVELS, PlanShape, SharedPlan

Opaque = Callable[..., None]
"""`Runtime.opaque`."""


NO_KERNELS = "attention to tokens in pages is recorded by Triton's kernels, which do not run here"


class StepPages:
    """See the module. layers: the pages, which stay in memory as long as graphs may read them."""

    def __init__(self, rows: int, layers: PagedLayers, q_heads: Mapping[int, int]) -> None:
        """rows: of the steps. q_heads: of each layer of the model that has tokens in pages, by its number."""
        self.layers = layers
        self._rows, self._q_heads = rows, q_heads
        self._plans: dict[int, dict[int, SharedPlan]] = {}  # by levels, by the layer's number
        self._written, self._levels = KnownPrefixes(), 0

    def write(self, prefixes: Sequence[PagedPrefix | None], levels: int) -> None:
        """Be for rows with these prefixes, one for each place. levels: spans that a row lies over at most, at least 1.

        Raises CaptureError for a prefix in the pages of another engine.
        """
        if any(one is not None and one.layers is not self.layers for one in prefixes):
            raise CaptureError("the rows of a batch must use the pages of one engine, got pages of several")
        if levels == self._levels and self._written.are(prefixes):
            return
        if levels not in self._plans:
            self._plans[levels] = self._new_plans(levels)
        nodes = nodes_of(prefixes)
        for plan in {id(one): one for one in self._plans[levels].values()}.values():
            plan.write(nodes)
        self._written.note(prefixes)
        self._levels = levels

    def attend(self, number: int, query: Tensor, scoring: Scoring, opaque: Opaque) -> Partial:
        """Record: query (rows, q_heads, 1, head_dim) of layer `number` over what was written last when a replay begins.

        out (rows, q_heads, 1, value_dim) and lse, float32; rows that have nothing in pages get the empty partial.
        """
        pool, plan = self.layers.layer(number), self._plans[self._levels][number]
        if query.is_cuda:
            return shared_partials(query, pool, plan, **scoring._asdict())
        sizes = query.shape[:3]
        found = Partial(*(query.new_empty(*shape, dtype=torch.float32) for shape in ((*sizes, pool.dims[1]), sizes)))
        opaque(_attend_into, found, query, pool, plan, scoring)
        return found

    def _new_plans(self, levels: int) -> dict[int, SharedPlan]:
        """One for all layers of a shape."""
        made: dict[PlanShape, SharedPlan] = {}
        plans: dict[int, SharedPlan] = {}
        for number, q_heads in self._q_heads.items():
            pool = self.layers.layer(number)
            shape = plan_shape(pool, self._rows, q_heads, exact=self.layers.dtype == torch.float32, levels=levels)
            if shape not in made:
                made[shape] = SharedPlan(shape, pool.key.device)
            plans[number] = made[shape]
        return plans


def prefix_of(cache: RetrievalCache) -> PagedPrefix | None:
    """Return the prefix of each sequence of a cache in pages; None without one, also if all layers slide."""
    exact = cache.batch.paged_prefix
    return exact if exact is not None and exact.tokens and exact.layers.any_layer is not None else None


def is_recordable(prefix: PagedPrefix) -> bool:
    """Whether a graph can attend to it: on a GPU, kernels have to read the lists there."""
    pool = prefix.layers.any_layer
    return pool is None or not pool.key.is_cuda or follows_its_plan(pool)


def levels_for(prefixes: Sequence[PagedPrefix | None]) -> int:
    """Levels of a plan for rows with these prefixes: few numbers, as each has graphs of its own. 0: there are none."""
    deepest = max((len(one.spans) for one in prefixes if one is not None), default=0)
    return max(LEVELS, 1 << (deepest - 1).bit_length()) if deepest else 0


def _attend_into(found: Partial, query: Tensor, pool: PagedKeys, plan: SharedPlan, scoring: Scoring) -> None:
    part = shared_partials(query, pool, plan, **scoring._asdict())
    found.out.copy_(part.out)
    found.lse.copy_(part.lse)
