"""Row: one thing that a user waits for, the first time and later; also when it could not be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One measure of one process.

    key: what it is compared by, such as "first_token/exact/32". what: the same in words. unit: of first and later, "s",
    "ms" or "GiB". first: the first time in this process; later: median of the times after it; None: not measured.
    values: all times, in order. status: "ok", "failed" (the reason in note), "not run", "not measured".
    device_bytes: used on the card at most while this ran, as nvidia-smi counts it; host_bytes: resident at most.
    simplifications: what holds here and not for a user.
    """

    key: str
    what: str
    unit: str
    first: float | None = None
    later: float | None = None
    values: tuple[float, ...] = ()
    status: str = "ok"
    note: str = ""
    device_bytes: int | None = None
    host_bytes: int | None = None
    simplifications: tuple[str, ...] = field(default_factory=tuple)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Row:
        """What `to_dict` gave, read back from JSON."""
        lists = {name: tuple(fields[name]) for name in ("values", "simplifications")}
        return cls(**{**fields, **lists})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """For the log of a run that is still going."""
        times = [f"{name} {value:.3f} {self.unit}" for name, value in (("first", self.first), ("later", self.later))
                 if value is not None]  # fmt: skip
        said = "" if self.status == "ok" else f" {self.status}"
        return f"{self.what}:{said} {', '.join(times)} {self.note}".rstrip()
