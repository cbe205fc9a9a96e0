"""Make imports of transformers quiet and fast."""

from __future__ import annotations

import logging
import sys
import time

__all__ = ["FIRST_IMPORT", "quiet", "skip_unused"]

FIRST_IMPORT = time.perf_counter()
"""When this process began to import the package: its start, but for Python's own."""

NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}
"""Beginnings of messages about missing kernels and about torchao's own enums, by the name of their logger."""


class _Noise(logging.Filter):
    """Drop records whose message begins with `start`."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)


_filters = {name: _Noise(start) for name, start in NOISE.items()}


def quiet() -> None:
    """Drop the messages of NOISE from now on; other records of these loggers are kept."""
    for name, noise in _filters.items():
        logging.getLogger(name).addFilter(noise)


def skip_unused() -> None:
    """Let transformers do without scikit-learn in this process, a server's: it takes a quarter of all imports.

    transformers imports it, if it is installed, for a threshold of assisted decoding. Call this before modules of
    transformers are imported. Other code can import scikit-learn as before.
    """
    import transformers.utils.import_utils as checks

    if "sklearn" in sys.modules:
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # it cannot be imported
    try:
        checks.is_sklearn_available()  # the result is cached
    finally:
        del sys.modules["sklearn"]
