"""Packed rows: several texts in one row, told apart by `position_ids` that start again, are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.model.padding import Padding

# What transformers' collators pass with packed rows, for attention of variable length.
_PACKING = ("cu_seq_lens_q", "cu_seqlens_q")


class PositionCheck:
    """Looks once at the positions of a forward, the first time it is asked; reading them waits for the device."""

    def __init__(self) -> None:
        self._done = False

    def require_one_text(self, padding: Padding | None, count: int, arguments: Mapping[str, Any]) -> None:
        """Raise UnsupportedModelError where each row's `count` new tokens are several texts.

        padding: of the forward; positions of rows with an attention mask are the caller's own affair, as in
        transformers, which takes a row for packed only without one. arguments: of a layer or of its attention, with
        position_ids (batch, count) if the model passes them on. Three-axis positions (images) say nothing of texts.
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
            # waits beside the driver: an ordinary copy would wait within it, and hold up threads that launch
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
