"""The host side of attention: stored keys and values, and attention over them. NumPy and Numba only; never
torch.
"""

from __future__ import annotations

from retrieval_attn.cpu.attend import (
    Partial,
    attend_ids,
    attend_ids_heads,
    attend_range,
    attend_range_heads,
    merge_partials,
)
from retrieval_attn.cpu.formats import Format, from_float32, to_float32
from retrieval_attn.cpu.host_attend import HostPartial, attend_path, attend_paths, exact_lse, prepare
from retrieval_attn.cpu.pool import JobError, Pool, default_pool, set_default_pool
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.step.plan import LayerStep, StepCost
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.cpu.store import SequenceKV, held_bytes

# The root also shows this folder as the link `cpu`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("cpu is a link to retrieval_attn/cpu; write `import retrieval_attn.cpu` instead")

__all__ = [
    "Format",
    "HostPartial",
    "JobError",
    "LayerStep",
    "Partial",
    "Pool",
    "SearchRange",
    "Segment",
    "SequenceKV",
    "StepCost",
    "attend_ids",
    "attend_ids_heads",
    "attend_path",
    "attend_paths",
    "attend_range",
    "attend_range_heads",
    "default_pool",
    "exact_lse",
    "from_float32",
    "held_bytes",
    "merge_partials",
    "prepare",
    "set_default_pool",
    "to_float32",
]
