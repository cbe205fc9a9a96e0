"""Saved contexts of the server's model: list, resolve, make, fork and remove them by name."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from retrieval_attn.engine.background_saves import ContextState
from retrieval_attn.errors import ConfigError, StoreError, UnknownContextError
from retrieval_attn.server.client import EngineClient
from retrieval_attn.server.failure import ApiError, EngineLostError
from retrieval_attn.store import ContextStore, NamedContext

STORE_THREADS = 8
MAX_STORE_JOBS = 64
LOOK_SECONDS = 0.05
"""Between two looks at whether a context is durable."""
HEAD_TOKENS = 64
"""Token ids of a context's start that are kept in memory."""

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


def _stored(context: NamedContext) -> ContextState:
    """Return the state of a context of the store."""
    tokens = context.plain.get("tokens", 0)
    return ContextState(
        context.name, tokens if isinstance(tokens, int) else 0, context.nbytes, context.saved_at, durable=True
    )


class Contexts:
    """Contexts of a store, which is read on each call: other processes change it too."""

    def __init__(self, store: ContextStore, client: EngineClient, template: str) -> None:
        """client: prefills and saves texts. template: digest of the chat template; contexts of another template are
        not listed, because they cannot be continued.
        """
        self._store, self._client, self._template = store, client, template
        self._pool = StorePool()
        self._head = lru_cache(maxsize=1024)(self._read_head)

    async def listed(self) -> list[ContextState]:
        """Return the contexts that requests can use, sorted by name."""
        unsaved = {one.name: one for one in await self._unsaved()}
        stored = [
            one
            for one in await self._in_thread(self._store.list)
            if one.plain.get("template") == self._template and not one.is_automatic
        ]
        found = {one.name: _stored(one) for one in stored} | unsaved
        return [found[name] for name in sorted(found)]

    async def heads(self, found: Sequence[ContextState], count: int) -> list[list[int]]:
        """Return the first `count` token ids of each context, at most HEAD_TOKENS.

        None of a context that is damaged, removed or not durable.
        """

        def head(one: ContextState) -> list[int]:
            if not one.durable:
                return []
            try:
                return self._head(self._store.resolve(one.name).chain[0])[:count]
            except StoreError:
                return []

        return await self._in_thread(lambda: [head(one) for one in found])

    def _read_head(self, root: str) -> list[int]:
        (node,) = self._store.chain(root, ids_only=True)
        return [int(one) for one in node.ids[:HEAD_TOKENS]]

    async def disk(self) -> dict[str, int]:
        """Return the bytes of all contexts as "used", and as "limit" these plus what the file system has free."""

        def measured() -> dict[str, int]:
            used = self._store.nbytes()
            return {"used": used, "limit": used + self._store.free_bytes()}

        return await self._in_thread(measured)

    async def named(self, name: str) -> ContextState:
        """Return one context. Raises UnknownContextError, StoreError."""
        for one in await self._unsaved():
            if one.name == name:
                return one
        return _stored(await self._in_thread(lambda: self._resolved(name)))

    async def make(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str) -> ContextState:
        """Prefill a text, from the start or after a saved context, and begin to save it.

        Raises as `EngineClient.keep`.
        """
        tokens = await self._client.keep(name, ids, context, namespace)
        try:
            return await self.named(name)
        except UnknownContextError:  # removed by another client
            return ContextState(name, tokens, 0, time.time())

    async def fork(self, name: str, new: str) -> ContextState:
        """Give a context a second name when it is durable.

        Raises UnknownContextError, StoreError; ApiError 409 for a name in use.
        """
        while any(one.name == name and one.error is None for one in await self._unsaved()):
            await asyncio.sleep(LOOK_SECONDS)
        used = {one.name for one in await self._unsaved()}

        def fork() -> ContextState:
            found = self._resolved(name)
            if new in used or new in {one.name for one in self._store.list()}:
                raise ApiError(
                    409, f"There is a context {new!r} already; delete it, or give another name.", param="name"
                )
            self._store.name(new, found.digest, found.plain)
            return _stored(self._store.resolve(new))

        return await self._in_thread(fork)

    async def remove(self, name: str) -> None:
        """Delete a name and the nodes that only it needs; cancel its write. Raises UnknownContextError, StoreError."""
        cancelled = False
        with contextlib.suppress(EngineLostError):
            cancelled = await self._client.cancel_save(name)

        def remove() -> None:
            try:
                self._resolved(name)
                self._store.remove(name)
            except UnknownContextError:
                if not cancelled:
                    raise
            self._store.gc()

        await self._in_thread(remove)

    def _resolved(self, name: str) -> NamedContext:
        """Return the context of a name. Raises UnknownContextError, also for an idle text that the engine saved."""
        found = self._store.resolve(name)
        if found.is_automatic:
            raise UnknownContextError(f"no context {name!r} in the store {self._store.folder}", context=name)
        return found

    async def _unsaved(self) -> list[ContextState]:
        """Return the contexts that are not durable; none without an engine."""
        try:
            return await self._client.unsaved()
        except EngineLostError:
            return []

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._pool.run(work)
        except ConfigError as error:
            raise StoreError(str(error)) from error
