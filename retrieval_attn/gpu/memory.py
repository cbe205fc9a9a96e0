"""Limit of device memory: a cap for the allocator.

The caching allocator sees only its own tensors. The CUDA context, the code of loaded kernels and the library
workspaces need memory, too, so the allocator's cap is the process's cap minus theirs.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from retrieval_attn.errors import MemoryPlanError

log = logging.getLogger(__name__)
GIB = 1 << 30
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variables that configure PyTorch's allocator."""
DEEP_TILE_BYTES = 160 * 1024
"""Shared memory of a block from which kernels use the tiles of an H100. Consumer cards have 99 KiB, an H100 227."""
LATER_CONTEXT = 256 << 20
"""Bytes that kernels and graphs loaded after the cap was set may add to the context."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Folder of Linux with the bus of each device."""
MAX_CONTEXT = 3 * GIB // 4
"""Bytes outside the allocator above which other processes hold the rest (0.5 GiB were seen on an H100)."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device. context: of this process outside the allocator. outside: all bytes there, those of other
    processes included.
    """

    total: int
    free: int
    context: int
    outside: int = 0

    @property
    def available(self) -> int:
        """Maximum bytes that this process can hold, its context included."""
        return min(self.total, self.free + self.context)


class AllocatedBytes(NamedTuple):
    """Bytes of the allocator on one device, free blocks included, and its limit."""

    used: int
    limit: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device` (CUDA); start its context if needed."""
    torch.empty(1, device=device)  # the memory of a device is known only with a context
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return DeviceMemory(total, free, min(outside, MAX_CONTEXT), outside)


def expand_segments(device: torch.device) -> None:
    """Let PyTorch's allocator return free pages at any address, so that free memory is not fragmented.

    Call it before weights are loaded. `enable` does not: the process of a model that is loaded already belongs to its
    caller. Does nothing for devices other than CUDA, or if the environment configures the allocator.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return
    configure = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    )
    try:
        configure("expandable_segments:True")
    except RuntimeError as error:
        log.info("the allocator's segments stay as they are: %s", error)


def spare_bytes(device: torch.device) -> int:
    """Return the bytes left to this process on `device` (CUDA) within its cap; they may be fragmented."""
    memory, allocated = device_memory(device), torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share = torch.cuda.memory.get_per_process_memory_fraction(_number_of(device))
    capped = int(share * memory.total) - allocated
    return max(0, min(memory.free + unused, capped))


def allocated_bytes(device: torch.device) -> AllocatedBytes:
    """Return the bytes that the allocator holds on `device` (CUDA), and its limit. Any thread, during a capture too."""
    share = torch.cuda.memory.get_per_process_memory_fraction(_number_of(device))
    total = torch.cuda.get_device_properties(device).total_memory
    return AllocatedBytes(torch.cuda.memory_reserved(device), int(share * total))


def split_bytes(device: torch.device) -> int:
    """Return the fragmented part of `spare_bytes` between tensors, unusable for larger ones; 0 without CUDA."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a block of a kernel may use at most, in bytes; 0 for devices other than CUDA."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of the memory of `device` (CUDA) by its clock, two transfers each, and the width of
    its bus; None if torch does not know them.
    """
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * kilohertz * bits / 8 or None


def bus_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of the bus between the host and `device` (CUDA), by the device's highest rate (idle
    devices lower it) and its current width; None if the system does not tell them.
    """
    properties = torch.cuda.get_device_properties(device)
    try:
        place: list[int] = [getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device")]
        folder = PCI_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*place)
        transfers = 1e9 * float((folder / "max_link_speed").read_text().split()[0])
        return transfers * int((folder / "current_link_width").read_text()) / 8 or None
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def allocator_share(limit: int, memory: DeviceMemory) -> float:
    """Return the allocator's fraction of the device with which the whole process stays below `limit` bytes.

    Raises MemoryPlanError if the context alone takes the limit.
    """
    room = min(limit, memory.total) - memory.context - LATER_CONTEXT
    if room <= 0:
        raise MemoryPlanError(
            f"the CUDA context needs {(memory.context + LATER_CONTEXT) / GIB:.2f} GiB, which leaves nothing of the "
            f"limit of {limit / GIB:.2f} GiB; raise gpu_memory, or end the other processes on this device"
        )
    return room / memory.total


def cap(device: torch.device, limit: int | None) -> None:
    """Cap the allocator so that this process stays below `limit` bytes; None: no limit.

    Raises MemoryPlanError if the context alone takes the limit.
    """
    torch.cuda.empty_cache()
    number = _number_of(device)
    if limit is None:
        _caps.pop(number, None)
        torch.cuda.set_per_process_memory_fraction(1.0, number)
        return
    memory = device_memory(device)
    torch.cuda.set_per_process_memory_fraction(allocator_share(limit, memory), number)
    _caps[number] = min(limit, memory.total) - memory.context + memory.outside


def lower_cap_for_graphs(device: torch.device) -> None:
    """Lower the allocator's cap by the memory of captured graphs, which is outside the allocator.

    Memory that other processes have taken since `cap` counts as memory of graphs. Does nothing without a cap, and
    never raises it.
    """
    number = _number_of(device) if device.type == "cuda" else None
    if number is None or number not in _caps:
        return
    memory = device_memory(device)
    room = max(0, _caps[number] - memory.outside)
    if room / memory.total >= torch.cuda.memory.get_per_process_memory_fraction(number):
        return
    log.info("outside the allocator (graphs, contexts): %.2f GiB; tensors: %.2f GiB", memory.outside / GIB, room / GIB)
    torch.cuda.set_per_process_memory_fraction(room / memory.total, number)


_caps: dict[int, int] = {}
"""Bytes for tensors and memory outside the allocator together, by the number of a device with a cap."""


def _number_of(device: torch.device) -> int:
    """Return a device's number, also of one without: functions of a process's memory fraction need it."""
    return torch.cuda.current_device() if device.index is None else device.index
