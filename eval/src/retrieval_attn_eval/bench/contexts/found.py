"""Found: what `bench contexts` measured at one length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from retrieval_attn_eval.bench.session.children import Process
from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["Found"]


@dataclass
class Found:
    """processes: the one that saves, then those that open. disk: measures of the disk itself, in bytes and seconds."""

    length: int
    settings: Settings
    processes: list[Process] = field(default_factory=list)
    disk: dict[str, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "length": self.length,
            "settings": self.settings.to_dict(),
            "disk": self.disk,
            "processes": [process.to_dict() for process in self.processes],
        }
