"""Experts of a model in 4 bits: how many of each layer a GPU stores, and the bytes that routing reads. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_attn.memory.units import show_bytes

BUS_BANDWIDTH = 38e9
"""Bytes per second by which the kernel of experts reads host memory over PCIe 5 of 16 lanes: a step's, H200."""
UNPLANNED = 1 << 28
"""Bytes of a GPU that experts leave, which a prefill would not have for its index (`memory/device_room.py`, MARGIN)."""


@dataclass(frozen=True)
class RoutedExperts:
    """Sizes of a model's experts.

    layers: that have experts. count: experts of each. visited: by a token. block_bytes: of an expert if some are in
    host memory (`gpu/expert_blocks.py`); packed_bytes: of all if none is. on_host: experts of each layer there.
    """

    layers: int
    count: int
    visited: int
    block_bytes: int
    packed_bytes: int
    on_host: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory: experts, and a buffer for those of one layer that are in host memory."""
        if not self.on_host:
            return self.packed_bytes
        return self.block_bytes * (self.layers * (self.count - self.on_host) + self.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self.block_bytes * self.layers * self.on_host

    @property
    def bus_bytes(self) -> int:
        """Bytes that cross the bus for a token if all experts are visited equally often."""
        return self.block_bytes * self.layers * self.visited * self.on_host // self.count

    @property
    def text(self) -> str:
        """Describe the experts in host memory."""
        read = f"{show_bytes(self.bus_bytes)} read per token if routing is uniform"
        return f"{self.on_host} of {self.count} in each of {self.layers} layers: {read}"

    @property
    def note(self) -> str:
        """Describe the experts in GPU memory, to append to a description of weights; "" if all are there."""
        kept = self.count - self.on_host
        return f", {kept} of {self.count} experts of a layer and room for the rest of one" if self.on_host else ""


def fewest_on_host(routed: RoutedExperts, free: int) -> int:
    """Return the experts of each layer in host memory if `free` bytes of a GPU are left with all of them there."""
    more = max(1, routed.block_bytes * (routed.layers - 1))  # the buffer has room for one less, too
    return routed.count - min(max(0, free - UNPLANNED) // more, routed.count - 1)
