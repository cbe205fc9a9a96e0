"""What programs do about the imports of torch and transformers: they take seconds, and some of them talk."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet", "uncollected"]

# transformers imports torchao where it is installed, which then says what kernels it has not, used or not.
TALKS_AT_IMPORT = ("torchao", "torch.utils._pytree")


def quiet() -> None:
    """Loggers of those that talk say errors alone from now on."""
    for name in TALKS_AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector waits until the block ends: a sixth of the time of these imports is its, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
