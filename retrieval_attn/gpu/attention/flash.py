"""Exact attention over keys in device memory, by the first backend that can serve the call.

All backends have one signature, (query, key, value) -> Partial, with a natural-log lse in float32. Each names the
reason if it is not installed (`missing`) or cannot serve a call (`refuse`). The choice is logged once per device,
dtype, head size and list of reasons. Layout and lse shape of each library are converted here. Causal rows without a
key never reach a backend: FlashAttention-2 writes +inf for them, other libraries -inf or nothing.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: at least one key and one query, no more queries than keys where causal.

    query (batch, q_heads, queries, head_dim); key, value (batch, kv_heads, keys, dim), the last axis contiguous.
    causal is aligned bottom-right.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.query.dtype, self.key.dtype, self.value.dtype

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def token_major(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as (batch, tokens, heads, dim)."""
        return self.query.transpose(1, 2), self.key.transpose(1, 2), self.value.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel and what it serves. `missing` and `refuse` give the reason in words, None when nothing is against it.

    capability: the oldest NVIDIA compute capability; 0: PyTorch's own code for the CPU; None: any device.
    dtypes: those of query, key and value, which share one; None: any floating ones.
    widest: the largest head_dim, None: any. one_dim: values are as wide as keys. aligned: rows' bytes divide by it.
    lacks: why the package or this PyTorch cannot run it.
    """

    name: str
    run: Callable[[Call], Partial]
    capability: int | None
    dtypes: tuple[torch.dtype, ...] | None = HALF
    widest: int | None = None
    one_dim: bool = True
    aligned: int = 16
    takes_mask: bool = False
    takes_softcap: bool = False
    lacks: Callable[[], str | None] = lambda: None

    def missing(self, device: torch.device) -> str | None:
        """Return why nothing can be run on `device`."""
        if self.capability is None:
            return None
        if not self.capability:
            return None if device.type == "cpu" else f"needs the CPU, the tensors are on {device.type}"
        if device.type != "cuda":
            return f"needs a CUDA device, the tensors are on {device.type}"
        if torch.version.hip or not torch.cuda.is_available():
            return "needs a CUDA device, PyTorch sees none"
        major, minor = _capability(device.index)
        if major < self.capability:
            return f"needs compute capability {self.capability}.0 or newer, the device has {major}.{minor}"
        return self.lacks()

    def refuse(self, call: Call) -> str | None:
        """Return why `call` cannot be served, on whatever device."""
        dtypes, (keys, values) = call.dtypes, (call.head_dim, call.value.shape[3])
        if self.dtypes is None:
            others = [dtype for dtype in dtypes if not dtype.is_floating_point]
            return f"needs floating dtypes, got {others[0]}" if others else None
        if dtypes[0] not in self.dtypes:
            return f"needs one of {', '.join(map(str, self.dtypes))}, got {dtypes[0]}"
        if len(set(dtypes)) > 1:
            return f"needs one dtype, got {', '.join(map(str, dtypes))}"
        if self.one_dim and keys != values:
            return f"needs one head_dim, got {keys} and {values}"
        if self.widest and keys > self.widest:
            return f"needs a head_dim up to {self.widest}, got {keys}"
        if any(dim * dtypes[0].itemsize % self.aligned for dim in (keys, values)):
            return f"needs rows of a multiple of {self.aligned} bytes, got head_dim {keys} and {values}"
        if call.mask is not None and not self.takes_mask:
            return "takes no mask"
        return "takes no soft-cap" if call.softcap is not None and not self.takes_softcap else None


# --- What several of them ask ---------------------------------------------------------------------------


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _function(module: str, name: str) -> Callable[..., Any] | str:
    """A function of an optional package, or why it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package's own deprecations are not this caller's
            return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except Exception as error:  # whatever a broken installation raises: it is the reason that users read
        return f"{module}.{name} cannot be imported: {type(error).__name__}: {error}"


def _square(run: Callable[[Call], Partial]) -> Callable[[Call], Partial]:
    """`run`, for kernels whose causal mask is aligned top-left: earlier keys and the diagonal block merge."""

    def split(call: Call) -> Partial:
        past = call.keys - call.queries
        if not call.causal or past == 0:
            return run(call)
        whole = run(_part(call, past, call.keys, causal=True))
        return merge([run(_part(call, 0, past)), whole])

    return split


PLANNED_KEYS = (1 << 15, 1 << 13, 1 << 11)
"""Numbers of keys for which plans are made."""


def _planned(run: Callable[[Call], Partial]) -> Callable[[Call], Partial]:
    """`run`, for a kernel that makes a plan for each new shape: it is called with few shapes only.

    A plan of cuDNN takes .2 to .5 s on an H100, and PyTorch keeps plans per thread. Every chunk of a prompt has other
    earlier keys, and every prompt another last chunk. Queries are padded to a power of two, and the keys before them
    are attended in pieces of PLANNED_KEYS. What is left of these has other kernels.
    """

    def attended(call: Call) -> Partial:
        queries, past = call.queries, call.keys - call.queries if call.causal else call.keys
        padding = (1 << (queries - 1).bit_length()) - queries
        wide = replace(call, query=_padded(call.query, padding))
        whole: Partial | None = None
        start = 0
        if call.causal:
            diagonal = _part(wide, past, call.keys, causal=True)
            key, value = _padded(diagonal.key, padding), _padded(diagonal.value, padding)
            whole = _first(run(replace(diagonal, key=key, value=value)), queries)
        for length in PLANNED_KEYS:
            while past - start >= length:
                part = _first(run(_part(wide, start, start + length)), queries)
                whole = part if whole is None else merge([whole, part])
                start += length
        if start < past:
            rest = _part(call, start, past)
            part = _choose(rest, [name for name in BACKENDS if name != "torch-cudnn"]).run(rest)
            whole = part if whole is None else merge([whole, part])
        assert whole is not None, "a call has keys"
        return whole

    return attended


def _part(call: Call, start: int, stop: int, *, causal: bool = False) -> Call:
    """The call over keys [start, stop)."""
    return replace(call, key=call.key[:, :, start:stop], value=call.value[:, :, start:stop], causal=causal)


def _padded(rows: Tensor, count: int) -> Tensor:
    """rows (batch, heads, tokens, dim) with `count` tokens of zeros after them."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count)) if count else rows


def _first(part: Partial, queries: int) -> Partial:
    """The partial output of the first queries."""
    if part.out.shape[2] == queries:
        return part
    return Partial(part.out[:, :, :queries].contiguous(), part.lse[:, :, :queries].contiguous())


# --- flash-attn 2 ---------------------------------------------------------------------------------------

FLASH_ATTN_SINCE = (2, 6)  # soft-cap, and an lse that is not padded


def _lacks_flash_attn() -> str | None:
    function = _function("flash_attn", "flash_attn_func")
    if isinstance(function, str):
        return f"package flash-attn: {function}"
    version = importlib.import_module("flash_attn").__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < FLASH_ATTN_SINCE:
        return f"package flash-attn {version} is too old, needs {'.'.join(map(str, FLASH_ATTN_SINCE))}"
    return None


def _run_flash_attn(call: Call) -> Partial:
    function: Any = _function("flash_attn", "flash_attn_func")
    out, lse, _ = function(
        *call.token_major(),
        softmax_scale=call.scale,
        causal=call.causal,
        softcap=call.softcap or 0.0,
        return_attn_probs=True,
    )
    return Partial(out.transpose(1, 2).float(), lse.float())


# --- flash-attn-4 ---------------------------------------------------------------------------------------


def _lacks_flash_attn_4() -> str | None:
    function = _function("flash_attn.cute", "flash_attn_func")
    return f"package flash-attn-4: {function}" if isinstance(function, str) else None


def _run_flash_attn_4(call: Call) -> Partial:
    function: Any = _function("flash_attn.cute", "flash_attn_func")
    with torch.cuda.device(call.query.device):  # compiled for, and launched on, the current device
        out, lse = function(
            *call.token_major(),
            softmax_scale=call.scale,
            causal=call.causal,
            softcap=call.softcap or 0.0,
            return_lse=True,
        )[:2]
    return Partial(out.transpose(1, 2).float(), lse.float())


# --- PyTorch: FlashAttention-2, cuDNN, memory-efficient ---------------------------------------------------


def _lacks_torch_flash() -> str | None:
    return None if torch.backends.cuda.is_flash_attention_available() else "this PyTorch was built without it"


def _run_torch_flash(call: Call) -> Partial:
    # Key heads may be fewer than query heads; a causal mask is aligned bottom-right.
    query, key, value = call.token_major()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, call.queries, call.keys, 0.0, call.causal, False, scale=call.scale
    )
    return Partial(out.transpose(1, 2).float(), lse.float())


def _lacks_cudnn() -> str | None:
    return None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN"


def prefers_cudnn(call: Call) -> bool:
    """Whether the call's device is one that flash-attn 2 was not made for: it reaches half of what cuDNN does."""
    device = call.query.device
    return device.type == "cuda" and not torch.version.hip and _capability(device.index)[0] >= 9


def _run_torch_cudnn(call: Call) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, None, True, 0.0, call.causal, False, scale=call.scale
    )
    return Partial(out.float(), lse.float().reshape(call.query.shape[:3]))


CAUSAL_BOTTOM_RIGHT = 2  # custom_mask_type of the memory-efficient kernel; 0 is no mask, 1 top-left


def _run_torch_efficient(call: Call) -> Partial:
    # The kernel wants as many key heads as query heads: one launch per member of a group, no copies.
    group = call.query.shape[1] // call.key.shape[1]
    query, key, value = call.token_major()
    bias = None if call.mask is None else _bias(call.mask, call.query)
    out = torch.empty(*call.query.shape[:3], call.value.shape[3], dtype=torch.float32, device=query.device)
    lse = torch.empty(call.query.shape[:3], dtype=torch.float32, device=query.device)
    for member in range(group):
        part, part_lse, *_ = torch.ops.aten._efficient_attention_forward(
            query[:, :, member::group],
            key,
            value,
            None if bias is None else bias[:, member::group],
            None,
            None,
            None,
            None,
            0.0,
            CAUSAL_BOTTOM_RIGHT if call.causal else 0,
            True,
            scale=call.scale,
        )
        out[:, member::group] = part.transpose(1, 2)
        lse[:, member::group] = part_lse[:, :, : call.queries]  # padded to a multiple of 32 queries
    if call.mask is not None:
        empty = ~call.mask.any(dim=-1)
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
        lse.masked_fill_(empty, -torch.inf)
    return Partial(out, lse)


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """A bool mask as the addend (batch, q_heads, queries, keys) the kernel reads, its rows 16-byte aligned.

    Masked keys get the dtype's lowest number, not -inf: a row without keys stays finite until it is cleared.
    """
    keys = mask.shape[-1]
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    padded = query.new_zeros(*shape[:-1], -(-keys // 16) * 16)
    bias = padded[..., :keys].masked_fill_(~mask.reshape(shape), torch.finfo(query.dtype).min)
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


# --- CPU, and everywhere --------------------------------------------------------------------------------


def _run_cpu_flash(call: Call) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.causal, attn_mask=None, scale=call.scale
    )
    return Partial(out.float(), lse.float())


def _run_math(call: Call) -> Partial:
    return math_attention(
        call.query, call.key, call.value, scale=call.scale, causal=call.causal, mask=call.mask, softcap=call.softcap
    )


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("flash-attn", _run_flash_attn, 8, widest=256, takes_softcap=True, lacks=_lacks_flash_attn),
        Backend("torch-flash", _run_torch_flash, 8, widest=256, lacks=_lacks_torch_flash),
        Backend("flash-attn-4", _run_flash_attn_4, 9, widest=256, takes_softcap=True, lacks=_lacks_flash_attn_4),
        Backend("torch-cudnn", _planned(_run_torch_cudnn), 8, widest=128, lacks=_lacks_cudnn),
        Backend("torch-efficient", _run_torch_efficient, 5, (*HALF, torch.float32), one_dim=False, takes_mask=True),
        Backend("torch-flash-cpu", _square(_run_cpu_flash), 0, (*HALF, torch.float32, torch.float64), aligned=1),
        Backend("math", _run_math, None, None),
    )
}
"""By name, in the order of preference: the best proven first."""


# Queries are taken in blocks whose score matrix stays under this many elements (256 MiB of float32).
MAX_SCORES = 1 << 26


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention of `query` over `key`, whatever the dtype; arguments and layout as in flash.attend.

    Scores, softmax and the weighted sum are float32. A query without any key gets out 0, lse -inf.
    """
    batch, q_heads, queries, _ = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = q_heads // kv_heads
    key32 = key.float().unsqueeze(2)  # (batch, kv_heads, 1, keys, head_dim)
    value32 = value.float().unsqueeze(2)
    out = torch.empty(batch, q_heads, queries, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, q_heads, queries, dtype=torch.float32, device=query.device)
    block = max(1, MAX_SCORES // max(1, batch * q_heads * keys))
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        rows = query[:, :, start:stop].float().reshape(batch, kv_heads, group, stop - start, -1)
        scores = (rows @ key32.transpose(3, 4)).mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap)
        scores = scores.reshape(batch, q_heads, stop - start, keys)
        if causal:
            position = torch.arange(keys - queries + start, keys - queries + stop, device=query.device)[:, None]
            scores.masked_fill_(torch.arange(keys, device=query.device) > position, -torch.inf)
        elif mask is not None:
            part = mask.expand(*mask.shape[:-2], queries, keys)[..., start:stop, :]
            scores = scores.masked_fill(~part, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
        weights = torch.exp_(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        lse[:, :, start:stop] = (top + torch.log(total)).squeeze(-1)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
        mixed = weights.reshape(batch, kv_heads, group, stop - start, keys) @ value32
        out[:, :, start:stop] = mixed.reshape(batch, q_heads, stop - start, value_dim)
    return Partial(out, lse)


logger = logging.getLogger(__name__)

CUDNN_QUERIES = 1024
"""Queries from which on cuDNN comes first."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
    backends: Sequence[str] | None = None,
) -> Partial:
    """Attention of `query` over all of `key`, as a Partial (float32 out and natural-log lse).

    query: (batch, q_heads, queries, head_dim). key: (batch, kv_heads, keys, head_dim), value: (batch,
    kv_heads, keys, value_dim); q_heads must be a multiple of kv_heads. scale multiplies q.k.
    causal: the last query sits at the last key (bottom-right); query i sees keys 0..keys - queries + i.
    mask: bool, broadcastable to (batch, q_heads, queries, keys), True = attend; not together with causal.
    softcap: scores become cap * tanh(score / cap) (Gemma-2).
    backends: names of BACKENDS to ask instead of all of them, in this order; for tests and comparisons.
    No keys, or a query that sees none: out 0, lse -inf.
    Raises ShapeError for shapes that cannot be attended, ConfigError for an unknown backend's name and
    BackendError, with every backend's reason, when none serves the dtype, device or head size.
    """
    _check(query, key, value, causal, mask)
    names = BACKENDS if backends is None else backends
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ConfigError(f"Unknown attention backends {', '.join(unknown)}; use some of {', '.join(BACKENDS)}.")
    queries, keys = query.shape[2], key.shape[2]
    if keys == 0 or queries == 0:
        return empty_partial(query, value.shape[3])
    # Kernels read rows of head_dim; PyTorch's CPU kernel returns garbage, not an error, for a strided last axis.
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    blind = max(0, queries - keys) if causal else 0  # these queries come before the first key
    rest = query[:, :, blind:]
    # the last query sees every key: for a query alone, causal hides nothing
    call = Call(rest, key, value, scale, causal and rest.shape[2] > 1, mask, softcap)
    part = _choose(call, names).run(call)
    if not blind:
        return part
    empty = empty_partial(query[:, :, :blind], value.shape[3])
    return Partial(torch.cat([empty.out, part.out], dim=2), torch.cat([empty.lse, part.lse], dim=2))


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> None:
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ShapeError(
            "attend needs (batch, heads, tokens, dim) tensors, got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ShapeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not match: batch, "
            "number of keys and head_dim must be equal."
        )
    if query.shape[1] % key.shape[1]:
        raise ShapeError(
            f"The number of query heads must be a multiple of the {key.shape[1]} key heads, got {query.shape[1]}."
        )
    if not query.device == key.device == value.device:
        raise ShapeError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
        )
    if causal and mask is not None:
        raise ShapeError("attend takes causal or a mask, not both; put the causal part into the mask.")


def _choose(call: Call, names: Sequence[str] | dict[str, Backend]) -> Backend:
    refusals: list[str] = []
    device = call.query.device
    for name in _ordered(call, names):
        backend = BACKENDS[name]
        reason = backend.missing(device) or backend.refuse(call)
        if reason is None:
            _log_choice(name, device.type, str(call.query.dtype), call.head_dim, tuple(refusals))
            return backend
        refusals.append(f"{name}: {reason}")
    raise BackendError(
        f"No attention backend serves query {tuple(call.query.shape)} {call.query.dtype} on {device} with key "
        f"{tuple(call.key.shape)} {call.key.dtype} and value {tuple(call.value.shape)} {call.value.dtype}; "
        f"tried {'; '.join(refusals) or 'none'}. Use float32, bfloat16 or float16."
    )


def _ordered(call: Call, names: Sequence[str] | dict[str, Backend]) -> list[str]:
    """The names in order of preference: cuDNN first for many queries on a device where it is far faster."""
    ordered = list(names)
    if "torch-cudnn" in ordered and names is BACKENDS and call.queries >= CUDNN_QUERIES and prefers_cudnn(call):
        ordered.remove("torch-cudnn")
        ordered.insert(0, "torch-cudnn")
    return ordered


@lru_cache(maxsize=256)
def _log_choice(name: str, device: str, dtype: str, head_dim: int, refusals: tuple[str, ...]) -> None:
    because = "; ".join(refusals) if refusals else "first choice"
    # Score matrices on a GPU are right but slow: worth a warning, not only a note.
    level = logging.WARNING if name == "math" and device == "cuda" else logging.INFO
    logger.log(level, "attention backend %s for %s %s head_dim %d (%s)", name, device, dtype, head_dim, because)
