"""Memory of captured decode steps of one batch size, and the graphs that were captured over it.

It serves every cache of the same shape (`runner/graph/pool.py`), so that a captured graph outlives the context, fork or
request that it was captured for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.capture.exchange import Replay, Runtime
from retrieval_attn.runner.graph.host import HostResources
from retrieval_attn.runner.graph.host_row_gather import Reads
from retrieval_attn.runner.graph.pages import StepPages
from retrieval_attn.runner.graph.signature import signature
from retrieval_attn.runner.graph.slot import Buffers, LayerSlot, SlotPlace, StepMemory, ordinary_tensors
from retrieval_attn.runner.graph.states import StepStates
from retrieval_attn.runner.graph.support import hooks_of


class StepKind(NamedTuple):
    """Properties of a step, other than shapes, for which a graph is captured.

    Attributes:
        retrieves: whether some sequence has keys between sinks and window.
        padded: whether some window has padding.
        max_coded_keys: largest number of keys that the device searches by codes; 0: no search.
        prefix_depth: largest number of paged spans of a sequence; 0: no sequence has any.
        host_access: reader of host memory for each host part, see `runner/graph/host_row_gather.py`. Empty: the host.
    """

    retrieves: bool
    padded: bool
    max_coded_keys: int
    prefix_depth: int = 0
    host_access: tuple[int, ...] = ()

    @property
    def needs_host(self) -> bool:
        """Whether the host takes part in the step; otherwise it reports neither work nor errors."""
        return self.retrieves and (not self.host_access or any(one != Reads.DEVICE for one in self.host_access))


class CapturedStep(NamedTuple):
    """A graph, and the logits (batch, vocabulary) float32 that a replay writes."""

    replay: Replay
    logits: Tensor


class GraphDecoder:
    """Memory and graphs of the steps of one batch size. It holds neither model nor cache.

    Attributes:
        graphs: one per kind of step.
        captures, replays: numbers of them so far.
        capture_failure: why no graph can be captured, once a capture has failed.
        pages: lists of paged tokens, made for the first cache with tokens in pages.
    """

    @ordinary_tensors
    def __init__(
        self,
        model: PreTrainedModel,
        cache: RetrievalCache,
        runtime: Runtime,
        buffers: Sequence[Buffers],
        resources: HostResources,
        states: StepStates,
        tokens: int = 1,
    ) -> None:
        """Nothing is captured yet.

        Args:
            cache: a cache with the shape of all sequences, which holds tokens.
            buffers: window buffers of each layer that attends, (slots, ...).
            resources: host resources, shared with other decoders of the runtime, whose steps run at other times.
            states: recurrent states of all slots.
            tokens: new tokens of each sequence in a step.
        """
        key = buffers[0][0]
        layers = attending(cache)
        self.signature = signature(model, cache, runtime)
        self.runtime = runtime
        self.captures = self.replays = 0
        self.capture_failure: str | None = None
        self.graphs: dict[StepKind, CapturedStep] = {}
        self.pages: StepPages | None = None
        resources = resources.for_step()
        self.upload_tables, self._stage = resources.upload, resources.stage
        self.memory = StepMemory(len(layers), key.shape[0], resources.pool.workers, key.device, tokens)
        self.slots = [
            LayerSlot(SlotPlace(number, row), layer, resources, self.memory, buffers[row])
            for row, (number, layer) in enumerate(layers)
        ]
        self.states = states
        # kept, so that the signature's ids stay taken and what they recorded stays in memory
        self._hooks = [hook for module in model.modules() for hook in hooks_of(module)]

    def begin_step(self) -> None:
        """Record: the pass begins."""
        self.states.begin_step()
        self._stage.begin_step()

    def write_pages(self, prefixes: Sequence[PagedPrefix | None], layers: Iterable[Any], levels: int) -> None:
        """Tell the device what the rows, one for each token, have in pages. layers: of one that has some. levels: spans
        that a row lies over at most, at least 1. Raises CaptureError for a prefix in the pages of others.
        """
        if self.pages is None:
            rows, held = len(self.memory.token), [layer for layer in layers if isinstance(layer, RetrievalLayer)]
            owner = next(one.layers for one in prefixes if one is not None)
            self.pages = StepPages(rows, owner, {layer.number: layer.q_heads for layer in held})
        self.pages.write(prefixes, levels)

    def paged(self, number: int, query: Tensor, scoring: Scoring) -> Callable[[], Partial] | None:
        """Records what the rows of query (batch, q_heads, 1, head_dim) attend to in pages of layer `number`, as the
        graph that is captured finds it there; None: nothing.
        """
        if self.pages is None:
            return None
        return functools.partial(self.pages.attend, number, query, scoring, self.runtime.opaque)

    @property
    def max_coded_keys(self) -> int:
        """Largest number of keys of all layers that the device searches by codes, see `StepKind`."""
        return max(slot.max_coded_keys for slot in self.slots)

    @property
    def reads(self) -> tuple[int, ...]:
        """See `StepKind`, of the steps that are planned now."""
        found = tuple(one for slot in self.slots for one in slot.reads)
        return found if any(found) else ()

    @property
    def reads_differ(self) -> bool:
        """Whether the host reads some layers that the device may read, and the device others.

        A graph of such a step would serve until the next rows are complete or dropped: the host then reads all.
        """
        reads = {host.reads for slot in self.slots for host in slot.hosts if host.may_read}
        return Reads.HOST in reads and len(reads) > 1

    def raise_host_error(self) -> None:
        """Raise what the last replay left as a host step's status; BackendError names the layer."""
        if self.memory.host_failed:
            for host in (host for slot in self.slots for host in slot.hosts):
                host.raise_error()


def attending(cache: RetrievalCache) -> list[tuple[int, Any]]:
    """The layers that attend, retrieving or sliding, each with its number."""
    return [(number, layer) for number, layer in enumerate(cache.layers) if not isinstance(layer, StateLayer)]
