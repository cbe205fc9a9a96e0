"""Contexts: saved ones of the server's model, by name: listed, found, made, renamed, removed."""

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
    """Threads for work that waits for a disk or for the store's lock: requests that need no store never wait for it.

    Used in one event loop.
    """

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
    """The store is read anew each time: other processes save into it, and remove from it."""

    def __init__(self, store: ContextStore, client: EngineClient, template: str) -> None:
        """client: reads what is to be saved. template: digest of the one that questions have; contexts that were begun
        with another cannot be continued, and are not listed.
        """
        self._store, self._client, self._template = store, client, template
        self._pool = StorePool()

    async def listed(self) -> list[NamedContext]:
        """Those that requests may name, sorted."""
        return [one for one in await self._beside(self._store.list) if one.plain.get("template") == self._template]

    async def named(self, name: str) -> NamedContext:
        """One of them. Raises UnknownContextError, StoreError."""
        return await self._beside(lambda: self._store.resolve(name))

    async def make(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str) -> NamedContext:
        """Read a text, behind a saved context or from the start, and save it. Raises as `EngineClient.keep`."""
        kept = await self._client.keep(name, ids, context, namespace)
        try:
            return await self.named(name)
        except UnknownContextError:  # removed by another client since: it was saved all the same
            return NamedContext(name, kept.digest, (kept.digest,), {"tokens": kept.tokens}, time.time(), kept.nbytes)

    async def fork(self, name: str, new: str) -> NamedContext:
        """Another name for the same. Raises UnknownContextError, StoreError; ApiError 409 for a name that is taken."""

        def fork() -> NamedContext:
            found = self._store.resolve(name)
            if new in {one.name for one in self._store.list()}:
                raise ApiError(
                    409, f"There is a context {new!r} already; delete it, or give another name.", param="name"
                )
            self._store.name(new, found.digest, found.plain)
            return self._store.resolve(new)

        return await self._beside(fork)

    async def remove(self, name: str) -> None:
        """Forget the name, and what only it needed; answers under way keep what they use. Raises UnknownContextError,
        StoreError.
        """

        def remove() -> None:
            self._store.remove(name)
            self._store.gc()

        await self._beside(remove)

    async def _beside(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._pool.run(work)
        except ConfigError as error:
            raise StoreError(str(error)) from error
