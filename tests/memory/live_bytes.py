"""Bytes of tensors that are alive while a block runs, on any device: on the meta device a model of any size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """peak: most bytes at once of tensors that were made within the block. `known` ones count nothing."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._note(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor, counted=True)
        return out

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        storage: Any = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counted else 0
        if key in self._storages:
            return

        def gone(_: Any) -> None:
            self._storages.pop(key, None)
            self.live -= nbytes

        self._storages[key] = weakref.ref(storage, gone)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def on_meta(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What `make` gives with the meta device and `dtype` as defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.set_default_dtype(before)
