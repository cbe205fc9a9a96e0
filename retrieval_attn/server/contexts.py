"""Contexts: saved ones of the server's model, by name: listed, found, made, renamed, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from retrieval_attn.errors import ConfigError, StoreError
from retrieval_attn.server.client import EngineClient
from retrieval_attn.server.failure import ApiError
from retrieval_attn.store import ContextStore, NamedContext

__all__ = ["Contexts"]

Result = TypeVar("Result")


class Contexts:
    """The store is read anew each time: other processes save into it, and remove from it."""

    def __init__(self, store: ContextStore, client: EngineClient, template: str) -> None:
        """client: reads what is to be saved. template: digest of the one that questions have; contexts that were begun
        with another cannot be continued, and are not listed.
        """
        self._store, self._client, self._template = store, client, template

    async def listed(self) -> list[NamedContext]:
        """Those that requests may name, sorted."""
        return [one for one in await _beside(self._store.list) if one.plain.get("template") == self._template]

    async def named(self, name: str) -> NamedContext:
        """One of them. Raises UnknownContextError, StoreError."""
        return await _beside(lambda: self._store.resolve(name))

    async def make(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str) -> NamedContext:
        """Read a text, behind a saved context or from the start, and save it. Raises as `EngineClient.keep`."""
        await self._client.keep(name, ids, context, namespace)
        return await self.named(name)

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

        return await _beside(fork)

    async def remove(self, name: str) -> None:
        """Forget the name, and what only it needed; answers under way keep what they use. Raises UnknownContextError,
        StoreError.
        """

        def remove() -> None:
            self._store.remove(name)
            self._store.gc()

        await _beside(remove)


async def _beside(work: Callable[[], Result]) -> Result:
    """In a thread: it waits for a disk."""
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        raise StoreError(str(error)) from error
