"""Silence warnings that torchao prints while transformers imports it, whether torchao is used or not."""

from __future__ import annotations

import logging

__all__ = ["quiet"]

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
