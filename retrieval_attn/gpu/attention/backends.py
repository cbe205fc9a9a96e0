"""The attention kernels that `flash.attend` can choose from, each behind the same three questions.

Is it there (`missing`)? Can it serve this call (`refuse`)? Then run it (`run`). What differs between the
kernels ends here: token-major layout, lse shapes. All give a natural-log lse. Causal rows
without a key never reach them: FlashAttention-2 writes +inf there, others -inf or nothing, so attend cuts them off.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial, merge
from retrieval_attn.gpu.attention.plain import math_attention

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
    """A kernel. `missing` and `refuse` give the reason in words, None when there is nothing against it."""

    name: str
    missing: Callable[[torch.device], str | None]
    refuse: Callable[[Call], str | None]
    run: Callable[[Call], Partial]


# --- What several of them ask ---------------------------------------------------------------------------


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _no_nvidia(device: torch.device, since: int) -> str | None:
    """Why `device` is no NVIDIA GPU of compute capability `since`.0 or newer; None when it is."""
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if torch.version.hip or not torch.cuda.is_available():
        return "needs a CUDA device, PyTorch sees none"
    major, minor = _capability(device.index)
    return None if major >= since else f"needs compute capability {since}.0 or newer, the device has {major}.{minor}"


@cache
def _function(module: str, name: str) -> Callable[..., Any] | str:
    """A function of an optional package, or why it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package's own deprecations are not this caller's
            return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except Exception as error:  # whatever a broken installation raises: it is the reason that users read
        return f"{module}.{name} cannot be imported: {type(error).__name__}: {error}"


def _half_refusal(call: Call) -> str | None:
    """What every half-precision kernel with one head size up to 256 asks of dtype and head size."""
    if call.query.dtype not in HALF:
        return f"needs bfloat16 or float16, got {call.query.dtype}"
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        return f"needs one dtype, got {call.query.dtype}, {call.key.dtype} and {call.value.dtype}"
    if call.head_dim > 256 or call.head_dim % 8 or call.value.shape[3] != call.head_dim:
        return f"needs one head_dim up to 256, a multiple of 8, got {call.head_dim} and {call.value.shape[3]}"
    return "takes no mask" if call.mask is not None else None


def _square(run: Callable[[Call], Partial], planned: bool = False) -> Callable[[Call], Partial]:
    """`run`, for kernels whose causal mask is aligned top-left: earlier keys and the diagonal block merge.

    planned: the kernel makes a plan for each new shape, see `_planned_lengths`.
    """

    def split(call: Call) -> Partial:
        past = call.keys - call.queries
        if not call.causal or past == 0:
            return run(call)
        whole = run(replace(call, key=call.key[:, :, past:], value=call.value[:, :, past:]))
        start = 0
        for length in _planned_lengths(past, call.queries) if planned else [past]:
            span = slice(start, start + length)
            before = replace(call, key=call.key[:, :, span], value=call.value[:, :, span], causal=False)
            whole, start = merge([run(before), whole]), start + length
        return whole

    return split


MOST_PLANNED = 4
"""Chunks of earlier keys in one call at most, where the lengths of calls are to be few."""


def _planned_lengths(past: int, queries: int) -> list[int]:
    """Lengths whose sum is `past`, of few kinds where a prompt is read in even chunks: MOST_PLANNED chunks, or one.

    A plan of cuDNN takes .2 to .5 s on an H100, and the past of every chunk is of another length: 16 plans for 128K
    tokens in chunks of 8,192, 3 with these lengths. An odd chunk, the last of a prompt, sees its past in one piece.
    """
    chunks, odd = divmod(past, queries)
    if odd or queries & (queries - 1):
        return [past]
    return [MOST_PLANNED * queries] * (chunks // MOST_PLANNED) + [queries] * (chunks % MOST_PLANNED)


# --- flash-attn 2 ---------------------------------------------------------------------------------------

FLASH_ATTN_SINCE = (2, 6)  # soft-cap, and an lse that is not padded


def _missing_flash_attn(device: torch.device) -> str | None:
    if reason := _no_nvidia(device, 8):
        return reason
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


def _missing_flash_attn_4(device: torch.device) -> str | None:
    if reason := _no_nvidia(device, 9):
        return reason
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


def _missing_torch_flash(device: torch.device) -> str | None:
    if reason := _no_nvidia(device, 8):
        return reason
    return None if torch.backends.cuda.is_flash_attention_available() else "this PyTorch was built without it"


def _refuse_torch_flash(call: Call) -> str | None:
    return _half_refusal(call) or ("takes no soft-cap" if call.softcap is not None else None)


def _run_torch_flash(call: Call) -> Partial:
    # Key heads may be fewer than query heads; a causal mask is aligned bottom-right.
    query, key, value = call.token_major()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, call.queries, call.keys, 0.0, call.causal, False, scale=call.scale
    )
    return Partial(out.transpose(1, 2).float(), lse.float())


def _missing_torch_cudnn(device: torch.device) -> str | None:
    if reason := _no_nvidia(device, 8):
        return reason
    return None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN"


def prefers_cudnn(call: Call) -> bool:
    """Whether the call's device is one that flash-attn 2 was not made for: it reaches half of what cuDNN does."""
    device = call.query.device
    return device.type == "cuda" and not torch.version.hip and _capability(device.index)[0] >= 9


def _refuse_torch_cudnn(call: Call) -> str | None:
    if reason := _half_refusal(call):
        return reason
    if call.head_dim > 128:
        return f"needs a head_dim up to 128, got {call.head_dim}"
    return "takes no soft-cap" if call.softcap is not None else None


def _run_torch_cudnn(call: Call) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, None, True, 0.0, call.causal, False, scale=call.scale
    )
    return Partial(out.float(), lse.float().reshape(call.query.shape[:3]))


def _missing_torch_efficient(device: torch.device) -> str | None:
    return _no_nvidia(device, 5)


def _refuse_torch_efficient(call: Call) -> str | None:
    dtype, dims = call.query.dtype, (call.head_dim, call.value.shape[3])
    if dtype not in (*HALF, torch.float32):
        return f"needs float32, bfloat16 or float16, got {dtype}"
    if not dtype == call.key.dtype == call.value.dtype:
        return f"needs one dtype, got {dtype}, {call.key.dtype} and {call.value.dtype}"
    multiple = 4 if dtype == torch.float32 else 8
    if dims[0] % multiple or dims[1] % multiple:
        return f"needs head sizes that are multiples of {multiple}, got {dims[0]} and {dims[1]}"
    return "takes no soft-cap" if call.softcap is not None else None


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


def _missing_cpu_flash(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"needs the CPU, the tensors are on {device.type}"


def _refuse_cpu_flash(call: Call) -> str | None:
    if call.value.shape[3] != call.head_dim:
        return f"needs one head_dim, got {call.head_dim} and {call.value.shape[3]}"
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        return f"needs one dtype, got {call.query.dtype}, {call.key.dtype} and {call.value.dtype}"
    if call.query.dtype not in (*HALF, torch.float32, torch.float64):
        return f"needs float64, float32, bfloat16 or float16, got {call.query.dtype}"
    if call.mask is not None or call.softcap is not None:
        return "takes neither mask nor soft-cap here"
    return None


def _run_cpu_flash(call: Call) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.causal, attn_mask=None, scale=call.scale
    )
    return Partial(out.float(), lse.float())


def _refuse_math(call: Call) -> str | None:
    for part in (call.query, call.key, call.value):
        if not part.dtype.is_floating_point:
            return f"needs floating dtypes, got {part.dtype}"
    return None


def _run_math(call: Call) -> Partial:
    return math_attention(
        call.query, call.key, call.value, scale=call.scale, causal=call.causal, mask=call.mask, softcap=call.softcap
    )


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("flash-attn", _missing_flash_attn, _half_refusal, _run_flash_attn),
        Backend("torch-flash", _missing_torch_flash, _refuse_torch_flash, _run_torch_flash),
        Backend("flash-attn-4", _missing_flash_attn_4, _half_refusal, _run_flash_attn_4),
        Backend("torch-cudnn", _missing_torch_cudnn, _refuse_torch_cudnn, _square(_run_torch_cudnn, planned=True)),
        Backend("torch-efficient", _missing_torch_efficient, _refuse_torch_efficient, _run_torch_efficient),
        Backend("torch-flash-cpu", _missing_cpu_flash, _refuse_cpu_flash, _square(_run_cpu_flash)),
        Backend("math", lambda device: None, _refuse_math, _run_math),
    )
}
"""By name, in the order of preference: the best proven first."""
