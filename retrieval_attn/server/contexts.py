"""Saved contexts of the server's model: list, resolve, make, fork and remove them by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from retrieval_attn.errors import ConfigError, StoreError, UnknownContextError
from retrieval_attn.server.client import EngineClient
from retrieval_attn.server.failure import ApiError
from retrieval_attn.store import ContextStore, NamedContext

__all__ = ["Contexts", "StorePool"]

STORE_THREADS = 8
MAX_STORE_JOBS = 64

Result = TypeVar("Result")


class StorePool:
    """Threads for work that blocks on the disk or on the store's lock. Used in one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(STORE_THREADS, "retrieval_attn-store")
        self._jobs = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work in a thread. Raises its exceptions, and StoreError "busy" if MAX_STORE_JOBS are queued."""
        if self._jobs >= MAX_STORE_JOBS:
            raise StoreError(f"{self._jobs} requests are queued for the store of contexts; retry later.", reason="busy")
        self._jobs += 1
        done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        done.add_done_callback(self._finished)
        return await done

    def _finished(self, _: asyncio.Future[Result]) -> None:
        self._jobs -= 1


class Contexts:
    """Contexts of a store, which is read on each call: other processes change it too."""

    def __init__(self, store: ContextStore, client: EngineClient, template: str) -> None:
        """client: prefills and saves texts. template: digest of the chat template; contexts of another template are
        not listed, because they cannot be continued.
        """
        self._store, self._client, self._template = store, client, template
        self._pool = StorePool()

    async def listed(self) -> list[NamedContext]:
        """Return the contexts that requests can use, sorted by name."""
        return [one for one in await self._in_thread(self._store.list) if one.plain.get("template") == self._template]

    async def named(self, name: str) -> NamedContext:
        """Return one context. Raises UnknownContextError, StoreError."""
        return await self._in_thread(lambda: self._store.resolve(name))

    async def make(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str) -> NamedContext:
        """Prefill a text, from the start or after a saved context, and save it. Raises as `EngineClient.keep`."""
        kept = await self._client.keep(name, ids, context, namespace)
        try:
            return await self.named(name)
        except UnknownContextError:  # removed by another client after it was saved
            return NamedContext(name, kept.digest, (kept.digest,), {"tokens": kept.tokens}, time.time(), kept.nbytes)

    async def fork(self, name: str, new: str) -> NamedContext:
        """Give a context a second name. Raises UnknownContextError, StoreError; ApiError 409 for a name in use."""

        def fork() -> NamedContext:
            found = self._store.resolve(name)
            if new in {one.name for one in self._store.list()}:
                raise ApiError(
                    409, f"There is a context {new!r} already; delete it, or give another name.", param="name"
                )
            self._store.name(new, found.digest, found.plain)
            return self._store.resolve(new)

        return await self._in_thread(fork)

    async def remove(self, name: str) -> None:
        """Delete a name and the nodes that only it needs. Raises UnknownContextError, StoreError."""

        def remove() -> None:
            self._store.remove(name)
            self._store.gc()

        await self._in_thread(remove)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._pool.run(work)
        except ConfigError as error:
            raise StoreError(str(error)) from error
