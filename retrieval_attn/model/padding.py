"""Attention masks of a batch: padding, transformers' mask functions, and refusal of several texts in one row.

A column counts positions of the padded batch from 0; a row's own tokens are its real columns, in order.
Without padding everywhere the answer is None, and no code downstream builds or copies a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError


class Padding:
    """The 2-D attention mask of one forward, copied to the CPU at most once for all layers."""

    def __init__(self, mask: Tensor) -> None:
        """mask: (batch, columns) bool, True = real token."""
        self._mask = mask
        self._cpu: Tensor | None = None

    def columns(self, start: int, stop: int, seen: Tensor | None) -> Tensor | None:
        """Real tokens among columns [start, stop) as (batch, stop - start) CPU bool; None when all are.

        seen: what an earlier forward said of columns [0, start), or None if all were real.
        Raises CacheMismatchError when the mask is too short or contradicts `seen`.
        A forward of a single column is taken to be real without reading the mask: a lone padded token has
        nothing to generate from, and reading would stall the device at every decoding step.
        """
        if self._mask.shape[1] < stop:
            raise CacheMismatchError(
                f"attention_mask covers {self._mask.shape[1]} tokens, but the cache holds {start} tokens and "
                f"gets {stop - start} more; pass a mask over all {stop} tokens, or a fresh cache."
            )
        if stop - start == 1:
            return None
        if self._cpu is None:
            self._cpu = self._mask.to("cpu", torch.bool)
        before = self._cpu[:, :start]
        agrees = bool(before.all()) if seen is None else torch.equal(before, seen[:, :start])
        if not agrees:
            raise CacheMismatchError(
                f"attention_mask marks other padding in the first {start} tokens than the cache was filled with; "
                "pass the mask of the earlier turns unchanged, or a fresh cache."
            )
        part = self._cpu[:, start:stop]
        return None if bool(part.all()) else part


def join(seen: Tensor | None, columns: int, new: Tensor | None, count: int, batch: int) -> Tensor | None:
    """Append `new` (batch, count) to `seen` (batch, columns); None stands for all real."""
    if seen is None and new is None:
        return None
    left = seen if seen is not None else torch.ones(batch, columns, dtype=torch.bool)
    right = new if new is not None else torch.ones(batch, count, dtype=torch.bool)
    return torch.cat([left, right], dim=1)


_SLIDING = "sliding_window_overlay.<locals>.inner_mask"
_BLOCKS = "blockwise_overlay.<locals>.inner_mask"


class ReadMask(NamedTuple):
    """Facts of a mask function of transformers.

    window: keys a query may look back to, itself included; None: all. unsupported: why no cache of this package can
    serve it, or None. blocks: (batch, columns of the forward or more), the number of a token's image, whose tokens see
    each other, and -1 for text; None without images.
    """

    window: int | None
    unsupported: str | None = None
    blocks: Tensor | None = None


def read_mask(function: Callable[..., Any] | None, local_size: int | None) -> ReadMask:
    """Read plain causal and sliding masks, also with blocks of image tokens; `unsupported` describes any other mask.

    function: mask function of transformers; None for causal. local_size: window that transformers passes in addition.
    Blocks of image tokens are read from the device if the mask has them: a text without images has none.
    """
    from transformers.masking_utils import causal_mask_function

    if function is None or function is causal_mask_function:
        plain = local_size is None or function is None
        return ReadMask(local_size, None if plain else f"causal within {local_size} tokens")
    parts = _closed_over(function)
    names = [getattr(part, "__qualname__", "") for part in parts]
    name = getattr(function, "__qualname__", repr(function))
    if name.startswith("or_masks") and names[1:] == [_BLOCKS]:
        blocks = _closed_over(parts[1])[0]
        found = read_mask(parts[0], local_size)
        if not isinstance(blocks, Tensor):
            return found._replace(unsupported=f"{name} of {', '.join(names)}")
        return found._replace(blocks=blocks) if bool((blocks >= 0).any()) else found
    if name.startswith("and_masks") and len(parts) == 2 and _SLIDING in names:
        size = _closed_over(parts[names.index(_SLIDING)])[0]
        other = parts[1 - names.index(_SLIDING)]
        if isinstance(size, int) and local_size in (None, size):
            return read_mask(other, None)._replace(window=size)
    return ReadMask(local_size, f"{name} of {', '.join(names) or 'unknown parts'}")


def block_spans(blocks: Tensor, count: int) -> tuple[tuple[int, int], ...] | None:
    """Return [start, stop) of each image among the first `count` columns of `ReadMask.blocks`; None if rows differ."""
    numbers = blocks[:, :count].tolist()
    if any(row != numbers[0] for row in numbers):
        return None
    runs = [(number, len(list(run))) for number, run in groupby(numbers[0])]
    stops = list(accumulate(length for _, length in runs))
    return tuple((stop - length, stop) for (number, length), stop in zip(runs, stops, strict=True) if number >= 0)


def _closed_over(function: Any) -> list[Any]:
    """Return the closure values of a function, with tuples flattened."""
    cells = (cell.cell_contents for cell in (getattr(function, "__closure__", None) or ()))
    return [part for held in cells for part in (held if isinstance(held, tuple | list) else (held,))]


# What transformers' collators pass with packed rows, for attention of variable length.
_PACKING = ("cu_seq_lens_q", "cu_seqlens_q")


class PositionCheck:
    """Check of the positions of one forward, made once: reading them synchronizes with the device."""

    def __init__(self) -> None:
        self._done = False

    def require_one_text(self, padding: Padding | None, count: int, arguments: Mapping[str, Any]) -> None:
        """Raise UnsupportedModelError if `count` new tokens of a row belong to several texts.

        padding: padding of the forward; rows with an attention mask are not checked, as in transformers. arguments:
        keyword arguments of a layer or of its attention, with position_ids (batch, count) if the model passes them on.
        Three-axis positions (images) are not checked.
        """
        if self._done or count == 1:
            return
        self._done = True
        if any(arguments.get(name) is not None for name in _PACKING):
            raise UnsupportedModelError(_message("cu_seq_lens_q was given"))
        place = arguments.get("position_ids")
        if padding is not None or not isinstance(place, Tensor) or place.ndim != 2 or place.shape[1] != count:
            return
        if is_tracing(place):  # there are no values to look at
            return
        if place.is_cuda:
            # an ordinary copy would wait inside the driver and block threads that launch
            place, stream = place.to("cpu", non_blocking=True), torch.cuda.current_stream(place.device)
            stream.synchronize()
        jumps = (place[:, 1:] - place[:, :-1] != 1).nonzero()
        if len(jumps):
            row, column = jumps[0].tolist()
            before, after = place[row, column : column + 2].tolist()
            raise UnsupportedModelError(
                _message(f"position_ids of row {row} go from {before} to {after} at token {column + 1}")
            )


def _message(seen: str) -> str:
    return (
        f"Each row must be one text whose positions count up by one, but {seen}: several texts packed into one row. A "
        "RetrievalCache would let them attend to each other. Give each text a row of its own, with padding and an "
        "attention_mask; if the row is one text, pass an attention_mask of ones."
    )
