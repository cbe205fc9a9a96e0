"""Attention of the new tokens of each row over buffers of fixed size, as a captured graph runs it.

How much of a buffer is used is read from device memory, so one graph serves while the window grows. Three steps:
`stage_queries` lays the queries out for the host, `window_partials` stores the new key and value and attends to sinks
and tail, `merge_parts` joins its parts, the host's part and learned sink logits in float32.

Each is a Triton kernel (`kernels_triton.py`). Without Triton no step is captured. Tests replace the kernels by plain
PyTorch (`replaced_kernels`). Nothing here reads a tensor's value on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.compile.cache_dir import use_triton_folder
from retrieval_attn.errors import BackendError

logger = logging.getLogger(__name__)
_trial = threading.Lock()
_replacements: list[Callable[[str], Any]] = []

BLOCK_TOKENS = 64
"""Keys that one program reads at a time."""
MAX_SPLITS = 32
"""Parts that the keys of a window are cut into at most: the merge holds all of a head's in one tile."""


class WindowBuffers(NamedTuple):
    """Sinks and tail of one layer in memory that stays put.

    key (batch, kv_heads, slots, head_dim), value (batch, kv_heads, slots, value_dim), any finite numbers where nothing
    was stored. span: int32 (batch, 2), the used slots [low, high) of each row; the tokens to be stored go to slots from
    `high` on, which must be below `slots`. valid: (batch, slots) bool, False for padding, or None when all used slots
    are real tokens.
    """

    key: Tensor
    value: Tensor
    span: Tensor
    valid: Tensor | None = None


class HostResult(NamedTuple):
    """The host's partial as it comes back: out (batch * q_heads, value_dim) and lse (batch * q_heads,), float32.

    rows: int64 (batch * q_heads,), which of them belongs to query head h of row b, at b * q_heads + h; None: that one.
    estimated: in addition to lse, the share of the part's weights that is estimated, and where it is counted: a tally,
    float32 (batch * q_heads, 2), at b * q_heads + h the sum of what it is of all keys' weights, and how often it was
    added.
    """

    out: Tensor
    lse: Tensor
    rows: Tensor | None = None
    estimated: tuple[Tensor, Tensor] | None = None


class Parts(NamedTuple):
    """Partials over disjoint keys: out (batch, q_heads, splits, value_dim), lse (batch, q_heads, splits), float32."""

    out: Tensor
    lse: Tensor


def split_count(batch: int, kv_heads: int, slots: int, processors: int) -> int:
    """Into how many parts the keys are cut, so that about two programs per multiprocessor run."""
    needed = -(-2 * processors // max(1, batch * kv_heads))
    return max(1, min(needed, -(-slots // BLOCK_TOKENS), MAX_SPLITS))


def stage_queries(query: Tensor, target: Tensor, rows: Tensor | None) -> None:
    """Write query (batch, q_heads, 1, head_dim) as float32 to target (batch * q_heads, head_dim).

    rows: int64, where query head h of row b goes, at b * q_heads + h; None: there, in order.
    """
    step_kernels(query).stage_queries(query, target, rows)


def window_partials(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowBuffers,
    *,
    scale: float,
    softcap: float | None = None,
    reach: int | None = None,
    splits: int = 1,
) -> Parts:
    """Store the new keys and values (n, kv_heads, 1, dim), attend query (n, q_heads, 1, head_dim) to all.

    n: tokens of the window's rows, of one row after the other, equally many of each; they see each other causally.
    reach: only the last `reach` tokens are seen, the query's among them (sliding-window layers). New tokens are always
    real. `window.span` is left as it is: see `advance`. Returns up to `splits` partials, of which some may be empty.
    """
    parts: Parts = step_kernels(query).window_partials(query, key, value, window, scale, softcap, reach, splits)
    return parts


def merge_parts(
    parts: Parts,
    host: HostResult | None,
    sink_logits: Tensor | None,
    dtype: torch.dtype,
    rest: tuple[Tensor, Tensor] | None = None,
    paged: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention over the union of all parts, (batch, q_heads, 1, value_dim) in `dtype`, rounded once, at the end.

    sink_logits: (q_heads,), a part with weight exp(logit) and value 0 (GPT-OSS). rest: out (batch * q_heads, value_dim)
    and lse (batch * q_heads,), float32, of what was neither in `parts` nor named to the host. paged: the same
    of tokens in pages, in the order of `parts`. Parts may be empty (lse -inf). Adds to the host's tally, where there is
    one: `rest` and the host's share of its own are estimated.
    """
    merged: Tensor = step_kernels(parts.out).merge_parts(parts, host, sink_logits, dtype, rest, paged)
    return merged


def advance(spans: Tensor, stored: Tensor) -> None:
    """Every layer of spans int32 (layers, batch, 2) has stored stored[row] tokens more: int32 (batch,), 1 or 0."""
    spans[..., 1].add_(stored)


@contextmanager
def replaced_kernels(kernels_of: Callable[[str], Any]) -> Iterator[None]:
    """Use `kernels_of(module)` in this context for kernels of captured steps if Triton does not run.

    It applies to the whole process, as a replaced graph runtime does: threads that decode for the caller use it too.
    """
    _replacements.append(kernels_of)
    try:
        yield
    finally:
        _replacements.remove(kernels_of)


def step_kernels(tensor: Tensor, module: str = "decode.kernels_triton") -> Any:
    """Return `kernels_for`, or the replaced kernels of a captured step. Raises BackendError if there are neither."""
    if (kernels := kernels_for(tensor, module)) is not None:
        return kernels
    if not _replacements:
        raise BackendError(
            f"The kernels of {module} need Triton and a CUDA device, but the tensor is on {tensor.device}. Install "
            "Triton and a C compiler, or decode with graph=False."
        )
    return _replacements[-1](module)


def kernels_for(tensor: Tensor, module: str) -> Any:
    """The module of Triton kernels `retrieval_attn.gpu.<module>`, or None where they do not run on the tensor's device.

    None too, logged once, where Triton is not installed or cannot compile.
    """
    if tensor.device.type != "cuda":
        return None
    with _trial:  # threads would compile it side by side
        works = _triton_works(tensor.device)
    if not works:
        return None
    return importlib.import_module(f"retrieval_attn.gpu.{module}")


@functools.cache
def _triton_works(device: torch.device) -> bool:
    use_triton_folder()
    try:
        log_slow_compiles()
        load_launchers_in_turn()
        importlib.import_module("retrieval_attn.gpu.decode.kernels_triton").launch(device)
    except ImportError as error:
        logger.warning("Triton is not there (%s): decoding runs as plain PyTorch operations, slower", error)
        return False
    except Exception as error:  # Triton raises RuntimeError, OSError, CalledProcessError and errors of its own
        logger.warning(
            "Triton cannot compile here (%s: %s): decoding runs as plain PyTorch operations, slower. It needs a C "
            "compiler, such as gcc or what CC names, and Python's headers.",
            type(error).__name__,
            error,
        )
        return False
    return True


_loading = threading.Lock()


def load_launchers_in_turn() -> None:
    """Have Triton make launchers one after the other, also those of other libraries' kernels; again: the same.

    Raises ImportError where there is no Triton, RuntimeError where it finds no device.
    """
    import triton  # there is none without a GPU

    in_turn(triton.runtime.driver.active)


def in_turn(driver: Any) -> None:
    """Let one thread at a time make launchers of this driver. One that has no such classes is left as it is."""
    make = getattr(driver, "launcher_cls", None)
    if make is None or hasattr(make, "made_in_turn"):
        return

    def made_in_turn(*args: Any) -> Any:
        with _loading:
            began = time.perf_counter()
            made = make(*args)
            _log_seconds("made the launcher of", args[0], time.perf_counter() - began)
        return made

    setattr(made_in_turn, "made_in_turn", True)  # noqa: B010  not an assignment: mypy knows no such attribute
    driver.launcher_cls = made_in_turn


SLOW_SECONDS = 0.2
"""Compilations of Triton that take longer are logged: a request may have waited for them."""


class _CompileLog:
    """A compilation listener of Triton that logs slow ones. before: the listener until now, which is called too."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        if self._before is not None:
            self._before(src=src, times=times, cache_hit=cache_hit, **rest)
        _log_seconds("loaded" if cache_hit else "compiled", src, times.total / 1e6)


def log_slow_compiles() -> None:
    """Log every kernel that takes Triton longer than SLOW_SECONDS to compile from now on; again: the same.

    Raises ImportError if there is no Triton. Does nothing with one that takes no listener.
    """
    import triton

    options: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
    if hasattr(options, "listener") and not isinstance(options.listener, _CompileLog):
        options.listener = _CompileLog(options.listener)


def _log_seconds(what: str, source: Any, seconds: float) -> None:
    """Log that something was done for a kernel, with its compile-time numbers, if it took longer than SLOW_SECONDS.

    source: Triton's `ASTSource`, or an object with the same `name`.
    """
    if seconds <= SLOW_SECONDS:
        return
    names, constants = getattr(getattr(source, "fn", None), "arg_names", ()), getattr(source, "constants", {})
    given = [
        f"{names[place[0]]}={value}" for place, value in constants.items() if len(place) == 1 and place[0] < len(names)
    ]
    logger.info("Triton %s %s(%s) in %.1f s", what, getattr(source, "name", source), ", ".join(given), seconds)
