"""Resident memory of this process at most, from Linux; None where the system does not tell."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_host_peak() -> None:
    """Begin to measure. Where that is not allowed, `host_peak` is since the process began."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5")


def host_peak() -> int | None:
    """Most resident bytes since `start_host_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(match[1]) if match else None
