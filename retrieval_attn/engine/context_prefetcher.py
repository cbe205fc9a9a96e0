"""Expected: saved contexts that waiting requests name, brought from the disk to memory before their turn.

After CachedAttention (Gao et al. 2024, section 3.3.1): whoever schedules requests knows which contexts come next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from retrieval_attn.store import ContextStore, Shelf

__all__ = ["ContextPrefetcher"]


class ContextPrefetcher:
    """Any thread. Nothing is read, and no thread is there, until a request waits behind others."""

    def __init__(self, store: Callable[[], ContextStore], ram_bytes: int) -> None:
        """store: asked when it is first needed. ram_bytes: of saved contexts in the system's cache."""
        self._store, self._ram_bytes = store, ram_bytes
        self._shelf: Shelf | None = None
        self._names: dict[str, str] = {}
        self._closed = False
        self._lock = threading.Lock()

    def add(self, number: str, name: str) -> None:
        """Request `number` waits for the context `name`; those that waited before come before it."""
        with self._lock:
            if self._closed:
                return
            known = name in self._names.values()
            self._names[number] = name
            if known:
                return
            if self._shelf is None:
                self._shelf = Shelf(self._store(), ram_bytes=self._ram_bytes)
            self._shelf.expect(list(dict.fromkeys(self._names.values())))

    def remove(self, number: str) -> None:
        """It has its turn, or is gone. Unknown numbers are passed over."""
        with self._lock:
            self._names.pop(number, None)

    def close(self) -> None:
        """No thread is left."""
        with self._lock:
            self._closed, shelf = True, self._shelf
        if shelf is not None:
            shelf.close()
