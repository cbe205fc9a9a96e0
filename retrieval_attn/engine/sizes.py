"""Sizes: bytes that nodes of a tree hold, by the memory that runs short of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Sizes"]


class Sizes(NamedTuple):
    """host: of host memory; of a model on a CPU, its windows and codes, too. device: of a GPU's. pages: of an engine's
    pages for exact prefixes, wherever these lie: they are free for others then, and the memory stays the engine's.
    """

    host: int = 0
    device: int = 0
    pages: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self)

    @property
    def lacking(self) -> tuple[int, ...]:
        """Kinds of which there is more than nothing, by their number: for bytes that are needed."""
        return tuple(kind for kind, nbytes in enumerate(self) if nbytes > 0)

    def of(self, kinds: Sequence[int]) -> int:
        """Bytes of these kinds together."""
        return sum(self[kind] for kind in kinds)

    def plus(self, other: Sizes) -> Sizes:
        """Both together."""
        return Sizes(self.host + other.host, self.device + other.device, self.pages + other.pages)

    def less(self, other: Sizes) -> Sizes:
        """Without the other's; below 0 where it has more."""
        return Sizes(self.host - other.host, self.device - other.device, self.pages - other.pages)

    def beyond(self, other: Sizes) -> Sizes:
        """What of each kind is more than the other's."""
        return Sizes(*(max(0, nbytes) for nbytes in self.less(other)))
