"""Prefix cache: a radix tree over token ids, so that each prefix is prefilled, stored and indexed once. No torch.

As in RadixAttention (SGLang), but a node is a whole span of 10^2 to 10^6 tokens with an index of its own. Splits are
logical: a child may begin inside a node's span, and a payload is never cut.
"""

from __future__ import annotations

import functools
import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.engine.ids import Ids, common, int32_row
from retrieval_attn.engine.inflight_prefills import InflightPrefills, PrefillClaim
from retrieval_attn.engine.node import (
    Branches,
    Namespace,
    Node,
    Offloadable,
    Payload,
    Place,
    PrefixCacheError,
    SessionPins,
    Sizes,
)
from retrieval_attn.engine.resident_set import LEAST_OFFLOADED, ResidentSet
from retrieval_attn.errors import ConfigError, ShapeError

log = logging.getLogger(__name__)
__all__ = ["Lease", "Match", "RadixCache", "PrefixCacheStats", "ending", "longest"]


class Lease:
    """Locks a node and its ancestors against eviction until `release` or the end of `with`. Thread-safe."""

    __slots__ = ("_give_back", "node", "open")

    def __init__(self, node: Node, give_back: Callable[[Lease], None]) -> None:
        """give_back: callback of the tree, which sets `open`, so that only the first release counts."""
        self.node = node
        self.open = True
        self._give_back = give_back

    def __repr__(self) -> str:
        return f"Lease({self.node!r}, {'open' if self.open else 'released'})"

    def release(self) -> None:
        """Unlock the node. Further calls change nothing."""
        self._give_back(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Match(NamedTuple):
    """Longest cached prefix of a prompt; the root if none is cached.

    Attributes:
        node, tokens: last node, and matching tokens of its span.
        length: tokens of the prefix.
        lease: lease on the node, if requested.
    """

    node: Node
    tokens: int
    length: int
    lease: Lease | None = None

    @property
    def place(self) -> Place:
        """Place in the tree where the rest of the prompt begins."""
        return Place(self.node, self.tokens)


def longest(root: Node, ids: Ids, namespace: Namespace) -> Match:
    """Return the longest match of the ids; of equal ones, one whose span ends there, then the one found first.

    Every id is compared. A node is visited only if its first tokens agree, so the cost is O(tokens + nodes of the
    path), plus one visit for each node that doubles another's span.
    """
    best, most = (root, 0), (0, True)

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best, most
        found = node.start + tokens, tokens == len(node)
        if found > most:
            best, most = (node, tokens), found
        return found == (len(ids), True)

    _walk(root, ids, namespace, visit)
    return Match(*best, most[0])


def ending(root: Node, ids: Ids, namespace: Namespace) -> Node | None:
    """Return a node whose span ends with the ids, all of which agree. A node of the namespace itself is preferred."""
    best: Node | None = None

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best
        if tokens == len(node) and node.end == len(ids) and node.parent is not None:
            own = node.namespace == namespace
            if best is None or (own and best.namespace != namespace):
                best = node
            return own
        return False

    _walk(root, ids, namespace, visit)
    return best


def _walk(root: Node, ids: Ids, namespace: Namespace, visit: Callable[[Node, int], bool]) -> None:
    """Call `visit` with each node that agrees with the ids and the number of matching tokens, until it returns True."""
    namespaces = (None,) if namespace is None else (None, namespace)
    stack = [root]
    while stack:
        node = stack.pop()
        rest = ids[node.start :]
        tokens = common(node.ids, rest)
        if visit(node, tokens):
            return
        if node.branches is not None:
            for name in namespaces:
                stack += node.branches.behind(name, tokens, rest)


class PrefixCacheStats(NamedTuple):
    """Counts of a prefix cache.

    Attributes:
        prefix_entries_resident: nodes of the tree.
        nbytes: bytes of all entries.
        host_nbytes, device_nbytes, page_nbytes: bytes in host memory, on GPUs and in KV pages.
        prefix_lookups, prefix_tokens_queried: lookups, and tokens of the prompts that were looked up.
        hits, tokens_hit: lookups that found a cached prefix, and tokens of these prefixes.
        evicted, evicted_bytes: evicted entries and their bytes.
        offloaded, offloaded_bytes: entries that moved from GPU to host memory, and the bytes that this freed.
        reading, waiting: prefills in flight, and claims that wait for them.
    """

    prefix_entries_resident: int = 0
    nbytes: int = 0
    host_nbytes: int = 0
    device_nbytes: int = 0
    page_nbytes: int = 0
    prefix_lookups: int = 0
    hits: int = 0
    prefix_tokens_queried: int = 0
    tokens_hit: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    offloaded: int = 0
    offloaded_bytes: int = 0
    reading: int = 0
    waiting: int = 0

    def add_lookup(self, tokens: int, hit: int) -> PrefixCacheStats:
        """Return the counts with one more lookup.

        Args:
            tokens: length of the prompt.
            hit: length of its cached prefix.
        """
        return self._replace(
            prefix_lookups=self.prefix_lookups + 1,
            hits=self.hits + (hit > 0),
            prefix_tokens_queried=self.prefix_tokens_queried + tokens,
            tokens_hit=self.tokens_hit + hit,
        )

    def add_offload(self, nbytes: int) -> PrefixCacheStats:
        """Return the counts with one more offloaded entry that freed `nbytes` of GPU memory."""
        return self._replace(offloaded=self.offloaded + 1, offloaded_bytes=self.offloaded_bytes + nbytes)

    def add_eviction(self, entries: int, nbytes: int) -> PrefixCacheStats:
        """Return the counts with more evicted entries."""
        return self._replace(evicted=self.evicted + entries, evicted_bytes=self.evicted_bytes + nbytes)


class RadixCache:
    """Prefix cache with namespaces.

    A node is found by its first share_tokens tokens, or by all tokens of a shorter span. Fewer common tokens do not
    justify a shared parent, which could not be evicted before its last child. A namespace sees its own nodes and those
    of None.

    Thread-safe: every method holds one lock for at most some milliseconds. The engine's thread matches, inserts and
    evicts; prefill threads release leases and claims. A node without a lease may be evicted between two calls:
    `match(leased=True)` prevents that.
    """

    def __init__(
        self, *, share_tokens: int = 64, keep_session_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """keep_session_seconds: see `SessionPins`. clock: seconds; a given clock makes evictions deterministic.

        Raises ConfigError for share_tokens < 1.
        """
        if share_tokens < 1:
            raise ConfigError(f"share_tokens must be at least 1, but is {share_tokens}")
        self.root = Node(None, np.zeros(0, np.int32), None, 0)
        self._share_tokens = share_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._residents, self._pins = ResidentSet(), SessionPins(keep_session_seconds)
        self._pending = InflightPrefills(share_tokens)
        self._count = 0
        self._last_number = 0
        self._counts = PrefixCacheStats()

    def __len__(self) -> int:
        """Nodes without the root."""
        return self._count

    @property
    def sizes(self) -> Sizes:
        """Bytes of all payloads."""
        return self._residents.sizes

    @property
    def idle(self) -> Sizes:
        """Bytes of the payloads that no lease protects."""
        return self._residents.idle

    @property
    def stats(self) -> PrefixCacheStats:
        """Counts of the cache, taken under its lock."""
        with self._lock:
            host, device, pages = sizes = self._residents.sizes
            return self._counts._replace(
                prefix_entries_resident=self._count,
                nbytes=sizes.total,
                host_nbytes=host,
                device_nbytes=device,
                page_nbytes=pages,
                reading=len(self._pending),
                waiting=self._pending.waiting,
            )

    def latest(self, namespace: Namespace, most: int) -> list[Node]:
        """Return up to `most` nodes with payloads, the last used first. namespace: of the nodes; None: all."""
        with self._lock:
            nodes = (node for node in self._residents if namespace is None or node.namespace == namespace)
            return heapq.nlargest(most, nodes, key=lambda node: node.used)

    def match(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        namespace: Namespace,
        *,
        leased: bool = False,
        again: bool = False,
    ) -> Match:
        """Return the longest cached prefix, at most all ids but the last, whose logits start the answer.

        Args:
            ids: the prompt.
            namespace: namespace of the request.
            leased: add a lease on the node.
            again: the request was looked up before and is not counted again.

        Raises ShapeError unless ids are one row of integers.
        """
        given = int32_row(ids)
        with self._lock:
            found = longest(self.root, given[:-1], namespace)
            if not again:
                self._counts = self._counts.add_lookup(len(given), found.length)
                self._residents.count_use(found.node)
            return found._replace(lease=self._lease(found.node)) if leased else found

    def insert(
        self,
        parent: Node | Place | Match,
        ids: Sequence[int] | NDArray[np.integer],
        held: Payload,
        namespace: Namespace,
        *,
        rebuild_seconds: float = 0.0,
    ) -> Node:
        """Insert the node of a span after a place of the tree; for a node, after its whole span.

        An existing node with the same ids is returned with its own payload: `node.held is not held`. A span that
        overlaps an existing one becomes a separate node.

        Raises:
            PrefixCacheError: the parent was evicted.
            ConfigError: the parent belongs to another namespace.
            ShapeError: no ids, or a place so near the parent's start that no match reaches it.
        """
        span = int32_row(ids).copy()
        span.flags.writeable = False
        place = _place(parent)
        with self._lock:
            _must_take(place, span, namespace, self._share_tokens)
            whole = np.concatenate((place.node.prefix(place.at), span))
            node = ending(self.root, whole, namespace)
            if node is None:
                node = self._new(place, span, namespace)
                self._residents.add(node, held, rebuild_seconds)
            node.used = self._clock()
            return node

    def pending(
        self,
        parent: Node | Place | Match,
        ids: Sequence[int] | NDArray[np.integer],
        namespace: Namespace,
        *,
        matched: int = 0,
    ) -> PrefillClaim:
        """Claim the prefill of ids, the rest of a prompt after a match: own it, or wait for an in-flight prefill that
        covers it.

        Keep the match leased. If the tree has a longer match by now, the claim's future is resolved with the node, and
        the request matches again. Raises as `insert`.

        matched: tokens of the request's last match, if it continues fewer of them.
        """
        rest = int32_row(ids)
        place = _place(parent)
        with self._lock:
            _must_take(place, rest, namespace, self._share_tokens)
            whole = np.concatenate((place.node.prefix(place.at), rest))
            found = longest(self.root, whole[:-1], namespace)
            if found.length > max(place.length, matched):
                claim = PrefillClaim(self._pending, whole, place.length, namespace)
                claim.future.set_result(found.node)
                return claim
            return self._pending.claim(whole, place.length, namespace)

    def lease(self, node: Node) -> Lease:
        """Lock a node and its ancestors and update their last use. Raises PrefixCacheError if it was evicted."""
        with self._lock:
            return self._lease(node)

    def evict(
        self,
        need: Sizes,
        limit: Sizes | None = None,
        *,
        waiting: Mapping[Node, int] | None = None,
        keeps: Callable[[Node], bool] | None = None,
        release: Callable[[list[Payload]], object] | None = None,
    ) -> Sizes:
        """Evict payloads until `need` bytes of each kind are free or no candidate is left. Returns the freed bytes.

        Order: leaves larger than `limit`, leaves with bytes of a lacking kind by their hits (`ResidentSet`), then their
        parents; those of recent sessions (`SessionPins`) last. Leased nodes stay.

        Args:
            need: bytes of each kind.
            limit: bytes that all entries together may have; None: no limit.
            waiting: nodes that waiting requests continue, evicted last, with positions in the queue.
            keeps: returns whether a node stays for now; its bytes count as freed. Called under the lock.
            release: gets a list of what is evicted, and clears it soon: host memory of 13 GB takes .8 s to free. None,
                or if it has GPU memory or pages: it is freed now.
        """
        freed, dropped, gone = Sizes(), 0, list[Payload]()
        with self._lock:
            for node in self._residents.victims(need, limit, waiting, self._pins.nodes(self._clock())):
                if node.held_children or (keeps is not None and keeps(node)):
                    continue
                freed = freed.plus(node.sizes)
                gone += [] if node.held is None else [node.held]
                self._residents.drop(node)
                self._pins.note_eviction(node)
                dropped += 1
                self._prune(node)
            self._counts = self._counts.add_eviction(dropped, freed.total)
        if release is not None and gone and not freed.pages and freed.device <= dropped * LEAST_OFFLOADED:
            release(gone)
        return freed

    def superseded(self, leases: Sequence[Lease], start: int) -> list[Node]:
        """Return the node of the first lease and its ancestors, deepest first, as far as nothing but these leases needs
        their payloads once another node has all of their tokens: no other request, and no other child. Those up to
        `start` ids stay.
        """
        found, node, children = list[Node](), leases[0].node, 0
        with self._lock:
            while node.end > start and node.held_children == children and node.held is not None:
                if node.refs > sum(node in one.node.path() for one in leases):
                    break
                found.append(node)
                if node.parent is None or node.at < len(node.parent):
                    break
                node, children = node.parent, 1
        return found

    def supersede(self, nodes: Sequence[Node], heir: Node) -> None:
        """Drop the payloads of nodes whose tokens `heir` has as well, deepest first. Those in use again stay."""
        with self._lock:
            for node in nodes:
                if node.held is not None and not node.refs and not node.held_children:
                    self._residents.supersede(node, heir)
                    self._pins.note_eviction(node)
                    self._prune(node)

    def offload(self, device: int, *, copied: bool | None = None) -> int:
        """Have idle entries move to host memory until `device` bytes of GPU memory are free, the last used one last.

        Returns the freed bytes. An entry is moved without the lock; a request may lease it meanwhile. copied: True:
        only entries whose offload copies nothing.
        """
        freed, tried = 0, set[int]()
        while freed < device and (found := self._next_to_offload(tried, copied=copied)) is not None:
            lease, held, before = found
            try:
                held.offload()
            finally:
                with self._lock:
                    self._residents.recount(lease.node)
                    more = before - lease.node.sizes.device
                    self._counts = self._counts.add_offload(more)
                lease.release()
            freed += more
        return freed

    def copy_ahead(self) -> None:
        """Have all entries copy what their offload would copy, because requests wait for an offload.

        Leased entries, too: requests do not change them.
        """
        tried = set[int]()
        while (found := self._next_to_offload(tried, copied=False, leased=True)) is not None:
            lease, held, _ = found
            try:
                held.copy_to_host()
            except Exception:  # the offload copies it, and raises to those who wait
                log.warning("a cached text was not copied to host memory ahead of its offload", exc_info=True)
            finally:
                with self._lock:
                    self._residents.recount(lease.node)
                lease.release()

    def offload_copied(self, most: int) -> int:
        """Offload copied entries beyond `most` bytes of GPU memory. Return the excess that others can free."""
        over = self.sizes.device - most
        if over > 0:
            over -= self.offload(over, copied=True)
        with self._lock:
            return max(over, 0) if self._residents.next_to_offload((), copied=False) is not None else 0

    def _next_to_offload(
        self, tried: set[int], *, copied: bool | None, leased: bool = False
    ) -> tuple[Lease, Offloadable, int] | None:
        """Pin the next entry to offload and add it to `tried`. Returns its GPU memory, too."""
        with self._lock:
            found = self._residents.next_to_offload(tried, copied=copied, leased=leased)
            if found is None:
                return None
            node, held = found
            tried.add(node.number)
            return self._lease(node, is_use=False), held, node.sizes.device

    def victims(self, need: Sizes, waiting: Mapping[Node, int] | None = None) -> list[Node]:
        """Return the nodes that `evict` would evict, in its order."""
        with self._lock:
            return list(self._residents.victims(need, None, waiting, self._pins.nodes(self._clock())))

    def keep_session(self, session: str, namespace: Namespace, node: Node) -> None:
        """Have the node that a session continues be evicted last. Another one of this session no longer is."""
        with self._lock:
            if not node.gone and node.held is not None:
                self._pins.pin((namespace, session), node, self._clock())

    def pin(self, node: Node) -> Lease | None:
        """Lock a node and its ancestors without counting a use; None if the node was evicted."""
        with self._lock:
            return None if node.gone or node.held is None else self._lease(node, is_use=False)

    def recount(self, node: Node) -> None:
        """Count the bytes of a node and its ancestors again: some moved between GPU and host memory."""
        with self._lock:
            one: Node | None = node
            while one is not None:
                self._residents.recount(one)
                one = one.parent

    def reclaim(self, host: int, device: int) -> tuple[int, int]:
        """Free `host` and `device` bytes. Returns the freed bytes of each.

        Entries that hold GPU memory move to host memory first, and are evicted if that is not enough.
        """
        offloaded = self.offload(device)
        freed = self.evict(Sizes(host, max(0, device - offloaded)))
        return freed.host, freed.device + offloaded

    def idle_device_bytes(self) -> int:
        """Return the GPU memory of entries without a lease on them or below them."""
        return self._residents.idle.device

    def _new(self, place: Place, span: Ids, namespace: Namespace) -> Node:
        self._last_number += 1
        self._count += 1
        parent, at = place
        node = Node(place, span, namespace, self._last_number)
        if parent.branches is None:
            parent.branches = Branches(self._share_tokens)
        parent.branches.add(node, doubles=at < len(parent) and parent.ids[at] == span[0])
        return node

    def _lease(self, node: Node, *, is_use: bool = True) -> Lease:
        """Lock a node and its ancestors. is_use: count their last use, now and at the release."""
        _must_be_here(node)
        node.leases += 1
        self._refer(node, 1, is_use=is_use)
        return Lease(node, functools.partial(self._give_back, is_use=is_use))

    def _give_back(self, lease: Lease, *, is_use: bool) -> None:
        with self._lock:
            if lease.open:
                lease.open = False
                lease.node.leases -= 1
                self._refer(lease.node, -1, is_use=is_use)
                self._prune(lease.node)

    def _refer(self, node: Node | None, more: int, *, is_use: bool) -> None:
        now = self._clock()
        while node is not None:
            self._residents.refer(node, more)
            node.used = now if is_use else node.used
            node = node.parent

    def _prune(self, node: Node) -> None:
        """Remove a node without payload, children and leases, then its parents of the same kind."""
        while not (node.in_memory or node.refs or node.branches):
            parent = node.parent
            assert parent is not None and parent.branches is not None
            parent.branches.remove(node)
            if not parent.branches:
                parent.branches = None
            node.gone = True
            self._count -= 1
            node = parent


def _must_take(place: Place, span: Ids, namespace: Namespace, share_tokens: int) -> None:
    _must_be_here(place.node)
    _check_place(place, share_tokens)
    if not len(span):
        raise ShapeError("a node needs at least one token, but none was given")
    if place.node.namespace is not None and place.node.namespace != namespace:
        raise ConfigError("a node must have its parent's namespace, or a parent that is everybody's")


def _must_be_here(node: Node) -> None:
    if node.gone:
        raise PrefixCacheError(f"{node!r} was evicted; match again, and keep a lease on what is used")


def _check_place(place: Place, share_tokens: int) -> None:
    node, at = place
    least = min(share_tokens, len(node))
    if not least <= at <= len(node):
        raise ShapeError(f"a place in {node!r} must be behind {least} to {len(node)} of its tokens, but is at {at}")


def _place(parent: Node | Place | Match) -> Place:
    if isinstance(parent, Node):
        return Place(parent, len(parent))
    return parent.place if isinstance(parent, Match) else parent
