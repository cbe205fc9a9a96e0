"""KVReplica: data that follows the keys and values of a sequence, such as a copy in another format or sums over them.

A `SequenceKV` holds the replicas of one sequence and forks them; a `Segment` holds those that forks share with it. Both
call every replica that they hold, so that cropping, forking, forgetting and saving are written once. A new kind is a
subclass with `@register_replica`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import HeldMemory

Owner = TypeVar("Owner")
State = tuple[dict[str, Any], Mapping[str, npt.NDArray[Any]]]
"""Plain JSON values, and arrays of numbers by name."""


class KVReplica(ABC, Generic[Owner]):
    """One replica of the tokens of its owner, a `SequenceKV` or a `Segment`, which is an argument of every call.

    A replica may have fewer tokens than its owner and add the missing ones when they are needed. Tokens that the owner
    has dropped must not remain.

    Attributes:
        kind: registered name; the key in `replicas` of the owner and in saved contexts.
        of_segments: whether segments hold this kind. Their replicas are not forked and not saved.
        from_device: whether `append_device` takes tokens.
        reclaimable: whether the memory is freed if a text needs it.
    """

    kind: ClassVar[str]
    of_segments: ClassVar[bool] = False
    from_device: ClassVar[bool] = False
    reclaimable: ClassVar[bool] = False

    @classmethod
    def of_empty(cls, owner: Owner) -> Self | None:
        """Return the replica of a new, empty owner. None: it gets one later, or none."""
        return None

    @classmethod
    def of_prefill(cls, path: Any, keys: Any, values: Any) -> Self | None:
        """Allocate the replica of the segment that a `SequenceKV` will begin. None: there is none.

        keys, values: its first tokens, (kv_heads, n, dim) tensors on the device that computed them.
        """
        return None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of the owner's first tokens after which the replica has none."""

    @property
    @abstractmethod
    def nbytes(self) -> HeldMemory:
        """Bytes of host and device memory."""

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Hashable values that change when a planned step must be planned again."""
        return ()

    def attach(self, owner: Owner, start: int) -> None:
        """Become a replica of `owner` from its token `start` on."""

    def append(self, owner: Owner, start: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Follow tokens that `owner` has appended from its token `start` on.

        keys, values: (kv_heads, n, width) as stored in host memory; views, which must be copied to be kept.
        """

    def append_device(self, owner: Owner, start: int, keys: Any, values: Any) -> None:
        """Follow the same tokens by tensors (kv_heads, n, dim) on the device that computed them, its current stream.

        Tokens before `start` may lack, too.
        """

    def follow_copy(self, segment: Any, copy: Any) -> None:
        """Know the tokens of `copy`, which begins with those of `segment`, as they are known in `segment`."""

    @abstractmethod
    def truncate(self, owner: Owner, length: int) -> bool:
        """Drop the tokens from `length` on; `owner` drops them afterwards. False: a segment must keep them, frozen."""

    def fork(self) -> Self:
        """Return the replica of a fork. Both may go on; what they share must not change."""
        return self

    def forget(self, owner: Owner, start: int, stop: int) -> Self:
        """Return the replica of an owner of which nothing but tokens [start, stop) is retrieved from now on.

        This replica stays as it is, for a rollback.
        """
        return self

    def allocations(self, segments: Container[Any]) -> dict[int, HeldMemory]:
        """Return bytes by the identity of their memory, which replicas may share, as far as they are of `segments`."""
        return {id(self): self.nbytes}

    def copy_to_host(self) -> None:
        """Copy device memory to host memory, once, so that `offload` need not."""

    def offloadable_bytes(self, segments: Iterable[Any]) -> int:
        """Return the bytes of device memory of `segments` that `offload` would free. Fast: engines ask often."""
        return 0

    def offload(self, segments: Iterable[Any]) -> None:
        """Free this device memory until it is needed again."""

    def mark(self, owner: Owner) -> Any:
        """Return the extent of what is saved now; a later `state` skips it."""
        return None

    def state(self, owner: Owner, since: int, tokens: Sequence[int], mark: Any) -> State:
        """Return what `restored` needs, beyond `mark` if it is not None.

        since: number of spans of the owner that were saved before. tokens: saved tokens of the segment of each span.
        Arrays have names that begin with a name of their own; what they contain must not change any more.
        """
        raise ConfigError(f"replicas of kind {self.kind!r} cannot be saved; implement state() and restored()")

    @classmethod
    def restored(cls, owner: Owner, plain: Any, arrays: Mapping[str, npt.NDArray[Any]], earlier: Self | None) -> Self:
        """Return the replica with this state. earlier: the one that earlier states of the chain restored.

        Raises InputDataError for a state that does not fit.
        """
        raise ConfigError(f"replicas of kind {cls.kind!r} cannot be restored; implement state() and restored()")


_kinds: dict[str, type[KVReplica[Any]]] = {}
Replica = TypeVar("Replica", bound=type[KVReplica[Any]])


def register_replica(cls: Replica) -> Replica:
    """Have every new path, or every segment, hold a replica of this class. Raises ConfigError for a name in use."""
    if _kinds.setdefault(cls.kind, cls) is not cls:
        raise ConfigError(f"replica {cls.kind!r} is already {_kinds[cls.kind].__qualname__}; choose another name")
    return cls


def replica_kinds(*, of_segments: bool) -> list[type[KVReplica[Any]]]:
    """Return the registered kinds that segments hold, or those that paths hold, in order of registration."""
    return [cls for cls in _kinds.values() if cls.of_segments == of_segments]


Replicas = dict[str, KVReplica[Any] | None]
"""Replicas of one owner by kind; None for a kind that it does not have now."""


def new_replicas(owner: Any, *, of_segments: bool) -> Replicas:
    """Return the replicas of a new, empty owner."""
    return {cls.kind: cls.of_empty(owner) for cls in replica_kinds(of_segments=of_segments)}


def present(replicas: Replicas) -> list[KVReplica[Any]]:
    """Return the replicas that there are. Another thread may set one meanwhile."""
    return [one for one in list(replicas.values()) if one is not None]


def total_memory(parts: Iterable[HeldMemory]) -> HeldMemory:
    """Add up."""
    host = device = 0
    for part in parts:
        host, device = host + part.host, device + part.device
    return HeldMemory(host, device)


def array_memory(arrays: Iterable[npt.NDArray[Any] | None]) -> dict[int, HeldMemory]:
    """Return the allocations of arrays in host memory, without None."""
    return {id(one): HeldMemory(one.nbytes) for one in arrays if isinstance(one, np.ndarray)}
