"""Sums of products of small integers, as the processor has them: what all scans of codes are made of.

AVX-512 VNNI sums four products u8 x s8 per instruction; AVX2 needs two or five for what that does; others get plain
vector arithmetic. The sums are the same.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, config

from retrieval_attn.index.kernels.dots import _shuffled

_INT8, _INT16, _INT32 = (ir.IntType(bits) for bits in (8, 16, 32))


def _compiled_features() -> str:
    """The processor features that Numba compiles for."""
    given = vars(config)["CPU_FEATURES"]
    if given is not None:
        return str(given)
    try:
        return str(binding.get_host_cpu_features().flatten())
    except RuntimeError:
        return ""


HAS_VNNI = "+avx512vnni" in _compiled_features() and "+avx512f" in _compiled_features()
"""Whether kernels use the processor's u8 x s8 instruction; else the same sums from what the others have."""
HAS_VNNI_256 = HAS_VNNI and "+avx512vl" in _compiled_features()
"""Whether kernels use it on 32 bytes."""
HAS_AVX2 = "+avx2" in _compiled_features()
"""Whether kernels may use sums of two 16-bit products, where there is no such instruction."""


def add_products(builder: Any, sums: Any, codes: Any, query: Any, vnni: bool) -> Any:
    """Emit sums + the products of u8 codes and s8 query numbers, 64 or 32 of each, four neighbours to an int32 lane."""
    if vnni:
        return _add_by_vnni(builder, sums, codes, query)
    if HAS_AVX2:
        return builder.add(sums, _sums_of_four(builder, codes, query))
    lanes = sums.type.count
    wide = ir.VectorType(_INT16, 4 * lanes)
    codes, query = builder.zext(codes, wide), builder.sext(query, wide)
    products = None
    for lane in range(4):
        own = list(range(lane, 4 * lanes, 4))
        left, right = (builder.sext(_shuffled(builder, one, one, own), sums.type) for one in (codes, query))
        product = builder.mul(left, right)
        products = product if products is None else builder.add(products, product)
    return builder.add(sums, products)


def add_small_products(builder: Any, sums: Any, pairs: list[tuple[Any, Any]], vnni: bool) -> Any:
    """`add_products` for up to 8 pairs of codes below 16 and query numbers: two products of those do not saturate."""
    if vnni or not HAS_AVX2:
        for codes, query in pairs:
            sums = add_products(builder, sums, codes, query, vnni)
        return sums
    lanes = sums.type.count
    halves = []
    for part in range(lanes // 8):
        total: Any = None
        for codes, query in pairs:
            own = (_part(builder, one, part) for one in (codes, query))
            two = _avx2(builder, "ub.sw", _INT16, 16, _INT8, 32, *own)
            total = two if total is None else builder.add(total, two)
        halves.append(_avx2(builder, "wd", _INT32, 8, _INT16, 16, total, ir.Constant(total.type, [1] * 16)))
    return builder.add(sums, _joined(builder, halves))


def _add_by_vnni(builder: Any, sums: Any, codes: Any, query: Any) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}"
    signature = ir.FunctionType(sums.type, [sums.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [sums, builder.bitcast(codes, sums.type), builder.bitcast(query, sums.type)])


def _sums_of_four(builder: Any, codes: Any, query: Any) -> Any:
    """Emit sums of four products by sums of two 16-bit ones, even neighbours and odd ones apart: u8 x s8 into 16 bits
    would be an instruction less, but it saturates.
    """
    half = ir.VectorType(_INT16, 16)
    shift, low = ir.Constant(half, [8] * 16), ir.Constant(half, [255] * 16)
    parts = []
    for part in range(codes.type.count // 32):
        own, numbers = (builder.bitcast(_part(builder, one, part), half) for one in (codes, query))
        even = builder.and_(own, low), builder.ashr(builder.shl(numbers, shift), shift)
        odd = builder.lshr(own, shift), builder.ashr(numbers, shift)
        sums = [_avx2(builder, "wd", _INT32, 8, _INT16, 16, *two) for two in (even, odd)]
        parts.append(builder.add(*sums))
    return _joined(builder, parts)


def _avx2(builder: Any, name: str, out: Any, outs: int, given: Any, count: int, left: Any, right: Any) -> Any:
    """Emit AVX2's sums of two neighbouring products, `pmadd` of that name."""
    own = ir.VectorType(given, count)
    signature = ir.FunctionType(ir.VectorType(out, outs), [own, own])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.avx2.pmadd.{name}"),
                        [left, right])  # fmt: skip


def _part(builder: Any, vector: Any, part: int) -> Any:
    """Emit 32 bytes of a vector of bytes."""
    return _shuffled(builder, vector, vector, list(range(32 * part, 32 * part + 32)))


def _joined(builder: Any, parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else _shuffled(builder, parts[0], parts[1], list(range(16)))
