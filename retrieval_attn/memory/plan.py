"""What a model needs at a context length, before anything is loaded: `plan(...)`. Arithmetic only.

The formulas follow layer-major prefill (engine/prefill.py) and this package's caches. They reproduce, to 1 %, live
bytes traced through transformers' Llama-3-8B on meta tensors for chunks of 2K to 32K and contexts of 128K to 1M, and
through a layer of Qwen3.5-27B that keeps a state (tests/test_activations.py).
Speeds are not predicted; bytes per token are, and at named bandwidths these give a floor.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from retrieval_attn.config import Config, Place, resolve
from retrieval_attn.errors import ConfigError, MemoryPlanError
from retrieval_attn.memory.all_keys import beside_bytes, tokens_read_sooner
from retrieval_attn.memory.device import (
    DEVICE_RESERVE,
    GRAPH_STATES,
    DeviceSize,
    choices,
    cluster_bytes,
    most_context,
    rotary_bytes,
    state_bytes,
)
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.shape import ModelShape, model_shape
from retrieval_attn.memory.split import embedding_place, part_of, with_embedding
from retrieval_attn.memory.units import GIB, host_memory_bytes, parse_bytes, show_bytes

# Interpreter, libraries and pinned staging buffers.
HOST_RESERVE = 2 * GIB
# The floors below: a 24 GB card's memory (RTX 4090, 1008 GB/s) and dual-channel DDR5 as it is reached.
DEVICE_BANDWIDTH = 1.008e12
HOST_BANDWIDTH = 80e9
# Common 4-bit weights and 8-bit KV, scales included (llama.cpp's Q4_K_M and Q8_0).
Q4_BITS = 4.85
Q8_BITS = 8.5
CHUNK_STEP = 256
WIDTH = 100

_MEASURED = "Measured on an H100, Llama-3-8B's shape, ms per token"
_IN_INT8 = "9.2 and 10.2 (8.9 where the GPU reads what is named) at 128K, 10.7 and 10.5 at 192K"
FULL_KEYS = (
    f"{_MEASURED} with all keys and by retrieval: 6.7 and 8.7 at 16K, 8.8 and 9.4 at 64K, 10.2 and 9.8 at 96K; in int8 "
    f"7.8 at 64K, 8.4 at 96K, {_IN_INT8}."
)
INT8_KEYS = f"{_MEASURED} in int8 and by retrieval: {_IN_INT8}; with weights in 4 bits 6.5 and 7.7 at 128K."
H100_BANDWIDTH = 3.35e12


class Weights(TypedDict, total=False):
    """How a model that is planned would be loaded, see `LLM`."""

    dtype: Any
    quantization: str | None
    embedding: Place


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
    for answers, beside its codes; bytes_quantized: 4-bit weights and 8-bit KV.
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
class Plan:
    """Answer of `plan`. `fits` is False exactly when `reasons` is not empty. All sizes are bytes.

    device: what lives on the GPU at the peak of prefill; host: what lives in host memory after it.
    decode_bytes: GPU memory while generating, which does not depend on the context, but for index="device".
    largest_chunk: largest prefill chunk that fits, 0 if none does. largest_context: most tokens per sequence
    that fit both memories with the planned chunk (not bounded by the model's positions).
    gpus, split: how many GPUs share the model, and how; what is said of a GPU holds for the one that holds most.
    """

    shape: ModelShape
    config: Config
    context: int
    batch: int
    gpu_memory: int
    host_memory: int
    device: tuple[Item, ...]
    host: tuple[Item, ...]
    decode_bytes: int
    kv_bytes_per_token: int
    largest_chunk: int
    largest_context: int
    full_attention: FullAttention
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    gpus: int = 1
    split: str = "layers"

    @property
    def fits(self) -> bool:
        """Whether prefill, decode and the host's share all fit."""
        return not self.reasons

    @property
    def device_bytes(self) -> int:
        """GPU memory at the peak of prefill."""
        return sum(item.bytes for item in self.device)

    @property
    def host_bytes(self) -> int:
        """Host memory after prefill."""
        return sum(item.bytes for item in self.host)

    def require(self) -> Plan:
        """Return the plan if it fits; else raise MemoryPlanError with reasons and arithmetic."""
        if not self.fits:
            raise MemoryPlanError("; ".join(self.reasons) + f"\n{self}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON-ready values, `fits` and the two sums included."""
        plain = {key: value for key, value in vars(self).items() if key not in ("shape", "config")}
        return {
            "shape": asdict(self.shape),
            "config": self.config.to_dict(),
            **plain,
            "device": [asdict(item) for item in self.device],
            "host": [asdict(item) for item in self.host],
            "full_attention": asdict(self.full_attention),
            "reasons": list(self.reasons),
            "advice": list(self.advice),
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }

    def __str__(self) -> str:
        """An aligned table, the verdict and the advice; no line is longer than the texts in it."""
        return _table(self)


def plan(
    model_or_config_or_path: Any,
    context: int = 131072,
    gpu_memory: int | str = "24GiB",
    host_memory: int | str | None = None,
    batch: int = 1,
    config: Config | Mapping[str, Any] | None = None,
    gpus: int | tuple[int, str] = 1,
    **weights: Unpack[Weights],
) -> Plan:
    """What `batch` sequences of `context` tokens need on each GPU and on the host, and what fits.

    Loads no weights.
    model_or_config_or_path: a model, a PreTrainedConfig, a folder, or a hub name in the local cache.
    gpu_memory, host_memory: bytes or "24GiB"; host_memory None is this machine's. config: retrieval options (`Config`
    or a mapping). gpus: how many GPUs of `gpu_memory` each share the model's layers (device_map); a pair (how many,
    "heads"): its heads (tensor parallel, a process for each). dtype: of weights and KV; None is the config's.
    quantization, embedding: as `LLM` takes them, of a model that is yet to be loaded. Raises ConfigError,
    InputDataError, UnsupportedModelError; a plan that does not fit is returned, not raised.
    """
    from torch import nn

    if unknown := sorted(set(weights) - set(Weights.__annotations__)):
        raise ConfigError(
            f"plan does not know {', '.join(unknown)}; beside its own it takes dtype, quantization and embedding."
        )
    for name, value in (("context", context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
    options = resolve(config, {})
    device_limit = parse_bytes(gpu_memory, "gpu_memory")
    host_limit = host_memory_bytes() if host_memory is None else parse_bytes(host_memory, "host_memory")
    shape = model_shape(model_or_config_or_path, weights.get("dtype"), weights.get("quantization"))
    count, split = gpus if isinstance(gpus, tuple) and len(gpus) == 2 else (gpus, "layers")
    place = embedding_place(weights.get("embedding", "auto"), alone=count == 1)
    if not isinstance(model_or_config_or_path, nn.Module):
        shape = with_embedding(shape, place, device_limit)
    part = part_of(shape, count, split)
    # of several GPUs none keeps hidden states on the host (`engine/hidden_states.py`) or captures a step
    placed = options if count == 1 else options.replace(hidden_states="device", graph=False)
    size = DeviceSize(part, placed, context, batch).fitting(device_limit)
    arithmetic = _Arithmetic(shape, size, count if split == "heads" else 1)
    device, host = arithmetic.device(), arithmetic.host()
    return Plan(
        shape=shape,
        config=options,
        context=context,
        batch=batch,
        gpu_memory=device_limit,
        host_memory=host_limit,
        device=device,
        host=host,
        decode_bytes=arithmetic.device_size.decode_bytes,
        kv_bytes_per_token=shape.full_layers * shape.kv_layer_bytes,
        largest_chunk=arithmetic.largest_chunk(device_limit),
        largest_context=arithmetic.largest_context(device_limit, host_limit),
        full_attention=(full := arithmetic.full_attention(device_limit)),
        reasons=arithmetic.reasons(device, host, device_limit, host_limit),
        advice=arithmetic.advice(full, device_limit),
        gpus=count,
        split=split,
    )


@dataclass(frozen=True)
class _Arithmetic:
    """The formulas for one model, one set of options, one context length and batch.

    device_size: of the GPU that holds most of the model; processes: that share the host's memory.
    """

    shape: ModelShape
    device_size: DeviceSize
    processes: int

    @property
    def part(self) -> ModelShape:
        return self.device_size.shape

    @property
    def options(self) -> Config:
        return self.device_size.options

    @property
    def context(self) -> int:
        return self.device_size.context

    @property
    def batch(self) -> int:
        return self.device_size.batch

    @property
    def chunk(self) -> int:
        return self.device_size.chunk

    @property
    def host_size(self) -> HostSize:
        return HostSize(self.shape, self.options, self.batch)

    def device(self) -> tuple[Item, ...]:
        shape, n, size = self.part, self.context, self.device_size
        kv = self.batch * n * shape.kv_layer_bytes
        on_host = size.layout.hidden_on_host
        hidden = self.chunk * size.chunks.visiting if on_host else n * size.hidden_token_bytes
        whose = f"chunks under way, {self.chunk:,} tokens" if on_host else f"{n:,} tokens"
        held = "three times: the context, a graph, an answer" if self.options.keeps_all else "whatever the context"
        states, graph_states = state_bytes(size)
        cluster_token, clusters = cluster_bytes(size)
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
                kv - size.chunks.absent if size.chunks.in_state(self.chunk) else kv,
                f"{n:,} tokens x {show_bytes(shape.kv_layer_bytes)}",
            ),
            Item("prefill: KV being copied", kv * (size.kv_layers - 1), "of the layer before, to the host"),
            Item("prefill: rotary tables", n * rotary_bytes(size), "cosines and sines"),
            Item(
                "prefill: one chunk",
                self.chunk * size.chunks.token_bytes(self.chunk),
                f"{self.chunk:,} tokens{', in a layer with a state' if size.chunks.in_state(self.chunk) else ''}",
            ),
            Item("blocks of no use", size.chunks.unusable(self.chunk), "kept by the allocator beside a chunk, assumed"),
            Item(
                "codes of keys",
                n * size.coded_token_bytes + size.spare_codes,
                "index 'device': codes, room for more, and scores of a layer",
            ),
            Item(
                "clusters of coded keys",
                n * cluster_token + clusters,
                "tail: a byte per key and head, mean values, sums of a layer",
            ),
            Item("prefill: codes of a head", n * size.codes.building, f"on their way into a {self.options.index}"),
            Item("logits", size.logits_bytes, f"one row of {shape.vocab:,} per sequence"),
            Item("CUDA context and workspaces", DEVICE_RESERVE, "assumed"),
        ]
        return tuple(item for item in items if item.bytes)

    def host(self) -> tuple[Item, ...]:
        shape, n, size = self.shape, self.context, self.host_size
        key, value = size.rows
        stored = f"{n:,} tokens x {shape.full_layers} layers x {shape.kv_heads} x {key + value} bytes"
        items = (
            Item("keys and values", n * size.token_bytes, stored),
            Item("index", size.index_bytes(n), f"{self.options.index}: {size.index_text(n)}"),
            Item("clusters", size.cluster_bytes(n), "tail: a byte per key and head, and sums"),
            Item("input embedding", shape.host_table_bytes, "a row of it for each token crosses to the GPU"),
            Item("prefill: hidden states", n * self._hidden_on_host(self.device_size), "page-locked, while reading"),
            Item("process and staging", self.processes * HOST_RESERVE, "assumed"),
        )
        often_empty = "clusters", "input embedding", "prefill: hidden states"
        return tuple(item for item in items if item.bytes or item.name not in often_empty)

    def _hidden_on_host(self, size: DeviceSize) -> int:
        """Bytes of host memory per token of context for hidden states while it is read."""
        return self.processes * size.hidden_token_bytes if size.layout.hidden_on_host else 0

    def largest_chunk(self, device_limit: int) -> int:
        sizes = choices(self.device_size)
        free = ((size, device_limit - size.fixed_bytes - self.context * size.token_bytes) for size in sizes)
        chunk = min(max(size.chunks.most(room) for size, room in free), self.context)
        return max(chunk - chunk % CHUNK_STEP if chunk > CHUNK_STEP else chunk, 0)

    def largest_context(self, device_limit: int, host_limit: int) -> int:
        most = 0
        for size in choices(self.device_size):
            tokens = most_context(size, device_limit, self.options.prefill_chunk)
            beside = self._hidden_on_host(size)
            room = host_limit - self.processes * HOST_RESERVE - self.shape.host_table_bytes
            held = self.host_size.most_tokens(room, beside)
            most = max(most, tokens if held is None else min(tokens, held))
        return most

    def full_attention(self, device_limit: int) -> FullAttention:
        part, n, size = self.part, self.context, self.device_size
        tokens_kv = self.batch * n * part.full_layers
        rest = (
            size.sliding_bytes
            + self.batch * part.states_bytes
            + size.logits_bytes
            + DEVICE_RESERVE
            + size.chunks.bytes(self.chunk)
        )
        plain = part.weight_bytes + tokens_kv * part.kv_layer_bytes + rest
        codes = n * size.coded_token_bytes  # of the index that answers with all keys do not use
        int8 = part.weight_bytes + tokens_kv * beside_bytes(part, int8=True) + rest + codes
        share = part.weight_bytes / self.shape.weight_bytes
        quantized_weights = min(part.weight_bytes, round(share * self.shape.parameters * Q4_BITS / 8))
        quantized = quantized_weights + round(tokens_kv * part.kv_elements * Q8_BITS / 8) + rest
        # GPUs that share heads read at once, those that share layers in turn
        reader = part if self.processes > 1 else self.shape
        held = reader.weight_bytes + reader.host_table_bytes
        weights_read = held * reader.active_parameters // reader.parameters
        read = DeviceSize(reader, self.options, n, self.batch, size.layout)
        device_read = weights_read + read.sliding_bytes + self.batch * reader.states_bytes
        floor = (device_read + self.batch * n * reader.full_layers * reader.kv_layer_bytes) / DEVICE_BANDWIDTH
        host_read = self._host_read()
        ours = (device_read + read.window_bytes) / DEVICE_BANDWIDTH + host_read / HOST_BANDWIDTH
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

    def _host_read(self) -> int:
        """Host bytes per token with a flat index: each key once per KV head, values of retrieved keys."""
        shape = self.shape
        keys = max(self.context - self.options.sink - self.options.window, 0)
        retrieved = self.options.retrieve_count(keys)
        rows = keys * shape.kv_heads if retrieved is None else min(retrieved * shape.q_heads, keys * shape.kv_heads)
        key_bytes, value_bytes = self.host_size.rows
        return self.batch * shape.full_layers * (keys * shape.kv_heads * key_bytes + rows * value_bytes)

    def reasons(
        self, device: tuple[Item, ...], host: tuple[Item, ...], device_limit: int, host_limit: int
    ) -> tuple[str, ...]:
        reasons = []
        positions = self.shape.max_positions
        if positions is not None and self.context > positions:
            reasons.append(
                f"the context of {self.context:,} tokens needs that many positions, {self.shape.name} has "
                f"{positions:,}: shorten the context or take a model trained for it"
            )
        peak, held = sum(item.bytes for item in device), sum(item.bytes for item in host)
        if peak > device_limit:
            chunk = self.largest_chunk(device_limit)
            each = "" if self.part is self.shape else " on the fullest GPU"
            cure = (
                f"use prefill_chunk={chunk}"
                if chunk
                else "shorten the context, quantise the weights or take a larger GPU"
            )
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
            tokens_read_sooner(self.shape, speed, int8=int8)
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
        if full.fits_int8 or full.fits_quantized:
            form = "KV in int8 does" if full.fits_int8 else 'weights in 4 bits (quantization="int4") and KV in int8 do'
            needed = full.bytes_int8 if full.fits_int8 else full.bytes_quantized
            return (
                f"Full attention with this KV on the GPU does not fit ({show_bytes(full.bytes_16bit)} of {limit}), but "
                f'{form} ({show_bytes(needed)}). With index="auto" answers attend to all keys of up to {large_int8:,} '
                f"tokens so on an H100, {small_int8:,} on an RTX 4090, one context at a time; "
                f'Config(all_keys="always") has them do so beyond that. {INT8_KEYS}',
            )
        return (
            f"Full attention does not fit {limit}: {show_bytes(full.bytes_16bit)} as planned, "
            f"{show_bytes(full.bytes_quantized)} with 4-bit weights and 8-bit KV. This is what retrieval "
            "is for.",
        )


def _table(plan: Plan) -> str:
    """Two aligned lists of memory, limits, verdict, advice: lines of at most WIDTH columns (names may be longer)."""
    shape = plan.shape
    sequences = f"{plan.batch} x " if plan.batch > 1 else ""
    lines = [
        f"{shape.name} ({shape.model_type}, {shape.layers} layers, {shape.kv_heads} KV heads x "
        f"{shape.key_dim}, "
        f"{shape.dtype})",
        f"{sequences}{plan.context:,} tokens of context; KV {show_bytes(plan.kv_bytes_per_token)} per token, "
        f"{show_bytes(plan.batch * plan.context * plan.kv_bytes_per_token)} in all",
        "",
        *_section(f"{_gpu(plan)}, at the peak of prefill", plan.device, plan.device_bytes, plan.gpu_memory),
        f"  {'while generating':<30}{show_bytes(plan.decode_bytes):>12}",
        "",
        *_section("Host", plan.host, plan.host_bytes, plan.host_memory),
        "",
        f"largest prefill chunk that fits     {plan.largest_chunk:>12,} tokens (planned {plan.config.prefill_chunk:,})",
        f"largest context that fits           {plan.largest_context:>12,} tokens",
    ]
    if shape.max_positions is not None:
        lines.append(f"positions of the model              {shape.max_positions:>12,} tokens")
    lines += ["", "It fits." if plan.fits else "It does not fit:"]
    for text in plan.reasons:
        lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    for text in plan.advice:
        lines += ["", *textwrap.wrap(text, WIDTH)]
    return "\n".join(lines)


def _gpu(plan: Plan) -> str:
    return "GPU" if plan.gpus == 1 else f"Fullest of {plan.gpus} GPUs that share {plan.split}"


def _section(title: str, items: tuple[Item, ...], total: int, limit: int) -> list[str]:
    rows = [f"  {item.name:<30}{show_bytes(item.bytes):>12}  {item.detail}" for item in items]
    return [title, *rows, f"  {'sum':<30}{show_bytes(total):>12}  of {show_bytes(limit)}"]
