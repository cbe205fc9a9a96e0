"""Experts in blocks of bytes: some in GPU memory, the rest in host memory that kernels read in place.

A block has an expert's words and scales. A table on the GPU has the address of each block, so captured steps read every
expert where it is stored, without an exchange with the host, and stay valid if blocks move: an address changes before
the bytes that it replaces do. Prefill copies the visited experts of a layer to a buffer that all layers share.

The words are those of `packed.py`. Scales of eight rows follow each other, so that a tile is read in one piece: pairs
of bfloat16 as there, or for MXFP4 one byte each, the exponent of a power of two.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import InputDataError
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.packed import STRIP, TILE_ROWS, PackedWeights
from retrieval_attn.gpu.packed_experts import ExpertMatrices, ExpertShape, pack_experts

ADDRESS_UNIT = 16
"""Bytes that the table of addresses counts in."""
CERTAIN = 5.0
"""Difference of two counts, in square roots of the larger one, by which an expert moves: the largest of 128 equally
likely experts' counts exceeds the smallest by about 5.
"""
TURN_SECONDS = 0.01
"""Seconds between looks at whether the thread that has the buffer moves experts."""
SAMPLE_BYTES = 64
"""Bytes of a block that tell experts apart."""
BLOCK_ALIGNMENT = 64
"""Bytes that a block's size is a multiple of."""
_EXPONENT_ZERO = 1
"""Difference of the stored exponent and that of a bfloat16 scale, which is half as large."""


class BlockLayout(NamedTuple):
    """Sizes of the blocks of a matrix of each expert. group: weights that share a scale. floats: numbers are E2M1."""

    shape: ExpertShape
    group: int
    floats: bool

    @property
    def strips(self) -> int:
        """Strips of a tile of rows."""
        return -(-self.shape.columns // STRIP)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.strips * STRIP // self.group)

    @property
    def word_bytes(self) -> int:
        """Bytes of an expert's words."""
        return self.shape.out * self.strips * STRIP // 2

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scale, or of scale and zero point, of a group."""
        return torch.uint8 if self.floats else torch.int32

    @property
    def nbytes(self) -> int:
        """Bytes of an expert."""
        scales = self.shape.out * self.groups * self.scale_dtype.itemsize
        return -(-(self.word_bytes + scales) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT

    def block(self, weights: PackedWeights) -> Tensor:
        """Return the block uint8 (nbytes,) of an expert. Raises InputDataError for E2M1 with scales between powers of
        two.
        """
        scales = weights.scales.contiguous().view(torch.int32).view(self.groups, -1, TILE_ROWS).transpose(0, 1)
        if self.floats:
            exponent = (scales >> 7) & 255
            if bool(((scales & 127) != 0).logical_and(exponent > 0).any()):
                raise InputDataError("scales of E2M1 numbers are not powers of two")
            scales = torch.where(exponent > 0, exponent + _EXPONENT_ZERO, 0).to(torch.uint8)
        found = torch.zeros(self.nbytes, dtype=torch.uint8, device=weights.words.device)
        found[: self.word_bytes] = weights.words.reshape(-1).view(torch.uint8)
        flat = scales.contiguous().view(-1).view(torch.uint8)
        found[self.word_bytes : self.word_bytes + len(flat)] = flat
        return found

    def parts(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words int32 (out / 8, strips, 32, 4) and the scales (out / 8, groups, 8) in a block."""
        tiles = self.shape.out // TILE_ROWS
        words = block[: self.word_bytes].view(torch.int32).view(tiles, self.strips, 32, 4)
        size = self.shape.out * self.groups * self.scale_dtype.itemsize
        scales = block[self.word_bytes : self.word_bytes + size].view(self.scale_dtype)
        return words, scales.view(tiles, self.groups, TILE_ROWS)

    def weights(self, block: Tensor) -> PackedWeights:
        """Return the weights in a block."""
        words, scales = self.parts(block)
        if self.floats:
            exponent = scales.to(torch.int32)
            bits = torch.where(exponent > 0, exponent - _EXPONENT_ZERO << 7, 0).to(torch.int16)
            scale = bits.view(torch.bfloat16)
            pairs = torch.stack([scale, -8 * scale], dim=-1)
        else:
            pairs = scales.contiguous().view(torch.bfloat16).view(*scales.shape, 2)
        pairs = pairs.transpose(0, 1).reshape(self.groups, self.shape.out, 2)
        return PackedWeights(words, pairs.contiguous(), self.shape.columns, floats=self.floats)


@dataclass(eq=False)
class ExpertBlocks:
    """Blocks of a matrix of all experts of a layer.

    card: uint8 (slots, nbytes), in GPU memory. host: uint8 (experts - slots, nbytes), host memory that the GPU maps.
    seen: `host` as a tensor of the GPU. places: slot of each expert, those of `host` after those of `card`. table:
    int64 (experts,), addresses of blocks in ADDRESS_UNIT bytes from the table's own. counts: int32 (experts,), tokens
    that visited an expert. kept: the same tensors by name, with version counters that moves do not change. sample: the
    first bytes of each expert's block, in the order of experts.
    """

    layout: BlockLayout
    card: Tensor
    host: Tensor
    seen: Tensor
    places: list[int]
    table: Tensor
    counts: Tensor
    kept: dict[str, Tensor]
    sample: Tensor | None = None

    @classmethod
    def of(cls, layout: BlockLayout, card: Tensor, host: Tensor, seen: Tensor) -> ExpertBlocks:
        """Return blocks whose first experts are in `card`."""
        count = layout.shape.experts
        table = torch.zeros(count, dtype=torch.int64, device=card.device)
        counts = torch.zeros(count, dtype=torch.int32, device=card.device)
        kept = {"card": card, "host": host, "table": table, "counts": counts}
        made = cls(layout, card.data, host.data, seen.data, list(range(count)), table.data, counts.data, kept)
        made.table.copy_(torch.tensor([made.address(made.block(expert)) for expert in range(count)]))
        return made

    def take_sample(self) -> None:
        """Set `sample`, once the blocks are filled."""
        rows = torch.cat([self.card[:, :SAMPLE_BYTES].cpu(), self.host[:, :SAMPLE_BYTES].cpu()])
        self.sample = rows[self.places].contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertBlocks:
        """Return itself: copies of a model share the blocks."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(experts * out, in)."""
        return self.layout.shape.experts * self.layout.shape.out, self.layout.shape.columns

    @property
    def device(self) -> torch.device:
        """Device that reads the blocks."""
        return self.table.device

    @property
    def floats(self) -> bool:
        """Return True if numbers are E2M1."""
        return self.layout.floats

    def is_on_host(self, expert: int) -> bool:
        """Return True if an expert is in host memory."""
        return self.places[expert] >= len(self.card)

    def block(self, expert: int) -> Tensor:
        """Return the bytes of an expert where it is stored, a tensor of the GPU."""
        place = self.places[expert]
        return self.card[place] if place < len(self.card) else self.seen[place - len(self.card)]

    def store(self, expert: int, block: Tensor) -> None:
        """Store the bytes of an expert. The CPU writes host memory: a first write takes a page."""
        place = self.places[expert]
        if place < len(self.card):
            self.card[place] = block
        else:
            self.host[place - len(self.card)] = block.cpu()

    def address(self, block: Tensor) -> int:
        """Return a block's entry of the table."""
        return (block.data_ptr() - self.table.data_ptr()) // ADDRESS_UNIT

    def redirect(self, expert: int, block: Tensor) -> None:
        """Change the address of an expert."""
        self.table[expert].fill_(self.address(block))


class PlacedExperts(ExpertMatrices):
    """Matrices of 4 bits in blocks."""

    weights: ExpertBlocks

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold the numbers, by name."""
        return self.weights.kept

    @property
    def has_kernel(self) -> bool:
        """Return True if `products` runs in a Triton kernel."""
        return kernels_for(self.weights.table, "packed_triton") is not None

    def products(self, numbers: Tensor, chosen: Tensor, bias: Tensor | None, *, counted: bool = False) -> Tensor:
        """Multiply as `PackedExperts.products`. counted: add the experts of the tokens to `counts`."""
        kernels = kernels_for(self.weights.table, "packed_triton")
        if kernels is not None:
            found: Tensor = kernels.placed_products(numbers, chosen, self, bias, counted=counted)
            return found
        flat = chosen.reshape(-1)
        if counted:
            self.count(torch.bincount(flat, minlength=self.experts))
        each = len(flat) // max(1, len(numbers))
        own = numbers.repeat_interleave(each, dim=0) if each > 1 else numbers
        parts = [numbers.new_empty(0, self.shape[1])]
        for expert, row in zip(flat.tolist(), own, strict=True):
            parts.append((self.matrices(expert, 1)[0].to(row.dtype) @ row)[None])
        product = torch.cat(parts)
        return product if bias is None else product + bias[flat]

    def count(self, tokens: Tensor) -> None:
        """Add tokens of each expert to `counts`."""
        self.weights.counts.add_(tokens.to(torch.int32))

    def matrices(self, first: int, count: int, buffer: LayerBuffer | None = None) -> Tensor:
        """Return a copy of the matrices of experts [first, first + count), bfloat16 (count, out, in).

        buffer: a copy of the layer's experts, read in place of host memory.
        """
        own, kernels = self.weights, kernels_for(self.weights.table, "packed_triton")
        _, out, columns = self.shape
        found = own.table.new_empty(count, out, columns, dtype=torch.bfloat16)
        for into, expert in zip(found, range(first, first + count), strict=True):
            block = None if buffer is None else buffer.block(own, expert)
            block = own.block(expert) if block is None else block
            if kernels is None:
                into.copy_(own.layout.weights(block).matrix)
            else:
                kernels.widen_block(own.layout, block, into)
        return found


Layer = tuple[ExpertBlocks, ...]
"""The matrices of a layer's experts, whose blocks have equal places."""


class _Swap(NamedTuple):
    """Exchange of expert `cold` in GPU memory and `hot` in host memory. gain: difference of their counts."""

    gain: int
    layer: Layer
    cold: int
    hot: int


class LayerBuffer:
    """GPU memory for copies of one layer's experts, shared by all layers of a model. Threads take turns."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        """layers: all that will use it, in their order."""
        self._turn, self._moving = threading.RLock(), False
        self._layer: Layer | None = None
        self._slots: dict[int, int] = {}
        self._used: Any = None
        self.layers = list(layers)
        slots = max(len(layer[0].host) for layer in layers)
        width = max(sum(own.layout.nbytes for own in layer) for layer in layers)
        self.bytes = torch.empty(slots, width, dtype=torch.uint8, device=layers[0][0].device)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerBuffer:
        """Return itself: copies of a model share the buffer."""
        return self

    @contextmanager
    def filled(self, layer: Layer, experts: Iterable[int]) -> Iterator[LayerBuffer | None]:
        """Copy these experts of a layer, unless they are there or in GPU memory; they stay until the block ends.

        None: experts are being moved by another thread, which may wait for one that this thread holds up; the kernel of
        `products` reads them by their addresses meanwhile.
        """
        while not self._turn.acquire(timeout=TURN_SECONDS):
            if self._moving:
                yield None
                return
        try:
            if self.bytes.is_cuda and self._used is not None:
                torch.cuda.current_stream(self.bytes.device).wait_event(self._used)
            if self._layer is not layer:
                self._layer, self._slots = layer, {}
            for expert in experts:
                if layer[0].is_on_host(expert) and expert not in self._slots:
                    slot = self._slots[expert] = len(self._slots)
                    for own, room in zip(layer, self._rooms(layer, slot), strict=True):
                        _copy(room, own.block(expert))
            try:
                yield self
            finally:
                if self.bytes.is_cuda:
                    self._used = torch.cuda.Event()
                    self._used.record(torch.cuda.current_stream(self.bytes.device))
        finally:
            self._turn.release()

    def block(self, blocks: ExpertBlocks, expert: int) -> Tensor | None:
        """Return the copy of an expert's block; None: there is none."""
        slot = self._slots.get(expert)
        if slot is None or self._layer is None:
            return None
        rooms = self._rooms(self._layer, slot)
        return next((room for own, room in zip(self._layer, rooms, strict=True) if own is blocks), None)

    def _rooms(self, layer: Layer, slot: int) -> list[Tensor]:
        sizes = [own.layout.nbytes for own in layer]
        return list(self.bytes[slot, : sum(sizes)].split(sizes))

    def move_hottest(self, most: int, settle: Callable[[], object]) -> int:
        """Move at most `most` experts that were visited more often than some in GPU memory there, each in exchange for
        one of these; return how many moved. Counts are halved.

        Steps of other threads may run meanwhile: before bytes are overwritten, their address has changed and the work
        that may have read it is over. settle: blocks until the GPU has executed all launches, of any thread.
        """
        with self._turn:
            self._moving = True
            try:
                swaps = self._swaps()[: min(most, len(self.bytes))]
                if swaps:
                    self._exchange(swaps, settle)
                return len(swaps)
            finally:
                self._moving = False

    def _swaps(self) -> list[_Swap]:
        """Return the exchanges that counts suggest, largest difference first."""
        counts = torch.stack([layer[0].counts for layer in self.layers]).tolist()
        found: list[_Swap] = []
        for layer, visits in zip(self.layers, counts, strict=True):
            experts = range(len(visits))
            inside = sorted((one for one in experts if not layer[0].is_on_host(one)), key=lambda one: visits[one])
            outside = sorted((one for one in experts if layer[0].is_on_host(one)), key=lambda one: -visits[one])
            found += [
                _Swap(visits[hot] - visits[cold], layer, cold, hot)
                for cold, hot in zip(inside, outside, strict=False)
                if visits[hot] - visits[cold] > CERTAIN * math.sqrt(visits[hot])
            ]
            layer[0].counts.bitwise_right_shift_(1)
        return sorted(found, key=lambda one: -one.gain)

    def _exchange(self, swaps: Sequence[_Swap], settle: Callable[[], object]) -> None:
        self._layer, self._slots = None, {}
        blocks = [
            (own, swap.cold, swap.hot, room)
            for slot, swap in enumerate(swaps)
            for own, room in zip(swap.layer, self._rooms(swap.layer, slot), strict=True)
        ]
        settle()
        for own, _, hot, room in blocks:
            _copy(room, own.block(hot))
            own.redirect(hot, room)
        settle()
        for own, cold, hot, _ in blocks:
            _copy(own.block(hot), own.block(cold))
            own.redirect(cold, own.block(hot))
        settle()
        for own, cold, hot, room in blocks:
            _copy(own.block(cold), room)
            own.redirect(hot, own.block(cold))
            own.places[cold], own.places[hot] = own.places[hot], own.places[cold]
        settle()


def _copy(into: Tensor, block: Tensor) -> None:
    """Copy a block by a kernel, which reads and writes host memory as others do; a driver's copy may move its pages."""
    torch.bitwise_or(block.view(torch.int64), 0, out=into.view(torch.int64))


def fill_blocks(matrices: Iterable[Sequence[Tensor]], blocks: ExpertBlocks) -> PlacedExperts:
    """Store matrices, as `pack_experts` takes them, in blocks, one expert at a time."""
    layout, device = blocks.layout, blocks.device
    alone = layout.shape._replace(experts=1)
    for expert, matrix in enumerate(matrices):
        one = pack_experts([matrix], alone, layout.group, device, floats=layout.floats)
        blocks.store(expert, layout.block(one.weights))
    return PlacedExperts(blocks, layout.shape.experts)
