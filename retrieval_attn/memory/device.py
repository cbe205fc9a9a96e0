"""Bytes of a device that reads and generates, from the shape of a model and the options. Arithmetic only."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from retrieval_attn.config import Config
from retrieval_attn.memory.shape import ModelShape
from retrieval_attn.memory.tower import FRAGMENTED
from retrieval_attn.memory.units import FLOAT_BYTES, GIB

if TYPE_CHECKING:
    from retrieval_attn.index.base import DeviceBytes
    from retrieval_attn.index.spec import IndexSpec


# Chunks of hidden states under way between host and device, in addition to a chunk's own input and output.
CHUNKS_UNDER_WAY = 3


class ChunkSize(NamedTuple):
    """Bytes per token of a prefill chunk.

    attending: activations in a layer with keys. mixing: activations in a layer with a state. visiting: hidden states
    under way between host and device. absent: bytes of keys and values that are on the device in a layer with keys, and
    on the host when a layer with a state begins (`runner/prefill.py`).
    """

    attending: int
    mixing: int
    visiting: int
    absent: int

    @classmethod
    def of(cls, shape: ModelShape, batch: int, *, hidden_on_host: bool, absent: int) -> ChunkSize:
        """Return the sizes for `batch` sequences.

        In a layer with keys the larger of MLP and attention. MLP: gate, up and their product, with the layer's input,
        its normalised copy and the output. Attention: query and output in the model's dtype and two float32
        partials that are being merged. Layers with a state: `memory/weights.py`.
        """
        hidden = shape.hidden * shape.dtype_bytes
        mlp = 3 * shape.mlp_width * shape.dtype_bytes
        heads = shape.q_heads * (shape.key_dim + shape.value_dim) * shape.dtype_bytes
        partials = 2 * shape.q_heads * (shape.value_dim + 1) * 4
        mixing = shape.state_chunk_bytes if shape.state_layers else 0
        visiting = CHUNKS_UNDER_WAY * hidden if hidden_on_host else 0
        return cls(batch * (3 * hidden + max(mlp, heads + partials)), batch * mixing, batch * visiting, absent)

    def in_state(self, tokens: int) -> bool:
        """Return True if a chunk of `tokens` tokens has its peak in a layer with a state."""
        return (1 + FRAGMENTED) * tokens * (self.mixing - self.attending) > self.absent

    def token_bytes(self, tokens: int) -> int:
        """Return activation bytes per token at the peak of a chunk of `tokens` tokens."""
        return self.mixing if self.in_state(tokens) else self.attending

    def unusable(self, tokens: int) -> int:
        """Return bytes lost to fragmentation during a chunk of `tokens` tokens."""
        return int(FRAGMENTED * tokens * self.token_bytes(tokens))

    def bytes(self, tokens: int) -> int:
        """Return all bytes of a chunk of `tokens` tokens on top of the context's own."""
        absent = self.absent if self.in_state(tokens) else 0
        return tokens * (self.token_bytes(tokens) + self.visiting) + self.unusable(tokens) - absent

    def most(self, free: int) -> int:
        """Return tokens of the largest chunk that fits `free` bytes; negative if `free` is."""
        attending = free / ((1 + FRAGMENTED) * self.attending + self.visiting)
        if not self.mixing:
            return int(attending)
        return int(min(attending, (free + self.absent) / ((1 + FRAGMENTED) * self.mixing + self.visiting)))


# CUDA context, cuBLAS workspaces, a graph's own memory: what a process holds beyond its tensors. An 8B model's held
# 1.09 GiB while decoding on an H100 (docs/archive/results/h100/memory_device.md), where the context alone takes 0.6.
DEVICE_RESERVE = 9 * GIB // 8
# Copies of all states that a captured step has in addition to the cache's own: those that it advances, and those of
# before its newest two steps, which may have to be undone (runner/graph/states.py).
GRAPH_STATES = 3


class DeviceLayout(NamedTuple):
    """Where a pass has what grows with the context.

    hidden_on_host: hidden states lie in host memory, and their chunks visit the device. kv_layers: layers whose keys
    and values the device holds at once: two where one is copied to the host while the next computes.
    """

    hidden_on_host: bool = False
    kv_layers: int = 2


LAYOUTS = DeviceLayout(), DeviceLayout(False, 1), DeviceLayout(True, 1)
"""Possible layouts, fastest first: a layer that waits for a copy costs less than chunks that cross the bus."""


@dataclass(frozen=True)
class DeviceSize:
    """Memory of a device that holds `shape` of a model, for `batch` sequences of `context` tokens each.

    with_images: whether the largest image of a context is counted.
    """

    shape: ModelShape
    options: Config
    context: int
    batch: int = 1
    layout: DeviceLayout = DeviceLayout()
    with_images: bool = False

    def changed(self, *, context: int | None = None, layout: DeviceLayout | None = None) -> DeviceSize:
        """Return a copy with another context or layout, and the cached values that depend on neither."""
        context, layout = self.context if context is None else context, layout or self.layout
        other = replace(self, context=context, layout=layout)
        vars(other).update({name: vars(self)[name] for name in _OF_THE_INDEX if name in vars(self)})
        return other

    def fitting(self, limit: int) -> DeviceSize:
        """Return a copy with the first layout that reads within `limit` bytes, the last layout if none does."""
        sizes = choices(self)
        return next((size for size in sizes if size.reading_bytes <= limit), sizes[-1])

    @property
    def chunk(self) -> int:
        """Tokens that go through a layer at once."""
        return min(self.options.prefill_chunk, self.context)

    @property
    def reading_bytes(self) -> int:
        """All bytes at the peak of reading."""
        read = self.fixed_bytes + self.context * self.token_bytes + self.chunks.bytes(self.chunk)
        return read + self.image_excess(self.chunk)

    def image_excess(self, chunk: int) -> int:
        """Return the bytes by which embedding an image exceeds what prefill in chunks of `chunk` tokens takes.

        An image is embedded before the prefill of its part of a prompt.
        """
        held = self.coded_token_bytes + self.clusters[0]
        prefill = self.context * (self.token_bytes - held) + self.chunks.bytes(chunk)
        return max(0, self.image_bytes - prefill)

    @property
    def image_bytes(self) -> int:
        """Bytes of embedding the largest image of the context; 0 if it is not counted."""
        tower = self.shape.tower if self.with_images else None
        return 0 if tower is None else tower.image_bytes(self.context)

    @cached_property
    def chunks(self) -> ChunkSize:
        """Memory of the chunks of the prompt."""
        held = self.context * self.batch * self.shape.kv_layer_bytes
        absent = held if self.kv_layers == self.layout.kv_layers == 1 else 0
        return ChunkSize.of(self.shape, self.batch, hidden_on_host=self.layout.hidden_on_host, absent=absent)

    @property
    def hidden_token_bytes(self) -> int:
        """Bytes of the hidden states of one column, wherever they lie."""
        return self.batch * self.shape.hidden * self.shape.dtype_bytes

    @property
    def kv_layers(self) -> int:
        """Layers whose keys and values the device holds at once."""
        return min(self.layout.kv_layers, max(1, self.shape.full_layers))

    @cached_property
    def token_bytes(self) -> int:
        """Bytes per token of context in prefill: hidden state, KV of a layer and of the one before it that is being
        copied to the host, cosines and sines, codes, and a cluster for each of these.
        """
        shape = self.shape
        hidden = 0 if self.layout.hidden_on_host else self.hidden_token_bytes
        kv = self.batch * self.kv_layers * shape.kv_layer_bytes
        return hidden + kv + self.coded_token_bytes + self.clusters[0] + self.codes.building + rotary_bytes(self)

    @cached_property
    def codes(self) -> DeviceBytes:
        """Bytes per key of one head that the index has on the device."""
        from retrieval_attn.index.base import DeviceBytes

        return self._index.device_bytes(self.shape.key_dim) if self.shape.full_layers else DeviceBytes()

    @cached_property
    def coded(self) -> bool:
        """Whether the device scans codes of the keys."""
        return bool(self.shape.full_layers) and self._index.keeps_codes(self.shape.key_dim)

    @cached_property
    def _index(self) -> IndexSpec:
        from retrieval_attn.index.spec import IndexSpec

        return IndexSpec.of(self.options.index, self.options.index_options)

    @cached_property
    def coded_token_bytes(self) -> int:
        """Bytes per token of context, in prefill and after it, of an index that keeps codes on the device: the codes,
        and a score per query head that all layers share.
        """
        return self._codes_of_token + 4 * self.batch * self.shape.q_heads if self.coded else 0

    @cached_property
    def _codes_of_token(self) -> int:
        from retrieval_attn.gpu.codes.streamer import STAGED_LAYERS

        layers = self.shape.full_layers
        held = layers * self.codes.held + min(layers, STAGED_LAYERS) * self.codes.staged
        return self.batch * self.shape.kv_heads * held

    @cached_property
    def clusters(self) -> tuple[int, int]:
        """Bytes of clusters where the device has codes, in prefill and after it: per token of context, and whatever
        that is: mean values, and what is summed for one layer at a time.
        """
        from retrieval_attn.cpu.clusters import MAX_CLUSTERS
        from retrieval_attn.gpu.clusters.mass import MEAN_DTYPE
        from retrieval_attn.index.device import SPARE_TOKENS

        shape, batch = self.shape, self.batch
        if not self.coded or not self.options.estimates:
            return 0, 0
        heads = batch * shape.full_layers * shape.kv_heads
        rows = batch if batch == 1 else batch - batch // 2  # a captured step takes them in halves
        # spare room for members, mean values, and what a query is estimated with
        each = SPARE_TOKENS + MAX_CLUSTERS * shape.value_dim * MEAN_DTYPE.itemsize + 2 * shape.key_dim * FLOAT_BYTES
        return heads, heads * each + mass_bytes(rows, shape.kv_heads, shape.q_heads)

    @property
    def spare_codes(self) -> int:
        """Bytes of room for codes of tokens to come."""
        from retrieval_attn.index.device import SPARE_TOKENS

        return SPARE_TOKENS * self._codes_of_token

    @property
    def window_tokens(self) -> int:
        """Tokens that every layer which retrieves has room for."""
        if self.options.keeps_all:
            from retrieval_attn.index.flat import kept_tokens

            return self.options.sink + kept_tokens(self.context)
        return self.options.sink + self.options.window + self.options.spill

    @property
    def window_bytes(self) -> int:
        """Bytes of sinks and windows; with index "full" three times: the context's, a graph's, and those of an answer
        that ends, which leaves the graph.
        """
        copies = 3 if self.options.keeps_all else 1
        return copies * self.batch * self.shape.full_layers * self.window_tokens * self.shape.kv_layer_bytes

    @property
    def sliding_bytes(self) -> int:
        """Bytes of layers that only ever see a sliding window."""
        shape = self.shape
        return self.batch * shape.sliding_layers * min(shape.sliding_window, self.context) * shape.sliding_layer_bytes

    @property
    def logits_bytes(self) -> int:
        """Bytes of one row of float32 logits per sequence."""
        return self.batch * self.shape.vocab * 4

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes while generating that do not depend on the context."""
        held = self.shape.weight_bytes + self.window_bytes + self.sliding_bytes
        held += sum(state_bytes(self))
        return held + self.spare_codes + self.clusters[1] + self.logits_bytes + DEVICE_RESERVE

    @property
    def decode_bytes(self) -> int:
        """Bytes while generating."""
        return self.fixed_bytes + self.context * (self.coded_token_bytes + self.clusters[0])


_OF_THE_INDEX = ("_index", "codes", "coded", "coded_token_bytes", "_codes_of_token", "clusters")
"""Cached values of a `DeviceSize` that depend on model, options and batch alone."""


def rotary_bytes(size: DeviceSize) -> int:
    """Bytes of cosines and sines per token, of each row: padded ones have positions of their own."""
    return size.batch * size.shape.rotary_numbers * size.shape.dtype_bytes


def state_bytes(size: DeviceSize) -> tuple[int, int]:
    """Bytes of the states that a cache keeps instead of keys, and of the copies of them in a captured step."""
    held = size.batch * size.shape.states_bytes
    return held, 0 if size.options.graph is False else GRAPH_STATES * held


@functools.cache
def mass_bytes(rows: int, kv_heads: int, q_heads: int) -> int:
    """Return the maximum bytes that programs sum for `rows` rows of a batch in one layer; layers take turns."""
    from retrieval_attn.cpu.clusters import MAX_CLUSTERS
    from retrieval_attn.gpu.clusters.mass import mass_grid

    _, _, programs = mass_grid(rows * kv_heads, q_heads // kv_heads)
    return rows * q_heads * programs * MAX_CLUSTERS * FLOAT_BYTES


def choices(size: DeviceSize) -> tuple[DeviceSize, ...]:
    """Return `size` in each layout that its model allows, fastest first."""
    possible = [layout for layout in LAYOUTS if size.shape.hidden_movable or not layout.hidden_on_host]
    return tuple(size.changed(layout=layout) for layout in possible)


def most_context(size: DeviceSize, limit: int, chunk: int) -> int:
    """Tokens of context that can be read within `limit` bytes, in chunks of `chunk` tokens; 0: none."""

    def needed(tokens: int) -> int:
        held = size.changed(context=tokens)
        read = held.fixed_bytes + tokens * size.token_bytes + held.chunks.bytes(chunk)
        return read + held.image_excess(chunk)

    return max(0, bisect.bisect_right(range(max(0, limit) // size.token_bytes + 1), limit, key=needed) - 1)


SEARCH_MICROSECONDS = {False: 85.0, True: 100.0}
"""What reading a layer's keys and values may take, by the GPU's bandwidth, to be sooner than a search, its transfers
and the host's answer; True: in int8, of twice as many keys, whose search takes longer. Of Llama-3-8B's shape on an H100
65,536 and 158,627 tokens, a sixth less than where the ways were equal (docs/archive/log.md, 2026-11-27). Where the GPU
reads what is named, a token of 128K by retrieval takes 8.9 ms, and 9.2 over all keys in int8, as good as exact: they
stay.
"""


def device_kv_bytes(shape: ModelShape, *, int8: bool) -> int:
    """Return bytes of one token's keys and values of one layer on the GPU, for full attention."""
    from retrieval_attn.index.formats import Format

    if not int8:
        return shape.kv_layer_bytes
    return shape.kv_heads * sum(Format.INT8.row_bytes(dim) for dim in (shape.key_dim, shape.value_dim))


def full_attention_breakeven(shape: ModelShape, bandwidth: float, *, int8: bool = False) -> int:
    """Return the context length up to which full attention on the GPU is faster than retrieval.

    bandwidth: of the GPU, bytes per second. int8: whether keys and values are stored in int8.
    """
    return int(SEARCH_MICROSECONDS[int8] * 1e-6 * bandwidth / max(1, device_kv_bytes(shape, int8=int8)))
