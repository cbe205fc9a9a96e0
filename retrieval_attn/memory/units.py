"""Amounts of memory ("24GiB", "24 GB", 25769803776) and of tokens ("128k") as people write and read them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from retrieval_attn.errors import ConfigError

GIB = 1024**3
FLOAT_BYTES = 4
"""Bytes of a float32."""
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Bytes of `value`: an int counts bytes, a string needs a unit, "24GiB" (24 * 2**30) or "24GB".

    Raises ConfigError, naming the option `name`, for anything else: other types, no or another unit, not positive.
    """
    advice = 'give bytes as an integer, or a number with its unit such as "24GiB" or "24GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name} must be an amount of memory, got {value!r}; {advice}.")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
        unit = match and _UNITS.get(match[2].lower())
        if not match or not unit:
            raise ConfigError(f"{name}={value!r} is not an amount of memory; {advice}.")
        size = round(float(match[1]) * unit)
    if size <= 0:
        raise ConfigError(f"{name}={value!r} must be more than 0 bytes; {advice}.")
    return size


def parse_tokens(value: int | str, name: str = "tokens") -> int:
    """Number of tokens of `value`: 4096, "4096", "4k" or "1M"; k is 1024 and m 1024 * 1024.

    Raises ConfigError, naming the option `name`, for anything else: other types, other units, not positive.
    """
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(\d+)\s*([km]?)", text, re.IGNORECASE | re.ASCII)
    count = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if count < 1:
        raise ConfigError(f"{name}={value!r} is not a number of tokens; give 4096, 128k or 1m.")
    return count


def show_tokens(count: int) -> str:
    """Return `count` tokens for people: "900", "96K", "1M"; K is 1024 and M 1024 * 1024, as `parse_tokens` has them."""
    for unit, scale in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= scale and count % scale == 0:
            return f"{count // scale:,}{unit}"
    return f"{count:,}"


def show_bytes(size: int) -> str:
    """`size` bytes for people: "512 B", "64.0 KiB", "1.50 MiB", "16.00 GiB"; the sign is kept."""
    for unit, digits in (("GiB", 2), ("MiB", 2), ("KiB", 1)):
        scale = _UNITS[unit.lower()]
        if abs(size) >= scale:
            return f"{size / scale:,.{digits}f} {unit}"
    return f"{size} B"


def host_memory_bytes() -> int:
    """Memory of this machine, or of the control group this process runs in if that is less.

    Raises ConfigError where the operating system does not tell (give host_memory then).
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError('this system does not tell its memory; give host_memory, such as "64GiB".') from error
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    for path in limits:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total
