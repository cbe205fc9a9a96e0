"""Functions of CUDA's libraries that torch does not offer, from the copies that this process has loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

from retrieval_attn.errors import BackendError


class DriverFunctions:
    """Addresses of functions of CUDA's driver."""

    def __init__(self) -> None:
        """Raises BackendError if there is no driver."""
        tried = []
        for name in [*_loaded("libcuda.so"), "libcuda.so.1"]:
            try:
                self._library = ctypes.CDLL(name)
                return
            except OSError as error:
                tried.append(f"{name}: {error}")
        raise BackendError(f"CUDA's driver cannot be loaded: {'; '.join(tried)}")

    def address(self, name: str) -> int:
        """Address of the function `name`. Raises BackendError if there is none."""
        function = getattr(self._library, name, None)
        address = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
        if address is None:
            raise BackendError(f"CUDA's driver has no {name}")
        return address


def _loaded(name: str) -> list[str]:
    """Files of this process whose names begin with `name`: a second copy of a runtime would know no stream of ours."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(name)))
