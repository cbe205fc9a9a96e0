"""Unpack blocks of GGUF tensors: numbers of few bits with a scale, and maybe an offset, per 16 or 32 of a row.

Layouts: ggml/src/ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import InputDataError, UnsupportedModelError
from retrieval_attn.gpu.packed import float_codes
from retrieval_attn.model.gguf.file import GgufFile, StoredTensor
from retrieval_attn.model.grouped import GroupedMatrix
from retrieval_attn.model.stored import Storage, StoredWeight

CHUNK = 1 << 22
"""Weights that are unpacked at once, so that float32 copies stay small compared with a matrix."""


class BlockFormat(NamedTuple):
    """Name of a format, weights and bytes of a block, and its unpacking from blocks (n, nbytes) uint8.

    storage: as kernels on a CPU multiply it. unpack: returns numbers (n, groups, group), scales (n, groups) float32,
    and offsets like scales or None. A weight is number * scale + offset.
    """

    name: str
    size: int
    nbytes: int
    unpack: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
    storage: Storage

    def row_bytes(self, columns: int) -> int:
        """Return bytes of a row of `columns` weights."""
        return columns // self.size * self.nbytes

    def matrix(self, data: Tensor) -> GroupedMatrix:
        """Return the numbers, scales and offsets of rows (n, bytes of a row) uint8."""
        rows = len(data)
        numbers, scales, offsets = self.unpack(data.reshape(-1, self.nbytes))
        scales = scales.reshape(rows, -1)
        offsets = torch.zeros_like(scales) if offsets is None else offsets.reshape(rows, -1)
        return GroupedMatrix(numbers.reshape(rows, -1), scales, offsets)

    def kept(self, data: Tensor) -> GroupedMatrix:
        """Return the matrix of rows that stay in few bits: of floating-point numbers, their four bits."""
        matrix = self.matrix(data)
        return matrix._replace(numbers=float_codes(matrix.numbers)) if self.storage.floats else matrix

    def stored(self, data: Tensor, dtype: torch.dtype) -> StoredWeight:
        """Return rows (n, bytes of a row) uint8 on the CPU as a weight in 4 or 8 bits, without a loss.

        dtype: of the inputs and outputs of its module.
        """
        step = max(1, CHUNK // (data.shape[-1] // self.nbytes * self.size))
        return self.storage.weight(map(self.kept, data.split(step)), len(data), dtype)

    def weights(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights (..., columns) of bytes (..., bytes of a row) uint8, on the same device."""
        flat = data.reshape(-1, data.shape[-1])
        columns = data.shape[-1] // self.nbytes * self.size
        out = torch.empty(len(flat), columns, dtype=dtype, device=data.device)
        step = max(1, CHUNK // columns)
        for first in range(0, len(flat), step):
            out[first : first + step] = self.matrix(flat[first : first + step]).weights()
        return out.view(*data.shape[:-1], columns)


def _half(data: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block, float32 (n, 1)."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the lower four bits of bytes (..., n), and the upper ones after them, (..., 2 * n)."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _bits(data: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Return (n, len(shifts), m) of bytes (n, m): their bits from each shift on."""
    moved = torch.tensor(shifts, dtype=torch.uint8, device=data.device)
    return data[:, None, :] >> moved[None, :, None] & mask


def _fifth(data: Tensor) -> Tensor:
    """Return bit 5 of 32 numbers from 4 bytes of each block, moved to its place, (n, 32)."""
    return (_bits(data, tuple(range(8)), 1).transpose(1, 2) << 4).reshape(len(data), 32)


def _q4(data: Tensor, first: int) -> Tensor:
    return _nibbles(data[:, first : first + 16])[:, None]


def _q5(data: Tensor, first: int) -> Tensor:
    return (_nibbles(data[:, first + 4 : first + 20]) | _fifth(data[:, first : first + 4]))[:, None]


def _q4_0(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    scale = _half(data, 0)
    return _q4(data, 2), scale, -8 * scale


def _q4_1(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _q4(data, 4), _half(data, 0), _half(data, 2)


def _q5_0(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _q5(data, 2).view(torch.int8) - 16, _half(data, 0), None


def _q5_1(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _q5(data, 4), _half(data, 0), _half(data, 2)


def _q8_0(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return data[:, 2:].contiguous().view(torch.int8)[:, None], _half(data, 0), None


def _of_6_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums (n, 8) of a super-block from its 12 bytes: 8 of each, in 6 bits."""
    low, high, both = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat([low & 63, (both & 15) | (low >> 6 << 4)], dim=1)
    return scales, torch.cat([high & 63, (both >> 4) | (high >> 6 << 4)], dim=1)


def _scaled(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets (n, 8) float32 of a super-block of Q4_K or Q5_K."""
    scales, minimums = _of_6_bits(data[:, 4:16])
    return _half(data, 0) * scales.float(), -_half(data, 2) * minimums.float()


def _q4_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    numbers = _nibbles(data[:, 16:].reshape(len(data), 4, 32)).reshape(len(data), 8, 32)
    return numbers, *_scaled(data)


def _q5_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low = _nibbles(data[:, 48:].reshape(len(data), 4, 32)).reshape(len(data), 8, 32)
    return low | _bits(data[:, 16:48], tuple(range(8)), 1) << 4, *_scaled(data)


def _q6_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    count = len(data)
    low = _nibbles(data[:, :128].reshape(count, 2, 64)).reshape(count, 8, 32)
    high = _bits(data[:, 128:192].reshape(2 * count, 32), (0, 2, 4, 6), 3).reshape(count, 8, 32)
    numbers = (low | high << 4).view(torch.int8) - 32
    return (
        numbers.reshape(count, 16, 16),
        _half(data, 208) * data[:, 192:208].contiguous().view(torch.int8).float(),
        None,
    )


def _q2_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    count, both = len(data), data[:, :16]
    numbers = _bits(data[:, 16:80].reshape(2 * count, 32), (0, 2, 4, 6), 3).reshape(count, 16, 16)
    return numbers, _half(data, 80) * (both & 15).float(), -_half(data, 82) * (both >> 4).float()


def _q3_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    count = len(data)
    high = _bits(data[:, :32], tuple(range(8)), 1) ^ 1
    low = _bits(data[:, 32:96].reshape(2 * count, 32), (0, 2, 4, 6), 3).reshape(count, 8, 32)
    numbers = low.view(torch.int8) - (high << 2).view(torch.int8)
    scales = _nibbles(data[:, 96:104]) | _bits(data[:, 104:108], (0, 2, 4, 6), 3).reshape(count, 16) << 4
    return numbers.reshape(count, 16, 16), _half(data, 108) * (scales.view(torch.int8) - 32).float(), None


def _looked_up(values: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def numbers(data: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.int8, device=data.device)[_nibbles(data).int()][:, None]

    return numbers


_iq4 = _looked_up((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_fp4 = _looked_up((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the values of E2M1."""


def _iq4_nl(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _iq4(data[:, 2:]), _half(data, 0), None


def _iq4_xs(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low = _bits(data[:, 4:8], (0, 4), 15).transpose(1, 2).reshape(len(data), 8)
    high = _bits(data[:, 2:4], (0, 2, 4, 6), 3).transpose(1, 2).reshape(len(data), 8)
    numbers = _iq4(data[:, 8:].reshape(-1, 16)).reshape(len(data), 8, 32)
    return numbers, _half(data, 0) * ((low | high << 4).view(torch.int8) - 32).float(), None


def _mxfp4(data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _fp4(data[:, 1:]), torch.exp2(data[:, :1].float() - 128), None


FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Dtypes by number of the format."""
BFLOAT16, BFLOAT16_STORAGE = 30, Storage(16, 16)
"""Number of bfloat16 among the formats, and how a CPU stores it."""
BLOCKS = {
    2: BlockFormat("Q4_0", 32, 18, _q4_0, Storage(4, half=True)),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, Storage(4, moved=True)),
    6: BlockFormat("Q5_0", 32, 22, _q5_0, Storage(8, half=True)),
    7: BlockFormat("Q5_1", 32, 24, _q5_1, Storage(8, half=True, moved=True)),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, Storage(8, half=True)),
    10: BlockFormat("Q2_K", 256, 84, _q2_k, Storage(8, 16, moved=True)),
    11: BlockFormat("Q3_K", 256, 110, _q3_k, Storage(8, 16)),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, Storage(4, moved=True)),
    13: BlockFormat("Q5_K", 256, 176, _q5_k, Storage(8, moved=True)),
    14: BlockFormat("Q6_K", 256, 210, _q6_k, Storage(8, 16)),
    20: BlockFormat("IQ4_NL", 32, 18, _iq4_nl, Storage(8, half=True)),
    23: BlockFormat("IQ4_XS", 256, 136, _iq4_xs, Storage(8)),
    39: BlockFormat("MXFP4", 32, 17, _mxfp4, Storage(4, floats=True)),
}
"""Formats by their number in ggml."""


def block_format(stored: StoredTensor) -> BlockFormat:
    """Return the format of a tensor's blocks. Raises UnsupportedModelError for others, and for broken rows."""
    found = BLOCKS.get(stored.kind)
    if found is None:
        raise UnsupportedModelError(
            f"{stored.path}: tensor {stored.name} has format {stored.kind} of ggml. Supported: F32, F16, BF16, "
            f"{', '.join(one.name for one in BLOCKS.values())}; take a file in one of these."
        )
    if stored.shape[-1] % found.size:
        raise InputDataError(
            f"{stored.path}: tensor {stored.name} has rows of {stored.shape[-1]} weights in blocks of {found.size}; "
            "the file is damaged."
        )
    return found


def block_names(file: GgufFile) -> list[str]:
    """Return the names of the formats of blocks in `file`. Raises as `block_format`."""
    blocks = {block_format(stored).name for stored in file.tensors.values() if stored.kind not in FLOATS}
    return sorted(blocks)
