"""The formulas of `plan`: items of memory, largest chunks and contexts, reasons and advice. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from retrieval_attn.memory.device import (
    DEVICE_RESERVE,
    GRAPH_STATES,
    DeviceSize,
    choices,
    device_kv_bytes,
    full_attention_breakeven,
    most_context,
    rotary_bytes,
    state_bytes,
)
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.routed import BUS_BANDWIDTH
from retrieval_attn.memory.shape import ModelShape
from retrieval_attn.memory.units import GIB, show_bytes

# Interpreter, libraries and pinned staging buffers.
HOST_RESERVE = 2 * GIB
# The floors below: a 24 GB card's memory (RTX 4090, 1008 GB/s) and dual-channel DDR5 as it is reached.
DEVICE_BANDWIDTH = 1.008e12
HOST_BANDWIDTH = 80e9
# Common 4-bit weights and 8-bit KV, scales included (llama.cpp's Q4_K_M and Q8_0).
Q4_BITS = 4.85
Q8_BITS = 8.5
CHUNK_STEP = 256

_MEASURED = "Measured on an H100, Llama-3-8B's shape, ms per token"
_IN_INT8 = "9.2 and 10.2 (8.9 where the GPU reads what is named) at 128K, 10.7 and 10.5 at 192K"
FULL_KEYS = (
    f"{_MEASURED} with all keys and by retrieval: 6.7 and 8.7 at 16K, 8.8 and 9.4 at 64K, 10.2 and 9.8 at 96K; in int8 "
    f"7.8 at 64K, 8.4 at 96K, {_IN_INT8}."
)
INT8_KEYS = f"{_MEASURED} in int8 and by retrieval: {_IN_INT8}; with weights in 4 bits 6.5 and 7.7 at 128K."
H100_BANDWIDTH = 3.35e12
GPU_BANDWIDTHS = {"RTX 3090": 0.936e12, "RTX 4090": DEVICE_BANDWIDTH, "H100 SXM": H100_BANDWIDTH}
"""Bytes per second of GPUs for which a speed is estimated."""
PCIE_4 = frozenset(("RTX 3090", "RTX 4090"))
"""Those whose bus has half of BUS_BANDWIDTH."""
READ_FACTOR = 1.1
"""Time of reading bytes of GPU memory in a step, relative to the bandwidth (fitted to the H100 times above)."""
LAYER_SECONDS, SEARCH_SECONDS = 33e-6, 85e-6
"""Seconds of a step, in each layer, that depend on no bandwidth; the same of a search in each layer that retrieves."""


@dataclass(frozen=True)
class Item:
    """One line of the arithmetic."""

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True)
class FullAttention:
    """The alternative: ordinary attention with the whole KV on the device.

    bytes_16bit: weights as planned and KV in the model's dtype; bytes_int8: with KV in int8, which index="auto" takes
    for answers, without its codes; bytes_quantized: 4-bit weights, or those of a quantised model, and 8-bit KV.
    floor_ms: bandwidth floor of one generated token, KV in the model's dtype; retrieval_floor_ms: the same
    for retrieval, device and host reads one after the other, every host key scanned (flat index).
    """

    fits: bool
    fits_int8: bool
    fits_quantized: bool
    bytes_16bit: int
    bytes_int8: int
    bytes_quantized: int
    floor_ms: float
    retrieval_floor_ms: float


@dataclass(frozen=True)
class SpeedEstimate:
    """Estimated milliseconds per generated token on a GPU by its memory bandwidth. No measurement.

    gpu: name of the GPU. bandwidth: its bytes per second. full_ms: all keys in GPU memory, in the model's dtype.
    retrieval_ms: codes in GPU memory; None: the host's index is searched, or codes are streamed from the host.
    """

    gpu: str
    bandwidth: float
    full_ms: float
    retrieval_ms: float | None


@dataclass(frozen=True)
class DeviceReads:
    """Bytes of GPU memory that a step reads on the GPU that reads most.

    reader: shape of the part of the model on it. plain: weights, sliding windows and states. window: sinks and windows.
    kv: all keys and values of the context. bus: of host memory, experts.
    """

    reader: ModelShape
    plain: int
    window: int
    kv: int
    bus: int


@dataclass(frozen=True)
class Arithmetic:
    """The formulas for one model, one set of options, one context length and batch.

    size: of the GPU that holds most of the model; processes: that share the host's memory.
    """

    shape: ModelShape
    size: DeviceSize
    processes: int

    @property
    def host_size(self) -> HostSize:
        return HostSize(self.shape, self.size.options, self.size.batch)

    @property
    def device_bytes(self) -> int:
        """GPU memory at the peak of prefill."""
        return sum(item.bytes for item in self.device())

    def device(self) -> tuple[Item, ...]:
        size = self.size
        shape, n = size.shape, size.context
        kv = size.batch * n * shape.kv_layer_bytes
        on_host = size.layout.hidden_on_host
        hidden = size.chunk * size.chunks.visiting if on_host else n * size.hidden_token_bytes
        whose = f"chunks under way, {size.chunk:,} tokens" if on_host else f"{n:,} tokens"
        held = "three times: the context, a graph, an answer" if size.options.keeps_all else "whatever the context"
        states, graph_states = state_bytes(size)
        cluster_token, clusters = size.clusters
        items = [
            Item("weights", shape.weight_bytes, shape.weights_note),
            Item(
                "sinks and window",
                size.window_bytes,
                f"{size.window_tokens} tokens x {shape.full_layers} layers, {held}",
            ),
            Item(
                "sliding layers",
                size.sliding_bytes,
                f"{min(shape.sliding_window, n)} tokens x {shape.sliding_layers} layers",
            ),
            Item("states", states, f"{shape.state_layers} layers without keys, whatever the context"),
            Item(
                "states of a captured step", graph_states, f"{GRAPH_STATES} copies: to advance, and to undo two steps"
            ),
            Item("prefill: hidden states", hidden, f"{whose} x {shape.hidden}"),
            Item(
                "prefill: KV of one layer",
                kv - size.chunks.absent if size.chunks.in_state(size.chunk) else kv,
                f"{n:,} tokens x {show_bytes(shape.kv_layer_bytes)}",
            ),
            Item("prefill: KV being copied", kv * (size.kv_layers - 1), "of the layer before, to the host"),
            Item("prefill: rotary tables", n * rotary_bytes(size), "cosines and sines"),
            Item(
                "prefill: one chunk",
                size.chunk * size.chunks.token_bytes(size.chunk),
                f"{size.chunk:,} tokens{', in a layer with a state' if size.chunks.in_state(size.chunk) else ''}",
            ),
            Item("fragmentation", size.chunks.unusable(size.chunk), "memory that the allocator cannot use (estimate)"),
            Item(
                "codes of keys",
                n * size.coded_token_bytes + size.spare_codes,
                "with room for more, and scores of one layer",
            ),
            Item(
                "clusters of coded keys",
                n * cluster_token + clusters,
                "tail: a byte per key and head, means, sums of a layer",
            ),
            Item("prefill: codes of a head", n * size.codes.building, f"on their way into a {size.options.index}"),
            Item("prefill: image", size.image_excess(size.chunk), "embedding the largest one, beyond a chunk"),
            Item("logits", size.logits_bytes, f"one row of {shape.vocab:,} per sequence"),
            Item("CUDA context and workspaces", DEVICE_RESERVE, "assumed"),
        ]
        return tuple(item for item in items if item.bytes)

    def host(self) -> tuple[Item, ...]:
        shape, n, size = self.shape, self.size.context, self.host_size
        key, value = size.rows
        stored = f"{n:,} tokens x {shape.full_layers} layers x {shape.kv_heads} x {key + value} bytes"
        items = (
            Item("keys and values", n * size.token_bytes, stored),
            Item(
                "index", size.index_bytes(n), f"{self.size.options.index.removesuffix('-auto')}: {size.index_text(n)}"
            ),
            Item("clusters", size.cluster_bytes(n), "tail: a byte per key and head, and sums"),
            Item("input embedding", shape.host_table_bytes, "a row of it for each token crosses to the GPU"),
            *([] if shape.routed is None else [Item("experts", shape.routed.host_bytes, shape.routed.text)]),
            Item("prefill: hidden states", n * self.hidden_on_host, "page-locked, while reading"),
            Item("process and staging", self.processes * HOST_RESERVE, "assumed"),
        )
        often_empty = "clusters", "input embedding", "experts", "prefill: hidden states"
        return tuple(item for item in items if item.bytes or item.name not in often_empty)

    @property
    def hidden_on_host(self) -> int:
        """Bytes of host memory per token of context for hidden states while it is read."""
        return self._hidden_on_host(self.size)

    def _hidden_on_host(self, size: DeviceSize) -> int:
        return self.processes * size.hidden_token_bytes if size.layout.hidden_on_host else 0

    def within(self, device_limit: int, host_limit: int) -> bool:
        """Whether reading fits both memories."""
        sums = (sum(item.bytes for item in items) for items in (self.device(), self.host()))
        return all(held <= limit for held, limit in zip(sums, (device_limit, host_limit), strict=True))

    def largest_chunk(self, device_limit: int) -> int:
        sizes = choices(self.size)
        free = ((size, device_limit - size.fixed_bytes - self.size.context * size.token_bytes) for size in sizes)
        chunk = min(max(size.chunks.most(room) for size, room in free), self.size.context)
        if self.size.fixed_bytes + self.size.image_bytes > device_limit:
            return 0
        return max(chunk - chunk % CHUNK_STEP if chunk > CHUNK_STEP else chunk, 0)

    def largest_context(self, device_limit: int, host_limit: int) -> int:
        most = 0
        for size in choices(self.size):
            tokens = most_context(size, device_limit, self.size.options.prefill_chunk)
            beside = self._hidden_on_host(size)
            room = host_limit - self.processes * HOST_RESERVE - self.shape.host_weight_bytes
            held = self.host_size.most_tokens(room, beside)
            most = max(most, tokens if held is None else min(tokens, held))
        return most

    def full_attention(self, device_limit: int) -> FullAttention:
        size = self.size
        part, n = size.shape, size.context
        tokens_kv = size.batch * n * part.full_layers
        rest = (
            size.sliding_bytes
            + size.batch * part.states_bytes
            + size.logits_bytes
            + DEVICE_RESERVE
            + size.chunks.bytes(size.chunk)
        )
        plain = part.weight_bytes + tokens_kv * part.kv_layer_bytes + rest
        codes = n * size.coded_token_bytes  # of the index that answers with all keys do not use
        int8 = part.weight_bytes + tokens_kv * device_kv_bytes(part, int8=True) + rest + codes
        share = part.weight_bytes / self.shape.weight_bytes
        int4 = round(share * self.shape.parameters * Q4_BITS / 8)
        quantized_weights = part.weight_bytes if self.shape.quantized else min(part.weight_bytes, int4)
        quantized = quantized_weights + round(tokens_kv * part.kv_elements * Q8_BITS / 8) + rest
        reads = self._device_reads()
        bus = reads.bus / BUS_BANDWIDTH
        floor = bus + (reads.plain + reads.kv) / DEVICE_BANDWIDTH
        ours = bus + (reads.plain + reads.window) / DEVICE_BANDWIDTH + self._host_read() / HOST_BANDWIDTH
        return FullAttention(
            fits=plain <= device_limit,
            fits_int8=int8 <= device_limit,
            fits_quantized=quantized <= device_limit,
            bytes_16bit=plain,
            bytes_int8=int8,
            bytes_quantized=quantized,
            floor_ms=1000 * floor,
            retrieval_floor_ms=1000 * ours,
        )

    def speeds(self) -> tuple[SpeedEstimate, ...]:
        """Estimate the time of a token for GPU_BANDWIDTHS; empty for a model that attends to no whole context.

        Launches and the host's part take as long as on the H100's machine.
        """
        reads, size = self._device_reads(), self.size
        if not reads.reader.full_layers:
            return ()
        search = SEARCH_SECONDS * reads.reader.full_layers
        codes = size.context * size.coded_token_bytes
        found = []
        for gpu, bandwidth in GPU_BANDWIDTHS.items():
            bus = BUS_BANDWIDTH / 2 if gpu in PCIE_4 else BUS_BANDWIDTH
            step = LAYER_SECONDS * reads.reader.layers + reads.bus / bus
            full = step + READ_FACTOR * (reads.plain + reads.kv) / bandwidth
            ours = step + search + READ_FACTOR * (reads.plain + reads.window + codes) / bandwidth
            estimated = size.coded and not size.codes.staged
            found.append(SpeedEstimate(gpu, bandwidth, 1000 * full, 1000 * ours if estimated else None))
        return tuple(found)

    def _device_reads(self) -> DeviceReads:
        # GPUs that share heads read at once, those that share layers in turn
        reader = self.size.shape if self.processes > 1 else self.shape
        held, bus = reader.weight_bytes + reader.host_table_bytes, 0
        if reader.routed is not None and reader.routed.on_host:
            held, bus = held - reader.routed.device_bytes + reader.routed.packed_bytes, reader.routed.bus_bytes
        weights = max(0, held * reader.active_parameters // reader.parameters - bus)
        read = replace(self.size, shape=reader)
        plain = weights + read.sliding_bytes + read.batch * reader.states_bytes
        kv = read.batch * read.context * reader.full_layers * reader.kv_layer_bytes
        return DeviceReads(reader, plain, read.window_bytes, kv, bus)

    def _host_read(self) -> int:
        """Host bytes per token with a flat index: each key once per KV head, values of retrieved keys."""
        shape, size = self.shape, self.size
        keys = max(size.context - size.options.sink - size.options.window, 0)
        retrieved = size.options.retrieve_count(keys)
        rows = keys * shape.kv_heads if retrieved is None else min(retrieved * shape.q_heads, keys * shape.kv_heads)
        key_bytes, value_bytes = self.host_size.rows
        return size.batch * shape.full_layers * (keys * shape.kv_heads * key_bytes + rows * value_bytes)

    def reasons(
        self, device: tuple[Item, ...], host: tuple[Item, ...], device_limit: int, host_limit: int
    ) -> tuple[str, ...]:
        reasons = []
        positions = self.shape.max_positions
        if positions is not None and self.size.context > positions:
            reasons.append(
                f"the context of {self.size.context:,} tokens needs that many positions, {self.shape.name} has "
                f"{positions:,}: shorten the context or take a model trained for it"
            )
        peak, held = sum(item.bytes for item in device), sum(item.bytes for item in host)
        if peak > device_limit:
            chunk = self.largest_chunk(device_limit)
            each = "" if self.size.shape is self.shape else " on the fullest GPU"
            smaller = "shorten the context" if self.shape.quantized else "shorten the context, quantise the weights"
            cure = f"use prefill_chunk={chunk}" if chunk else f"{smaller} or take a larger GPU"
            reasons.append(
                f"prefill needs {show_bytes(peak)} of GPU memory{each}, {show_bytes(device_limit)} were given: {cure}"
            )
        if held > host_limit:
            reasons.append(
                f"the host needs {show_bytes(held)}, {show_bytes(host_limit)} were given: shorten the "
                "context or take a machine with more memory"
            )
        return tuple(reasons)

    def advice(self, full: FullAttention, device_limit: int) -> tuple[str, ...]:
        if not self.shape.full_layers:
            return ("No layer attends to the whole context, so there is nothing to retrieve: use the model as it is.",)
        floors = f"{full.floor_ms:.1f} ms per token against {full.retrieval_floor_ms:.1f} ms with a flat index"
        limit = show_bytes(device_limit)
        large, small, large_int8, small_int8 = (
            full_attention_breakeven(self.shape, speed, int8=int8)
            for int8 in (False, True)
            for speed in (H100_BANDWIDTH, DEVICE_BANDWIDTH)
        )
        if full.fits:
            return (
                f"When KV fits on the GPU, full attention there is exact, and it fits here: "
                f'{show_bytes(full.bytes_16bit)} of {limit}; index="full" takes it, and twice as much KV again for '
                f'each question that is answered. Bandwidth floors: {floors}. {FULL_KEYS} With index="auto" answers '
                f"attend to all keys of up to {large:,} tokens on an H100, {small:,} on an RTX 4090, and in int8 of up "
                f"to {large_int8:,} and {small_int8:,}, where these fit. Retrieval pays for longer texts, for many "
                "contexts that are kept at once, or for memory that something else needs.",
            )
        if full.fits_int8 or (full.fits_quantized and not self.shape.quantized):
            form = "KV in int8 does" if full.fits_int8 else 'weights in 4 bits (quantization="int4") and KV in int8 do'
            needed = full.bytes_int8 if full.fits_int8 else full.bytes_quantized
            return (
                f"Full attention with this KV on the GPU does not fit ({show_bytes(full.bytes_16bit)} of {limit}), but "
                f'{form} ({show_bytes(needed)}). With index="auto" answers attend to all keys of up to {large_int8:,} '
                f"tokens so on an H100, {small_int8:,} on an RTX 4090, one context at a time; "
                f'Config(full_attention="always") has them do so beyond that. {INT8_KEYS}',
            )
        form = "8-bit KV" if self.shape.quantized else "4-bit weights and 8-bit KV"
        return (
            f"Full attention does not fit {limit}: {show_bytes(full.bytes_16bit)} as planned, "
            f"{show_bytes(full.bytes_quantized)} with {form}. This is what retrieval is for.",
        )
