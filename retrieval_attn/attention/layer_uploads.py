"""How the keys and values of one layer come back from the host: block by block, and behind them the next layer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from retrieval_attn.attention.sequence import Batch, distinct
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.offload.upload import Uploads, UploadSpan, as_blocks

Cutter = Callable[[SequenceKV], UploadSpan]
"""How a path is cut into blocks."""


class LayerUploads:
    """Uploads of layer `number` of a batch to the device that it computes on."""

    def __init__(self, batch: Batch, number: int, device: torch.device) -> None:
        self._batch, self._number, self._device = batch, number, device

    def walk(
        self, stretches: Items[UploadSpan], dtype: torch.dtype | None, *, last: bool, cut: Cutter = UploadSpan.of
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the blocks of `Uploads.walk`, or without CUDA those of `as_blocks`.

        last: whether the layer walks no more in this pass; the next layer's keys, cut by `cut`, are then sent ahead.
        """
        if self._device.type != "cuda":
            like = torch.empty(0, dtype=dtype, device=self._device)
            return as_blocks(stretches, like, stored=dtype is None)
        return self._uploads().walk(stretches, dtype, self._next(cut) if last else stretches)

    def reserve(self, one: UploadSpan) -> bool:
        """Whether the device has the memory of a walk over `one`: it is held until the last layer's walk ends."""
        return self._device.type != "cuda" or self._uploads().reserve(one)

    def clear(self) -> None:
        """Forget what was sent ahead for this layer: it takes another way."""
        if self._device in self._batch.uploads:
            self._batch.uploads[self._device].clear()

    def _uploads(self) -> Uploads:
        if self._device not in self._batch.uploads:
            self._batch.uploads[self._device] = Uploads(self._device)
        return self._batch.uploads[self._device]

    def _next(self, cut: Cutter) -> list[UploadSpan]:
        """Return the spans that the next layer with tokens on the host will upload to the same device."""
        later = [number for sequence in self._batch.sequences for number in sequence.kv if number > self._number]
        if not later or self._batch.devices.get(min(later)) != self._device:
            return []
        return [cut(host) for host in distinct(self._batch.hosts(min(later))) if len(host)]
