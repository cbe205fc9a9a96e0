"""Functions of CUDA's libraries that torch does not offer, from the copies that this process has loaded."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrieval_attn.errors import BackendError

logger = logging.getLogger(__name__)


def host_function_launcher() -> Callable[[int, int, int], None]:
    """f(stream handle, function address, argument): enqueue a host function there; in a capture, a host node.

    By the CUDA runtime that torch has loaded, or else by the driver's equivalent, whose streams are the same.
    Raises BackendError if there is neither; the launcher raises it for CUDA's error codes.
    """
    tried = []
    for name in _libraries():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        symbol = "cuLaunchHostFunc" if Path(name).name.startswith("libcuda.so") else "cudaLaunchHostFunc"
        function = getattr(library, symbol, None)
        if function is None:
            tried.append(f"{name}: has no {symbol}")
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        function.restype = ctypes.c_int
        logger.info("host functions by %s of %s", symbol, name)
        return functools.partial(_call, function, symbol)
    raise BackendError(
        f"no CUDA library offers host functions; tried {'; '.join(tried) or 'nothing'}. Decode with graph=False."
    )


class DriverFunctions:
    """CUDA's driver: addresses of its functions, and streams that are nobody else's."""

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

    def new_stream(self) -> int:
        """Handle of a stream of the current context that waits for no other. torch's come from a pool that all share.

        It lives as long as the process. Raises BackendError.
        """
        create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint)(self.address("cuStreamCreate"))
        handle = ctypes.c_void_p()
        _call(create, "cuStreamCreate", ctypes.addressof(handle), 1)  # 1: no order with the default stream
        return handle.value or 0  # 0 would be the default stream: a new one has another handle


def _call(function: Any, symbol: str, *arguments: int) -> None:
    code = function(*arguments)
    if code:
        raise BackendError(f"{symbol} failed with CUDA error {code}; decode with graph=False")


def _libraries() -> list[str]:
    """CUDA runtimes that could be torch's, the loaded one first, then the driver."""
    found = _loaded("libcudart")
    major = (torch.version.cuda or "13").split(".")[0]
    found.append(f"libcudart.so.{major}")
    site = Path(torch.__file__).resolve().parents[1] / "nvidia"
    found += [str(path) for path in sorted(site.glob(f"*/lib/libcudart.so.{major}"))]
    return list(dict.fromkeys([*found, "libcudart.so.13", "libcudart.so.12", *_loaded("libcuda.so"), "libcuda.so.1"]))


def _loaded(name: str) -> list[str]:
    """Files of this process whose names begin with `name`: a second copy of a runtime would know no stream of ours."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(name)))
