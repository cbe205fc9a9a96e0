"""Sizes of codes that a device searches by, as far as they are chosen: which there are, and how many keys they pick."""

from __future__ import annotations

from retrieval_attn.index.code_layout import MIN_DEFAULT_BYTES, CodeLayout
from retrieval_attn.index.device import named_count

SMALLER_CODES = ((6, 3), (5, 4), (4, 6), (3, 12), (2, 16))
"""Where the usual code does not fit: sixteenths of a byte per number of a key, and keys scored exactly per key wanted,
which make up for what the code no longer tells. Of the best 100 of 131,072 synthetic keys of head_dim 128 they hold
.991, .985, .981, .984 and .953 (usual: .994), of a hard head .97, .96, .93, .92 and .83 (.98)."""
BROUGHT_CODES = 2, 32
"""The same for codes in host memory, all of which the bus brings for every token: 128K of Llama-3-8B's shape take 15.0
ms with 16 bytes, by which 1,600 a query are picked, and 18.6 with 24, by which 600 are (H100, PCIe 5). The 157 that
finer codes then name hold .961 and .951 of the best 100."""
FINER_FROM = 6
"""Keys named per key wanted from which on finer codes are worth their bytes."""
MAX_CANDIDATES = 2048
"""Keys named per query with those at most: what the GPU picks them from fits one program."""


def code_sizes(head_dim: int, wanted: int | None, *, finer: bool = True) -> list[dict[str, int]]:
    """Options of a `CodeLayout` by falling bytes per key, the usual ones (none named) first; wanted: keys, None: all.

    Those that name many keys come with finer codes on the host, of as many bytes as the usual ones, if `finer`.
    """
    usual = CodeLayout().bytes_for(head_dim)
    smaller = ((_bytes_of(part, head_dim), rescore) for part, rescore in SMALLER_CODES)
    sizes = {
        size: rescore
        for size, rescore in smaller
        if size < usual and wanted is not None and wanted * rescore <= MAX_CANDIDATES
    }
    found: list[dict[str, int]] = [{}]
    for size, rescore in sizes.items():
        found.append({"key_bytes": size, "rescore": rescore})
        if finer and rescore >= FINER_FROM:
            found[-1]["finer_bytes"] = usual
    return found


def brought_size(head_dim: int, wanted: int | None) -> dict[str, int | bool] | None:
    """Options of a `CodeLayout` whose codes lie in host memory; None: they would pick too many keys. wanted: as above,
    with estimates, without which twice as many would be picked.
    """
    part, rescore = BROUGHT_CODES
    if wanted is None or named_count(rescore, wanted, estimated=True) > MAX_CANDIDATES:
        return None
    usual = CodeLayout().bytes_for(head_dim)
    size = min(usual, _bytes_of(part, head_dim))
    finer: dict[str, int | bool] = {"finer_bytes": usual} if size < usual else {}
    return {"key_bytes": size, "rescore": rescore, "codes_on_host": True, **finer}


def _bytes_of(part: int, head_dim: int) -> int:
    """Of a code with so many sixteenths of a byte per number, a multiple of 8."""
    return max(MIN_DEFAULT_BYTES, -(-head_dim * part // 128) * 8)
