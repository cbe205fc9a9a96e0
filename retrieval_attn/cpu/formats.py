"""Number formats of host keys and values.

They live with the index, the lower of the two packages that read keys.
"""

from __future__ import annotations

from retrieval_attn.index.formats import Format, from_float32, to_float32

__all__ = ["Format", "from_float32", "to_float32"]
