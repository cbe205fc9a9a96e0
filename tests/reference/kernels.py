"""Plain PyTorch in place of the Triton kernels of captured steps, see `gpu.decode.kernels.replaced_kernels`."""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {
    "decode.kernels_triton": "decode_kernels",
    "products_triton": "products",
    "packed_triton": "products",
    "delta_triton": "delta",
}
"""Modules of this folder by the module of kernels that they replace."""


def reference_kernels(module: str) -> ModuleType:
    """Return the module that replaces a module of kernels."""
    return importlib.import_module(f"tests.reference.{MODULES[module]}")
