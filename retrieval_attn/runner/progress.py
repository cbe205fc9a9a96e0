"""The bar over a reading: layers that are read and indexed, with the time that the others will take."""

from __future__ import annotations

from typing import Any, Self

from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.compile.progress import ProgressBar

WAITING = "waiting for the last indexes"


class ReadingBar:
    """Shown only when reading takes longer than two seconds. As a context manager it watches the cache's layers.

    A layer counts when its keys are on the host and indexed, also where threads do that while later layers compute: so
    the time left, by the mean over all layers so far, is that of reading and indexing together.
    """

    def __init__(self, cache: Any, what: str, show: bool) -> None:
        """cache: a RetrievalCache that is about to read."""
        self._cache = cache
        self._read = 0
        total = len(cache.layers)
        self._bar = ProgressBar(
            total=total, desc=what, unit="layer", delay=2.0, leave=False, smoothing=0, disable=not show, mininterval=0.0
        )

    def __enter__(self) -> Self:
        self._watcher = self._cache.on_layer
        self._cache.on_layer = self._layer_read
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.on_layer = self._watcher
        self._bar.close()

    @property
    def count(self) -> int:
        """Layers that are read and indexed."""
        layers = [layer for layer in self._cache.layers if isinstance(layer, CacheLayer)]
        return self._read - sum(not layer.check_index() for layer in layers)

    def wait(self) -> None:
        """All layers are read: from now on the bar says that their indexes are waited for."""
        self._bar.describe(WAITING)
        self._cache.on_layer = self._watcher

    def show(self) -> None:
        """Show how many layers are done now."""
        self._bar.update(self.count - self._bar.n)

    def _layer_read(self) -> None:
        if self._watcher is not None:  # who watched before goes on
            self._watcher()
        self._read = min(self._read + 1, len(self._cache.layers))
        self.show()
