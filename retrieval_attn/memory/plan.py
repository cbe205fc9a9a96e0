"""What a model needs at a context length, before anything is loaded: `plan(...)`. Arithmetic only.

The formulas follow layer-major prefill (runner/prefill.py) and this package's caches. They reproduce, to 1 %, live
bytes traced through transformers' Llama-3-8B on meta tensors for chunks of 2K to 32K and contexts of 128K to 1M, and
through a layer of Qwen3.5-27B that keeps a state (tests/memory/test_activations.py).
Bytes read per token, at named bandwidths, give a floor and an estimate of the speed (`Arithmetic.speeds`).
"""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict, Unpack

from retrieval_attn.config import Config, Place, resolve
from retrieval_attn.errors import ConfigError, MemoryPlanError
from retrieval_attn.memory.arithmetic import HOST_RESERVE, Arithmetic, FullAttention, Item, SpeedEstimate
from retrieval_attn.memory.device import DEVICE_RESERVE, DeviceSize, state_bytes
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.routed import fewest_on_host
from retrieval_attn.memory.shape import (
    ModelShape,
    embedding_place,
    model_shape,
    part_of,
    with_embedding,
    with_host_experts,
)
from retrieval_attn.memory.units import host_memory_bytes, parse_bytes, show_bytes, show_tokens

WIDTH = 100
CONTEXT_STEP = 1024
"""A context that `plan_fitting` chooses is a multiple of it."""
DEFAULT_CONTEXT = 131072
"""Tokens planned for when a model does not say how many positions it has."""


class WeightOptions(TypedDict, total=False):
    """How a model that is planned would be loaded, see `LLM`."""

    dtype: Any
    quantization: str | None
    embedding: Place


@dataclass(frozen=True)
class Plan:
    """Answer of `plan`. `fits` is False exactly when `reasons` is not empty. All sizes are bytes.

    device: what lives on the GPU at the peak of prefill; host: what lives in host memory after it.
    decode_bytes: GPU memory while generating, which does not depend on the context, but for index="device".
    largest_chunk: largest prefill chunk that fits, 0 if none does. largest_context: most tokens per sequence
    that fit both memories with the planned chunk, or with what index="auto" takes for them (not bounded by the model's
    positions).
    gpus, split: how many GPUs share the model, and how; what is said of a GPU holds for the one that holds most.
    config: by which all is counted; where index="auto" was asked for and one GPU has room, what it takes. choice: that
    in words; empty where the index is as it was asked for. speeds: estimates of the time per token on named GPUs.
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
    choice: str = ""
    speeds: tuple[SpeedEstimate, ...] = ()

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

    def context_reason(self, positions: int) -> str:
        """Say that fewer tokens than the model's positions fit; "" for a context that has all of them."""
        if self.context >= positions:
            return ""
        given = f"{show_bytes(self.gpu_memory)} GPU and {show_bytes(self.host_memory)} host memory"
        return f"of the model's {show_tokens(positions)} positions, that is what fits in {given}"

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
            "speeds": [asdict(one) for one in self.speeds],
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
    *,
    decide: bool = True,
    **weights: Unpack[WeightOptions],
) -> Plan:
    """Plan the memory of `batch` sequences of `context` tokens on each GPU and on the host, and the maximum that fits.

    Loads no weights.
    model_or_config_or_path: a model, a PreTrainedConfig, a folder, a hub name, of which config.json alone is
    downloaded, or "bundled".
    gpu_memory, host_memory: bytes or "24GiB"; host_memory None is this machine's. config: retrieval options (`Config`
    or a mapping). gpus: how many GPUs of `gpu_memory` each share the model's layers (device_map); a pair (how many,
    "heads"): its heads (tensor parallel, a process for each). decide: index="auto" is what a read on one GPU would take
    there, if the GPU can read host memory; False: the host's index, as without a GPU. dtype: of weights and KV; None is
    the config's.
    quantization, embedding: as `LLM` takes them, of a model that is yet to be loaded. Raises ConfigError,
    InputDataError, UnsupportedModelError; a plan that does not fit is returned, not raised.
    """
    from torch import nn

    if unknown := sorted(set(weights) - set(WeightOptions.__annotations__)):
        raise ConfigError(
            f"plan does not know {', '.join(unknown)}; in addition to its arguments it takes dtype, quantization and "
            "embedding."
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
    case = _Case(shape, part_of(shape, count, split), (count, split), batch, device_limit, host_limit)
    decide = decide and case.may_decide(options)
    taken = case.decided(options, context) if decide else options
    routed = shape.routed if count == 1 else None
    if routed is not None and case.arithmetic(taken, context).device_bytes > device_limit:
        case = case.with_experts(routed.count)
        taken = case.decided(options, context) if decide else options
        free = device_limit - case.arithmetic(taken, context).device_bytes
        case = case.with_experts(fewest_on_host(routed, free))
        shape = case.shape
    arithmetic = case.arithmetic(taken, context)
    device, host = arithmetic.device(), arithmetic.host()
    return Plan(
        shape=shape,
        config=taken,
        context=context,
        batch=batch,
        gpu_memory=device_limit,
        host_memory=host_limit,
        device=device,
        host=host,
        decode_bytes=arithmetic.size.decode_bytes,
        kv_bytes_per_token=shape.full_layers * shape.kv_layer_bytes,
        largest_chunk=arithmetic.largest_chunk(device_limit),
        largest_context=(
            case.most_decided(options, context) if decide else arithmetic.largest_context(device_limit, host_limit)
        ),
        full_attention=(full := arithmetic.full_attention(device_limit)),
        reasons=arithmetic.reasons(device, host, device_limit, host_limit),
        advice=arithmetic.advice(full, device_limit),
        gpus=count,
        split=split,
        choice=case.describe_bytes(options, taken),
        speeds=arithmetic.speeds(),
    )


def host_needs(model_config: Any, context: int, batch: int, config: Config) -> tuple[ModelShape, tuple[Item, ...]]:
    """Return the shape of a model and the host memory of reading `context` tokens, as `plan` for a GPU without limits.

    It searches for no largest context, which takes milliseconds. Raises as `plan`.
    """
    limit = 1 << 60
    shape = with_embedding(model_shape(model_config), embedding_place("auto", alone=True), limit)
    case = _Case(shape, part_of(shape, 1, "layers"), (1, "layers"), batch, limit, host_limit=1)
    return shape, case.arithmetic(config, context).host()


def plan_fitting(model_or_config_or_path: Any, most: int | None = None, **sizes: Any) -> Plan:
    """Plan for `most` tokens, or for as many as fit both memories if these are fewer.

    most: defaults to the model's positions. sizes: keywords of `plan` but `context`. If not even CONTEXT_STEP tokens
    fit, the plan is for these and says why.
    """
    if most is None:
        kind, method = sizes.get("dtype"), sizes.get("quantization")
        most = model_shape(model_or_config_or_path, kind, method).max_positions or DEFAULT_CONTEXT
    whole = plan(model_or_config_or_path, most, **sizes)
    if whole.fits or most <= CONTEXT_STEP:
        return whole
    fitting = max(min(whole.largest_context, most), CONTEXT_STEP)
    return plan(model_or_config_or_path, fitting - fitting % CONTEXT_STEP, **sizes)


@dataclass(frozen=True)
class _Case:
    """Fixed inputs of a plan, without options and tokens: a model on GPUs and a host with their bytes.

    part: of the GPU that holds most of the model. gpus: how many share it, and how.
    """

    shape: ModelShape
    part: ModelShape
    gpus: tuple[int, str]
    batch: int
    device_limit: int
    host_limit: int

    def with_experts(self, on_host: int) -> _Case:
        """Return a copy with this number of each layer's experts in host memory."""
        shape = with_host_experts(self.shape, on_host)
        return replace(self, shape=shape, part=shape)

    def arithmetic(self, options: Config, context: int) -> Arithmetic:
        """By the options as they are, in the layout that fits best."""
        count, split = self.gpus
        part, placed = self.part, options
        if count > 1:  # several GPUs neither move hidden states to the host (`runner/hidden_states.py`) nor capture
            part, placed = replace(part, hidden_movable=False), options.replace(graph=False)
        size = DeviceSize(part, placed, context, self.batch, with_images=True).fitting(self.device_limit)
        return Arithmetic(self.shape, size, count if split == "heads" else 1)

    def may_decide(self, options: Config) -> bool:
        """Whether a read may take another index than the one that is named."""
        undecided = options.index == "auto" and not options.index_options
        return undecided and self.gpus[0] == 1 and bool(self.shape.full_layers)

    def decided(self, options: Config, context: int) -> Config:
        """Return the choice of index="auto" for `context` tokens; `options` if the index stays on the host.

        A captured step's copies of states stay during a read, as when a second text is read. Clusters and hidden states
        on the host leave less for codes and rows there.
        """
        from retrieval_attn.memory.index_choice import fitting_index

        copies = state_bytes(DeviceSize(self.shape, options, context, self.batch))[1]
        image = DeviceSize(self.shape, options, context, self.batch, with_images=True).image_excess(
            options.prefill_chunk
        )
        free = self.device_limit - self.shape.weight_bytes - DEVICE_RESERVE - copies - image
        # eager steps read no host memory (`memory/device_room.py`)
        host_free, beside = 0, 0
        if options.graph is not False:
            clusters = HostSize(self.shape, options.replace(index="device"), self.batch).cluster_bytes(context)
            host_free = self.host_limit - HOST_RESERVE - self.shape.host_weight_bytes - clusters
        taken, _ = fitting_index(self.shape, options, context, free, self.batch, host_free=host_free)
        if taken is not options and host_free:
            beside = context * self.arithmetic(taken, context).hidden_on_host
        if beside:
            taken, _ = fitting_index(self.shape, options, context, free, self.batch, host_free=host_free - beside)
        return taken

    def most_decided(self, options: Config, context: int) -> int:
        """Most tokens for which what index="auto" takes fits, `context` or more if these do."""
        from retrieval_attn.index.auto import SKETCH_FROM

        def beyond(tokens: int) -> bool:
            return not self.arithmetic(self.decided(options, tokens), tokens).within(self.device_limit, self.host_limit)

        # a shorter text has the host's index and no smaller chunk: it may not fit where a longer one does
        least = next((tokens for tokens in (context, SKETCH_FROM) if not beyond(tokens)), 0)
        most = max(0, self.host_limit) // HostSize(self.shape, options, self.batch).token_bytes + 1
        return least + bisect.bisect_left(range(least + 1, max(most, least + 1)), True, key=beyond)

    def describe_bytes(self, options: Config, taken: Config) -> str:
        """Describe the choice of index="auto"; empty without one."""
        if taken is options:
            return ""
        from retrieval_attn.memory.index_choice import describe_bytes

        return describe_bytes(taken, self.shape.key_dim, options.prefill_chunk)


def _table(plan: Plan) -> str:
    """Two aligned lists of memory, limits, verdict, advice: lines of at most WIDTH columns (names may be longer)."""
    shape = plan.shape
    sequences = f"{plan.batch} x " if plan.batch > 1 else ""
    gpu = "GPU" if plan.gpus == 1 else f"Fullest of {plan.gpus} GPUs that share {plan.split}"
    lines = [
        f"{shape.name} ({shape.model_type}, {shape.layers} layers, {shape.kv_heads} KV heads x "
        f"{shape.key_dim}, "
        f"{shape.dtype})",
        f"{sequences}{plan.context:,} tokens of context; KV {show_bytes(plan.kv_bytes_per_token)} per token, "
        f"{show_bytes(plan.batch * plan.context * plan.kv_bytes_per_token)} in all",
        "",
        *_section(f"{gpu}, at the peak of prefill", plan.device, plan.device_bytes, plan.gpu_memory),
        f"  {'while generating':<30}{show_bytes(plan.decode_bytes):>12}",
        "",
        *_section("Host", plan.host, plan.host_bytes, plan.host_memory),
        "",
        f"largest prefill chunk that fits     {plan.largest_chunk:>12,} tokens (planned {plan.config.prefill_chunk:,})",
        f"largest context that fits           {plan.largest_context:>12,} tokens",
    ]
    if shape.max_positions is not None:
        lines.append(f"positions of the model              {shape.max_positions:>12,} tokens")
    lines += _speeds(plan)
    if plan.choice:
        lines += ["", *textwrap.wrap(plan.choice, WIDTH)]
    lines += ["", "It fits." if plan.fits else "It does not fit:"]
    for text in plan.reasons:
        lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    for text in plan.advice:
        lines += ["", *textwrap.wrap(text, WIDTH)]
    return "\n".join(lines)


def _speeds(plan: Plan) -> list[str]:
    if not plan.speeds:
        return []
    each = " per step of the batch" if plan.batch > 1 else " per token"
    rows = [("by retrieval", [one.retrieval_ms for one in plan.speeds])]
    if plan.full_attention.fits:
        rows.append(("over all keys", [one.full_ms for one in plan.speeds]))
    return [
        "",
        f"{f'ms{each}, estimated by bandwidth':<37}" + "".join(f"{one.gpu:>12}" for one in plan.speeds),
        *(f"  {name:<35}" + "".join(f"{'-' if ms is None else f'{ms:.1f}':>12}" for ms in row) for name, row in rows),
    ]


def _section(title: str, items: tuple[Item, ...], total: int, limit: int) -> list[str]:
    rows = [f"  {item.name:<30}{show_bytes(item.bytes):>12}  {item.detail}" for item in items]
    return [title, *rows, f"  {'sum':<30}{show_bytes(total):>12}  of {show_bytes(limit)}"]
