"""Weights of a model on a CPU in 4, 8 or 16 bits, which its linear and embedding modules use as they are stored.

A few rows are multiplied by `cpu/matrix.py`, in float32 and without a loss beyond that of the stored numbers. A prefill
chunk is multiplied by the BLAS library with a widened copy of some rows of the matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.cpu.matrix import MIDDLE, ROW_TILE, StoredMatrix
from retrieval_attn.model.grouped import GroupedMatrix

KERNEL_ROWS = 16
"""Rows up to which the kernel multiplies: more are a prefill chunk."""
WIDENED = 1 << 22
"""Weights of a widened copy."""


class StoredWeight(Tensor):
    """A matrix (rows, columns) of a model, stored as numbers, scales and offsets: see `StoredMatrix`.

    dtype: of the module's inputs and outputs. floats: numbers of 4 bits are E2M1. Operations other than linear and
    embedding get a widened copy.
    """

    numbers: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    floats: bool
    matrix: StoredMatrix

    @staticmethod
    def __new__(
        cls: type[StoredWeight],
        numbers: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        *,
        dtype: torch.dtype,
        floats: bool,
    ) -> StoredWeight:
        """numbers: uint8 of two numbers each, int8, or the weights in bfloat16. scales, offsets: (rows, groups)."""
        shape = numbers.shape[0], numbers.shape[1] * (2 if numbers.dtype == torch.uint8 else 1)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.numbers, made.scales, made.offsets, made.floats = numbers, scales, offsets, floats
        made.matrix = made._matrix()
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool]]:
        """Return the names of the tensors that hold the numbers, and dtype and floats."""
        parts = ("numbers", "scales", "offsets")
        return [name for name in parts if getattr(self, name) is not None], (self.dtype, self.floats)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], made: Any, *_: Any) -> StoredWeight:
        own = parts["numbers"], parts.get("scales"), parts.get("offsets")
        return StoredWeight(*own, dtype=made[0], floats=made[1])

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the dtypes."""
        return f"StoredWeight({tuple(self.shape)}, numbers={self.numbers.dtype}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply and look up rows as stored; other functions run as usual."""
        if func is functional.linear and not kwargs and type(args[1]) is cls:
            inputs = args[0]
            if not (torch.is_grad_enabled() and inputs.requires_grad):
                return args[1].product(inputs, args[2] if len(args) > 2 else None)
        elif func is functional.embedding and type(args[1]) is cls:
            return args[1].rows(args[0])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation with widened weights; copies and aliases share what is stored."""
        first = args[0] if args else None
        given = kwargs or {}
        if isinstance(first, cls):
            if func in ALIASES:
                return first._shared(first.dtype)
            if func is torch.ops.aten._to_copy.default and torch.device(given.get("device") or "cpu").type == "cpu":
                return first._shared(given.get("dtype") or first.dtype)
        widened = torch.utils._pytree.tree_map_only(cls, lambda one: one.widened(), (args, given))
        return func(*widened[0], **widened[1])

    def _shared(self, dtype: torch.dtype) -> StoredWeight:
        return StoredWeight(self.numbers, self.scales, self.offsets, dtype=dtype, floats=self.floats)

    def with_bias(self, bias: Tensor) -> StoredMatrix:
        """Return the matrix with a bias (rows,), which its products are added to."""
        return self._matrix(bias.float().contiguous().numpy())

    def _matrix(self, bias: Any = None) -> StoredMatrix:
        numbers, scales, offsets = self.numbers, self.scales, self.offsets
        bits = numbers.view(torch.uint16) if numbers.dtype == torch.bfloat16 else numbers
        own = None if scales is None else scales.numpy(), None if offsets is None else offsets.numpy()
        return StoredMatrix(bits.numpy(), *own, bias, floats=self.floats)

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs (..., columns) times the transposed matrix, plus bias (rows,): (..., rows) in their dtype."""
        matrix = self.matrix
        count = inputs.numel() // matrix.columns
        flat = inputs.reshape(count, matrix.columns)
        if count > KERNEL_ROWS:
            out = self._wide_product(flat)
        else:
            numbers = flat.float().contiguous()
            out = torch.empty(count, matrix.rows)
            if count:
                matrix.multiply(numbers.data_ptr(), count, out.data_ptr())
            out = out.to(inputs.dtype)
        if bias is not None:
            out += bias
        return out.view(*inputs.shape[:-1], matrix.rows)

    def _wide_product(self, inputs: Tensor) -> Tensor:
        """Multiply many rows, (n, columns), by widened copies of parts of the matrix."""
        matrix = self.matrix
        step = max(ROW_TILE, WIDENED // matrix.columns)
        if step >= matrix.rows:
            return functional.linear(inputs, self.widened().to(inputs.dtype))
        out = inputs.new_empty(len(inputs), matrix.rows)
        for first in range(0, matrix.rows, step):
            part = self._widened(first, min(step, matrix.rows - first)).to(inputs.dtype)
            out[:, first : first + step] = functional.linear(inputs, part)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, (..., columns), in the weight's dtype. Raises IndexError for ids of no row."""
        flat = ids.reshape(-1).long().contiguous()
        out = torch.empty(len(flat), self.matrix.columns)
        if len(flat):
            if int(flat.min()) < 0 or int(flat.max()) >= self.matrix.rows:
                raise IndexError(f"a row number is not in 0 .. {self.matrix.rows - 1}")
            self.matrix.take(flat.data_ptr(), len(flat), out.data_ptr())
        return out.to(self.dtype).view(*ids.shape, -1)

    def widened(self) -> Tensor:
        """Return the weights, (rows, columns) in the weight's dtype, a new tensor."""
        return self._widened(0, self.matrix.rows).to(self.dtype)

    def _widened(self, first: int, count: int) -> Tensor:
        out = torch.empty(count, self.matrix.columns)
        self.matrix.widen(first, count, out.data_ptr())
        return out


ALIASES = (
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh.default,
)  # fmt: skip


class Storage(NamedTuple):
    """bits: of a number, 4 or 8; 16 for bfloat16. group: weights that share a scale, of which bfloat16 has none.

    half: scales are float16. moved: with offsets. floats: numbers of 4 bits are E2M1.
    """

    bits: int
    group: int = 32
    half: bool = False
    moved: bool = False
    floats: bool = False

    def can_store(self, rows: int, columns: int) -> bool:
        """Return True if kernels multiply a matrix of these sizes."""
        return rows % ROW_TILE == 0 and columns % self.group == 0 and columns > 0

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a stored matrix."""
        scales = 0 if self.bits == 16 else (1 + self.moved) * (2 if self.half else 4)
        return rows * columns * self.bits // 8 + rows * (columns // self.group) * scales

    def packed(self, matrix: GroupedMatrix) -> list[Tensor]:
        """Return numbers, scales, and offsets if there are any, of a matrix as they are stored.

        Numbers of 4 bits are 0 to 15, numbers of 8 bits fit int8. Scales have to be exact in their dtype.
        """
        numbers, scales, offsets = matrix
        if self.bits == 4:
            halves = numbers.view(torch.uint8).view(len(numbers), -1, 2, 16)
            numbers, offsets = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1), offsets + MIDDLE * scales
        else:
            numbers = numbers.view(torch.int8)
        dtype = torch.float16 if self.half else torch.float32
        return [numbers, *(one.to(dtype).contiguous() for one in (scales, offsets)[: 1 + self.moved])]

    def weight(self, matrices: Iterable[GroupedMatrix], rows: int, dtype: torch.dtype) -> StoredWeight:
        """Return a weight of `rows` rows, those of matrices one below the other; one matrix at a time is in memory."""
        found: list[Tensor] = []
        first = 0
        for matrix in matrices:
            parts = self.packed(matrix)
            found = found or [part.new_empty(rows, part.shape[1]) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[first : first + len(part)] = part
            first += len(parts[0])
        offsets = found[2] if len(found) > 2 else None
        return StoredWeight(found[0], found[1], offsets, dtype=dtype, floats=self.floats)
