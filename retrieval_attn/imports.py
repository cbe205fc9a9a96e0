"""What programs do about the imports of torch and transformers: some of them talk."""

from __future__ import annotations

import logging

__all__ = ["quiet"]

# transformers imports torchao where it is installed, which then says what kernels it has not, used or not.
TALKS_AT_IMPORT = ("torchao", "torch.utils._pytree")


def quiet() -> None:
    """Loggers of those that talk say errors alone from now on."""
    for name in TALKS_AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
