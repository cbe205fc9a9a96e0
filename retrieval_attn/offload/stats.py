"""What one layer did since its cache was made: seconds, keys and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayerStats:
    """Seconds are wall clock, bytes are host memory read.

    host_seconds: retrieved attention as a whole; search_seconds and attend_seconds: its phases inside.
    copy_seconds, index_seconds: copying keys to the host and building indexes (beside a GPU: in threads, while it
    computes); lists_seconds: the GPU's time for training lists; wait_seconds: prefill waiting for the host.
    """

    index_seconds: float = 0.0
    copy_seconds: float = 0.0
    lists_seconds: float = 0.0
    wait_seconds: float = 0.0
    host_seconds: float = 0.0
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
    keys_scanned: int = 0
    bytes_read: int = 0

    def add(self, other: LayerStats) -> None:
        """Add every field of `other` to this one's."""
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))
