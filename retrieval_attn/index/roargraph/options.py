"""Options of the `roargraph` index, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from retrieval_attn.errors import ConfigError


@dataclass(frozen=True)
class GraphOptions:
    """How the graph is made and searched. Raises ConfigError for a value of another type or out of range.

    beam: nodes that a search expands at most (more: better and slower). degree: edges per node at most; None: 32 up
    to head_dim 128, 48 above. targets: best keys that each training list is attached to. list_k: length of a
    training list (longer ones given are cut). fill: edges a node gets at least where it has candidates.
    candidates: keys considered for a node's edges at most. entries: much named nodes that every
    search starts from, and landmarks: keys far from each other that it starts from too (see `landmarks`).
    beta: leave out keys that score more than this below the best (inner product, unscaled), and stop early; None: k
    keys always. per_query_head: a graph for each query head, else one for all. listed_only: leave keys that no training
    list names out of the graph. exact_below: fewer keys than this are scanned. tail: inserted keys that are scanned one
    by one before they are linked.
    """

    beam: int = 160
    degree: int | None = None
    targets: int = 16
    list_k: int = 100
    fill: int = 16
    candidates: int = 256
    entries: int = 16
    landmarks: int = 256
    beta: float | None = None
    per_query_head: bool = False
    listed_only: bool = True
    exact_below: int = 4096
    tail: int = 256

    def __post_init__(self) -> None:
        for name, low, high in (
            ("beam", 1, 1 << 16),
            ("degree", 2, 256),
            ("targets", 1, 1024),
            ("list_k", 2, 4096),
            ("fill", 0, 256),
            ("candidates", 8, 4096),
            ("entries", 1, 4096),
            ("landmarks", 1, 1 << 16),
            ("exact_below", 0, 2**31 - 1),
            ("tail", 0, 1 << 16),
        ):
            value = getattr(self, name)
            if value is None and name == "degree":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a whole number from {low} to {high}")
        for name in ("per_query_head", "listed_only"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        beta = self.beta
        if beta is not None and (isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1e30):
            raise ConfigError(f"beta={beta!r} must be None or a number >= 0")

    def degree_for(self, head_dim: int) -> int:
        """Edges per node at most for keys of `head_dim` elements."""
        if self.degree is not None:
            return int(self.degree)
        return 32 if head_dim <= 128 else 48

    def plain(self) -> dict[str, int | float | str]:
        """The options as plain values, for `from_plain`; those that are None are left out."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: int(v) if isinstance(v, bool) else v for name, v in given.items() if v is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> GraphOptions:
        """Options whose `plain()` was `plain`. Raises ConfigError for names or values that are none."""
        flags = ("per_query_head", "listed_only")
        given: dict[str, Any] = {"degree": None, "beta": None}
        given.update({name: bool(value) if name in flags else value for name, value in plain.items()})
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(
                f"options of a saved graph are not known here ({error}); build the index again"
            ) from error
