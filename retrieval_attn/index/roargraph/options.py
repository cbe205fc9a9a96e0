"""Options of the `roargraph` index, checked, and the constants of its construction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from retrieval_attn.errors import ConfigError

LIST_K = 100
"""Length of a training list; longer ones that are given are cut."""


@dataclass(frozen=True)
class GraphOptions:
    """How the graph is made and searched. Raises ConfigError for a value of another type or out of range.

    beam: nodes that a search expands at most (more: better and slower). degree: edges per node at most; None: 32 up
    to head_dim 128, 48 above. landmarks: keys far from each other that every search starts from (see `landmarks`).
    """

    beam: int = 160
    degree: int | None = None
    landmarks: int = 256

    def __post_init__(self) -> None:
        for name, low, high in (("beam", 1, 1 << 16), ("degree", 2, 256), ("landmarks", 1, 1 << 16)):
            value = getattr(self, name)
            if value is None and name == "degree":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a whole number from {low} to {high}")

    def degree_for(self, head_dim: int) -> int:
        """Edges per node at most for keys of `head_dim` elements."""
        if self.degree is not None:
            return int(self.degree)
        return 32 if head_dim <= 128 else 48

    def plain(self) -> dict[str, int]:
        """The options as plain values, for `from_plain`; those that are None are left out."""
        return {name: int(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> GraphOptions:
        """Options whose `plain()` was `plain`. Raises ConfigError for names or values that are none."""
        try:
            return cls(**plain)
        except TypeError as error:
            raise ConfigError(
                f"a saved graph has options that this release does not have ({error}); build the index again"
            ) from error
