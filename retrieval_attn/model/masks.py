"""What a mask function of transformers says: causal, or sliding, or something that cannot be served, with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_SLIDING = "sliding_window_overlay.<locals>.inner_mask"
_BLOCKS = "blockwise_overlay.<locals>.inner_mask"


def read_mask(function: Callable[..., Any] | None, local_size: int | None) -> tuple[int | None, str | None]:
    """(window, None) of transformers' plain causal (window None) and plain sliding masks; (window, reason) of others.

    function: None for causal. local_size: the window, where transformers tells it beside the function. Blocks of
    image tokens are read where a mask has them, which waits for the device: a text without images has none.
    """
    from transformers.masking_utils import causal_mask_function

    if function is None or function is causal_mask_function:
        return local_size, None if local_size is None or function is None else f"causal within {local_size} tokens"
    parts = _closed_over(function)
    names = [getattr(part, "__qualname__", "") for part in parts]
    name = getattr(function, "__qualname__", repr(function))
    if name.startswith("or_masks") and names[1:] == [_BLOCKS]:
        blocks = _closed_over(parts[1])[0]  # number of a token's image, -1 for text
        if isinstance(blocks, Tensor) and not bool((blocks >= 0).any()):
            return read_mask(parts[0], local_size)
        return local_size, "in which the tokens of an image see each other, later ones too"
    if name.startswith("and_masks") and len(parts) == 2 and _SLIDING in names:
        size = _closed_over(parts[names.index(_SLIDING)])[0]
        other = parts[1 - names.index(_SLIDING)]
        if isinstance(size, int) and local_size in (None, size):
            return size, read_mask(other, None)[1]
    return local_size, f"{name} of {', '.join(names) or 'unknown parts'}"


def _closed_over(function: Any) -> list[Any]:
    """What a function closes over, tuples taken apart."""
    cells = (cell.cell_contents for cell in (getattr(function, "__closure__", None) or ()))
    return [part for held in cells for part in (held if isinstance(held, tuple | list) else (held,))]
